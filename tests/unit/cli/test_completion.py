"""Shell completion: the scripts, and what they offer."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from sparkguard.cli import main

if TYPE_CHECKING:
    from conftest import Place


@pytest.mark.parametrize(("shell", "mark"), [("bash", "complete -o nosort"), ("zsh", "compdef"), ("fish", "complete --no-files")])
def test_the_script(shell: str, mark: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is click's, for the command's own name."""
    assert main(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert mark in out
    assert "_SPARKGUARD_COMPLETE" in out


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_reads_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    """bash takes it without a word, and knows a completion for the command afterwards."""
    main(["completion", "bash"])
    script = capsys.readouterr().out + "\ncomplete -p sparkguard"
    done = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.endswith("sparkguard\n")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("sparkguard do", ["doctor"]),
        ("sparkguard why vllm-l", ["vllm-longcontext"]),
        ("sparkguard check my", ["mymodel"]),
        ("sparkguard plan vllm-v", ["vllm-vision-agent"]),
    ],
)
def test_what_is_offered(place: Place, words: str, offered: list[str]) -> None:
    """Verbs, the installed units, and the specs."""
    place.shipped_units()
    place.spec("mymodel", "")
    env = {**place.env, "_SPARKGUARD_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    code = "import sys; from sparkguard.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-I", "-c", code], env=env, capture_output=True, text=True, check=False)
    assert [line.partition(",")[2] for line in done.stdout.splitlines()] == offered
