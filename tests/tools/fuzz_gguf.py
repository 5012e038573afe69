"""Feeds the GGUF reader, and the estimate behind it, what coverage leads to: `python fuzz_gguf.py [libFuzzer's options] [SEEDS]`.

Ends with a traceback at the first header that brings forth anything but a model or a SparkguardError of status 78. A hole stands
for the weights, so that what a header claims may be there.
"""

from __future__ import annotations

import os
import sys

import atheris

with atheris.instrument_imports(include=["sparkguard.probe.gguf", "sparkguard.core"]):
    from sparkguard.core.estimate import Ask, estimate
    from sparkguard.errors import CONFIG, SparkguardError
    from sparkguard.probe.gguf import read_model

HOLE_BYTES = 1 << 30


def one(data: bytes) -> None:
    os.ftruncate(FILE, 0)
    os.pwrite(FILE, data, 0)
    os.ftruncate(FILE, HOLE_BYTES)
    try:
        estimate(read_model(f"/proc/self/fd/{FILE}"), Ask())
    except SparkguardError as error:
        assert error.status == CONFIG, error.message


FILE = os.memfd_create("fuzzed.gguf")
atheris.Setup(sys.argv, one)
atheris.Fuzz()
