"""What is a song and what is none."""

from __future__ import annotations

import array
import math
import re
import shutil
import wave
from pathlib import Path

import pytest

from spark_bench import audio

RATE = 8000


def write(path: Path, samples: list[int], width: int = 2, channels: int = 1) -> str:
    kinds = {1: "B", 2: "h", 4: "i"}
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(RATE)
        if width == 3:
            file.writeframes(b"".join(sample.to_bytes(3, "little", signed=True) for sample in samples))
        else:
            file.writeframes(array.array(kinds[width], samples).tobytes())
    return str(path)


def tone(seconds: float, loud: int = 10_000, middle: int = 0) -> list[int]:
    return [middle + int(loud * math.sin(at / 3)) for at in range(int(seconds * RATE))]


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_a_tone_passes(width: int, tmp_path: Path) -> None:
    """In each width of PCM that WAV has."""
    loud, middle = {1: (60, 128), 2: (10_000, 0), 3: (3_000_000, 0), 4: (800_000_000, 0)}[width]
    found = audio.check(write(tmp_path / "a.wav", tone(3, loud, middle), width), 2, 4)
    assert (found["ok"], found["seconds"], found["rate"]) == (True, 3.0, RATE)


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        ([0] * 3 * RATE, "silent: 0 of 3"),
        (tone(3, 30), "silent"),
        ([9000] * 3 * RATE, "silent"),
        (tone(1) + [0] * 2 * RATE, "silent: 1 of 3"),
        (tone(1), r"1\.0 s long, not 2\.0 to 4\.0"),
        (tone(5), r"5\.0 s long"),
        ([], "empty"),
    ],
    ids=["zeros", "noise", "a constant", "mostly silent", "short", "long", "empty"],
)
def test_what_is_no_song(samples: list[int], says: str, tmp_path: Path) -> None:
    """Silent, also around another middle or for most of its length; too short, too long, empty."""
    found = audio.check(write(tmp_path / "a.wav", samples), 2, 4)
    assert found["ok"] is False
    assert re.search(says, found["reason"])


def test_a_file_that_was_cut_off(tmp_path: Path) -> None:
    """Its header promises more than there is."""
    path = write(tmp_path / "a.wav", tone(3))
    content = Path(path).read_bytes()
    Path(path).write_bytes(content[: len(content) * 3 // 4])
    assert "cut off" in audio.check(path, 2, 4)["reason"]


def test_no_file(tmp_path: Path) -> None:
    """A job that ended well and wrote nothing."""
    assert audio.check(str(tmp_path / "a.wav"), 2, 4)["reason"] == "there is no audio"


def test_what_is_no_audio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ffmpeg it says that, since a song in another format may be one."""
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "a.wav").write_bytes(b"ID3 something")
    assert "no ffmpeg" in audio.check(str(tmp_path / "a.wav"), 2, 4)["reason"]


def test_ffmpeg_decodes_what_wave_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for 16-bit PCM, and its answer goes through the same gate."""
    good = write(tmp_path / "good.wav", tone(3))
    program = tmp_path / "ffmpeg"
    program.write_text(f'#!/bin/sh\nfor out; do :; done\n{shutil.which("cp")} {good} "$out"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "a.mp3").write_bytes(b"ID3 something")
    assert audio.check(str(tmp_path / "a.mp3"), 2, 4)["ok"] is True
