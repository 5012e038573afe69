"""What a llama-server says of itself, as builds of two years say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkguard.errors import SparkguardError
from sparkguard.probe.llama_server import SOCKETS, EngineDevice, ask, find, read_devices, read_flags, read_version

HELP = """\
----- common params -----

-h,    --help, --usage                  print usage and exit
-lv,   --verbosity, --log-verbosity N   Set the verbosity threshold.
                                        - 0: generic output
--log-colors [on|off|auto]              Set colored logging ('on', 'off', or 'auto', default: 'auto')
--mmproj-auto, --no-mmproj, --no-mmproj-auto
                                        whether to use multimodal projector file
--host HOST                             ip address to listen, or bind to an UNIX socket if the address ends with .sock
                                        --fake is named in a text only
"""


@pytest.mark.parametrize(
    ("text", "version", "build"),
    [
        ("version: 1 (571d0d5)\nbuilt with GNU 11.4.0 for Linux x86_64\n", "1 (571d0d5)", None),
        ("version: 4567 (abc1234)\n", "4567 (abc1234)", 4567),
        ("version: 0.1.0-dev (build 1, commit 7e4c0a9)\n", "0.1.0-dev (7e4c0a9)", None),
        ("ggml_cuda_init: found 1\nversion: 0.6.0-dev (build 11434, commit unknown)\n", "0.6.0-dev (unknown)", 11434),
        ("something else\n", "", None),
    ],
)
def test_versions(text: str, version: str, build: int | None) -> None:
    """A number below 1000 is that of a build without git, and says nothing."""
    assert read_version(text) == (version, build)


def test_flags() -> None:
    """Each that begins a line, with all its names; none from a description."""
    assert read_flags(HELP) == {
        "-h", "--help", "--usage", "-lv", "--verbosity", "--log-verbosity", "--log-colors", "--mmproj-auto", "--no-mmproj",
        "--no-mmproj-auto", "--host", ".sock", "-----",
    }  # fmt: skip


def test_devices() -> None:
    """Name, total and free; what is printed before is no device."""
    text = "  Device 0: x (1 MiB, 1 MiB free)\nAvailable devices:\n  CUDA0: NVIDIA H200 (143771 MiB, 143001 MiB free)\n"
    assert read_devices(text) == (EngineDevice("CUDA0", "NVIDIA H200", 143771 << 20, 143001 << 20),)
    assert read_devices("Available devices:\n  (none)\n") == ()


def server(path: Path, help: str = HELP, status: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        '--version) echo "version: 4567 (abc)" >&2;;\n'
        "--help) cat <<'E'\n" + help + "--list-devices    print list of available devices\nE\n;;\n"
        "--list-devices) printf 'ggml_cuda_init:\\n  Device 0: NVIDIA H200, compute capability 9.0, VMM: yes\\n"
        "Available devices:\\n  CUDA0: NVIDIA H200 (2 MiB, 1 MiB free)\\n';;\n"
        f"esac\nexit {status}\n"
    )
    path.chmod(0o755)
    return path


def test_a_server_is_asked(tmp_path: Path) -> None:
    """All there is to know of it in one record."""
    found = ask(str(server(tmp_path / "s")), {})
    assert (found.build, found.knows("--log-colors"), found.knows("--nope")) == (4567, True, False)
    assert found.devices[0].id == "CUDA0" and dict(found.capabilities) == {"NVIDIA H200": "9.0"}


def test_a_server_that_does_not_run(tmp_path: Path) -> None:
    """The message has its last words."""
    with pytest.raises(SparkguardError, match="--version ends with 3: version: 4567"):
        ask(str(server(tmp_path / "s", status=3)), {})
    with pytest.raises(SparkguardError, match="127"):
        ask(str(tmp_path / "none"), {})


def test_a_server_that_is_too_old(tmp_path: Path) -> None:
    """Without a Unix socket it must have a key, or there is nothing private to listen on."""
    with pytest.raises(SparkguardError, match="neither listen on a Unix socket nor take a key"):
        ask(str(server(tmp_path / "s", help="--host HOST  ip address\n")), {})
    keyed = ask(str(server(tmp_path / "k", help="--host HOST  ip address\n--api-key KEY  (env: LLAMA_API_KEY)\n")), {})
    assert not keyed.knows(SOCKETS) and keyed.knows("--api-key")


def test_where_it_is(tmp_path: Path) -> None:
    """SPARK_LLAMA_SERVER first, by path or by name; then PATH. Links are followed, so that /proc/PID/exe can be compared."""
    one, two = server(tmp_path / "x" / "llama-server"), server(tmp_path / "y" / "other")
    env = {"PATH": f"/no/such:{one.parent}:{two.parent}"}
    assert find("", env) == str(one)
    assert find("other", env) == str(two)
    (tmp_path / "link").symlink_to(two)
    assert find(str(tmp_path / "link"), {}) == str(two)
    with pytest.raises(SparkguardError, match="is no program"):
        find(str(tmp_path), env)
