"""A second kind of client, behind the same interface: an .env file."""

from __future__ import annotations

import subprocess

import pytest

from sparkguard.cluster.clients import EnvFile, Target
from sparkguard.errors import SparkguardError

TARGET = Target("spark", "http://spark.local:8000/v1", "org/model-1", 4096)
BOTH = "OPENAI_BASE_URL=http://spark.local:8000/v1\nOPENAI_MODEL=org/model-1\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", BOTH),
        ("OPENAI_API_KEY=sk-x\n", "OPENAI_API_KEY=sk-x\n" + BOTH),
        ("A=1", "A=1\n" + BOTH),
        ("A=1\r\n", "A=1\r\n" + BOTH.replace("\n", "\r\n")),
        (BOTH, BOTH),
        (
            "# mine\nexport OPENAI_MODEL='old one'  # why\nOPENAI_BASE_URL = x\nB=2\n",
            "# mine\nexport OPENAI_MODEL=org/model-1  # why\nOPENAI_BASE_URL =http://spark.local:8000/v1\nB=2\n",
        ),
        (
            "OPENAI_MODEL=a # b\nOPENAI_MODEL=c\n",
            f"OPENAI_MODEL=org/model-1 # b\nOPENAI_MODEL=org/model-1\n{BOTH.splitlines()[0]}\n",
        ),
        ("A='x\nOPENAI_MODEL=no\n'\n", "A='x\nOPENAI_MODEL=no\n'\n" + BOTH),
    ],
)
def test_two_lines_and_no_other(text: str, expected: str) -> None:
    """Comments, exports, line ends, other names, and values of several lines are as they were."""
    assert EnvFile().retarget(text, TARGET) == expected


def test_a_shell_reads_what_was_written() -> None:
    """Also of an id with blanks and dollars."""
    text = EnvFile().retarget("OPENAI_MODEL=x\n", TARGET.replace(served="my $model (v1)"))
    done = subprocess.run(["sh", "-c", f'{text}\nprintf %s "$OPENAI_MODEL"'], capture_output=True, text=True, check=True)
    assert done.stdout == "my $model (v1)"


def test_what_cannot_be_written_is_refused() -> None:
    """A quote or a line end in an id, and a value whose quote is not closed."""
    for served in ("a'b", "a\nb"):
        with pytest.raises(SparkguardError):
            EnvFile().retarget("", TARGET.replace(served=served))
    with pytest.raises(SparkguardError) as caught:
        EnvFile().retarget("OPENAI_MODEL='sk-secret\n", TARGET)
    assert "sk-secret" not in caught.value.message
