"""Images that are derived on the nodes: what goes into one, and the name that says so. Pure.

One layer, of one archive in which nothing depends on when or where it was packed: two nodes that build it get the same
image, and pull compares their ids.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparkguard.cluster.catalog.entries import Build


def entrypoint_path(model: str) -> str:
    return f"/opt/spark-serve/{model}/start"


def entrypoint(build: Build) -> str:
    """The program that the container begins with: the publisher's patches in their order, then the engine."""
    lines = ["#!/bin/sh", "set -e", *(shlex.join(command) for command in build.before), f'exec {shlex.join(build.serve)} "$@"']
    return "\n".join(lines) + "\n"


def dockerfile(model: str, build: Build) -> str:
    """ADD unpacks the archive, so that its entries keep their times; a COPY would make folders of its own."""
    start = entrypoint_path(model)
    return (
        f'FROM {build.base}\nADD files.tar /\nLABEL sparkguard.inputs="{inputs(model, build)}"\nENTRYPOINT ["{start}"]\nCMD []\n'
    )


def inputs(model: str, build: Build) -> str:
    """A digest of all that goes in."""
    files = [[each.path, each.sha256] for each in build.files]
    whole = [build.base, files, entrypoint(build), entrypoint_path(model)]
    return hashlib.sha256(json.dumps(whole).encode()).hexdigest()


def tag(model: str, build: Build) -> str:
    """Other inputs, another name: an image that is there under it is the wanted one."""
    return f"spark-serve/{model.lower()}:{inputs(model, build)[:12]}"
