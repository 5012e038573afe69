"""The command as a whole: help, version, and how every error leaves."""

from __future__ import annotations

import os
import subprocess
import sys

import click
import pytest

from sparkguard import __version__, cli
from sparkguard.cli import VERBS, main
from sparkguard.errors import STATUSES, SparkguardError


def raising(error: BaseException) -> click.Command:
    @click.command("status")
    def command() -> int:
        raise error

    return command


def run_raising(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(cli.Verbs, "get_command", lambda self, ctx, name: raising(error))
    return main(["status"])


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """--version prints the package's."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"sparkguard {__version__}\n"


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_names_every_verb_and_status(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The overview has each verb with what it is for, and the table of exit statuses."""
    assert main([option]) == 0
    out = capsys.readouterr().out
    lines = out.split("Commands:\n")[1].split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in lines] == list(VERBS)
    assert all(len(line.split()) > 2 for line in lines)
    for status, (_, meaning) in STATUSES.items():
        assert f"{status:<4} {meaning}" in out


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_help_with_examples(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What it does, its options, examples of itself, and its exit statuses, within 100 columns where it is prose."""
    assert main([verb, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Usage: sparkguard {verb} ")
    examples = out.split("examples:\n")[1].split("\n\n")[0]
    assert len([line for line in examples.splitlines() if f"sparkguard {verb}" in line]) >= 2
    assert "exit status:\n    0    admitted, or done\n" in out
    assert all(not line.rstrip().endswith("None") for line in out.splitlines())


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_is_loaded_only_when_it_is_used(verb: str) -> None:
    """A verb's import costs the others nothing."""
    code = (
        "import sys; from sparkguard.cli import VERBS, main; main(['completion', 'bash'])\n"
        f"loaded = VERBS[{verb!r}] in sys.modules\nsys.exit(loaded != ({verb!r} == 'completion'))"
    )
    assert subprocess.run([sys.executable, "-I", "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_python_m() -> None:
    """python -m sparkguard is the same command."""
    done = subprocess.run([sys.executable, "-I", "-m", "sparkguard", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"sparkguard {__version__}\n"


@pytest.mark.parametrize(
    "words", [["nosuch"], ["status", "--nosuch"], ["status", "--watch", "soon"], ["completion", "csh"], ["check"]]
)
def test_bad_usage_is_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """It is said on stderr, with the way to the help, and stdout stays empty."""
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "--help" in err


def test_an_expected_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its message and hint go to stderr, and its status is the command's; nothing in it can steer the terminal."""
    assert run_raising(SparkguardError("no \x1b[31mroom", "stop it", 75), monkeypatch) == 75
    out, err = capsys.readouterr()
    assert (out, err) == ("", "sparkguard: no \\x1b[31mroom\n  stop it\n")


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """130, as the shell has it."""
    assert run_raising(KeyboardInterrupt(), monkeypatch) == 130


def test_a_bug(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Any other exception is ours: the traceback, one line that says so, and 70."""
    assert run_raising(ZeroDivisionError("oops"), monkeypatch) == 70
    err = capsys.readouterr().err
    assert "ZeroDivisionError: oops" in err
    assert err.splitlines()[-1] == f"sparkguard {__version__}: this is a bug in sparkguard; the lines above say where"


@pytest.mark.parametrize(("no_color", "coloured"), [("1", False), ("", True)])
def test_no_color(no_color: str, coloured: bool) -> None:
    """NO_COLOR with any value takes the colours away, on a terminal too."""
    main_end, child_end = os.openpty()
    env = {**os.environ, "NO_COLOR": no_color, "TERM": "xterm"}
    done = subprocess.run([sys.executable, "-I", "-m", "sparkguard", "config"], env=env, stdout=child_end, check=False)
    os.close(child_end)
    text = os.read(main_end, 65536)
    os.close(main_end)
    assert done.returncode == 0
    assert (b"\x1b[" in text) == coloured


def test_a_pipe_gets_no_colours(capsys: pytest.CaptureFixture[str]) -> None:
    """What is no terminal gets plain text."""
    assert main(["config"]) == 0
    assert "\x1b" not in capsys.readouterr().out
