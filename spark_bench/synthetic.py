"""A job that renders nothing: python -m spark_bench.synthetic REQUEST OUTPUT. It takes its time and writes a tone.

Time and length come from the job's seed alone, so that the same corpus is the same work at every level. What it shows is that
the experiment works, and never how fast a machine is.
"""

from __future__ import annotations

import array
import json
import math
import random
import sys
import time
import wave

RATE = 8000
SECONDS = 0.5  # of audio
LEAST, SPREAD = 0.02, 0.06  # seconds of work


def main(request: str, output: str) -> None:
    with open(request, encoding="utf-8") as file:
        job = json.load(file)
    chooser = random.Random(job["seed"])
    time.sleep(LEAST + SPREAD * chooser.random())
    step = 2 * math.pi * (200 + 400 * chooser.random()) / RATE
    samples = array.array("h", (int(20000 * math.sin(step * at)) for at in range(int(RATE * SECONDS))))
    if sys.byteorder == "big":
        samples.byteswap()
    with wave.open(output, "wb") as audio:
        audio.setnchannels(1)
        audio.setsampwidth(2)
        audio.setframerate(RATE)
        audio.writeframes(samples.tobytes())


if __name__ == "__main__":
    main(*sys.argv[1:])
