"""Takes one file out of a wheel into a folder, whole or not at all: unpack.py WHEEL NAME FOLDER. Not every machine has unzip."""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path


def main(wheel: str, name: str, folder: str) -> None:
    part = Path(folder, f"{name}.part")
    with zipfile.ZipFile(wheel) as archive, part.open("wb") as file:
        member = next(member for member in archive.namelist() if member.endswith(f"/{name}"))
        shutil.copyfileobj(archive.open(member), file)
    part.rename(part.with_suffix(""))


if __name__ == "__main__":
    main(*sys.argv[1:])
