"""The gate: a job counts only where its audio can be decoded, is as long as it says and as it should be, and is not silent."""

from __future__ import annotations

import array
import os
import shutil
import subprocess
import sys
import tempfile
import wave
from typing import Any

# A second whose samples stay within this share of full scale is silence: 50 dB below.
SILENCE = 10 ** (-50 / 20)
LEAST_LOUD = 0.5  # of its seconds
FFMPEG_SECONDS = 120
_TYPES = {1: "B", 2: "h", 4: "i"}


def check(path: str, least_seconds: float, most_seconds: float) -> dict[str, Any]:
    """{"ok", "reason", "seconds", "rate", "channels", "loud"}: reason says why not; the others are None where not known."""
    if not os.path.isfile(path):
        return _no("there is no audio")
    try:
        return _wave(path, least_seconds, most_seconds)
    except (wave.Error, EOFError, OSError) as error:
        return _by_ffmpeg(path, least_seconds, most_seconds, str(error))


def _by_ffmpeg(path: str, least: float, most: float, why: str) -> dict[str, Any]:
    """Whatever else ffmpeg can decode, as 16 bits."""
    ffmpeg = shutil.which("ffmpeg")
    if ffmpeg is None:
        return _no(f"it is no PCM WAV ({why}), and there is no ffmpeg to decode it")
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "audio.wav")
        command = [ffmpeg, "-v", "error", "-nostdin", "-xerror", "-i", path, "-c:a", "pcm_s16le", out]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=FFMPEG_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return _no(f"ffmpeg: {error}")
        if done.returncode:
            return _no("ffmpeg cannot decode it: {}".format(done.stderr.decode("utf-8", "replace")[-200:].strip()))
        try:
            return _wave(out, least, most)
        except (wave.Error, EOFError, OSError) as error:
            return _no(f"what ffmpeg made of it is no WAV: {error}")


def _wave(path: str, least: float, most: float) -> dict[str, Any]:
    with wave.open(path) as audio:
        rate, channels, width, said = audio.getframerate(), audio.getnchannels(), audio.getsampwidth(), audio.getnframes()
        if rate <= 0 or channels <= 0 or said <= 0:
            return _no("it is empty")
        frames = loud = windows = 0
        while data := audio.readframes(rate):
            frames += len(data) // (channels * width)
            windows += 1
            loud += _swing(data, width) >= 2 * SILENCE
    found = {"seconds": round(frames / rate, 3), "rate": rate, "channels": channels, "loud": round(loud / max(1, windows), 3)}
    if frames < said:
        return _no(f"it is cut off: {frames} of {said} frames", found)
    if not least <= frames / rate <= most:
        return _no(f"it is {frames / rate:.1f} s long, not {least:.1f} to {most:.1f}", found)
    if loud < LEAST_LOUD * windows:
        return _no(f"it is silent: {loud} of {windows} seconds are not", found)
    return dict(found, ok=True, reason=None)


def _swing(data: bytes, width: int) -> float:
    """From the lowest sample to the highest, as a share of half the scale: a constant is silence too."""
    if width == 3:  # the upper two bytes of each are enough
        data, width = b"".join(data[at + 1 : at + 3] for at in range(0, len(data) - 2, 3)), 2
    samples = array.array(_TYPES[width], data[: len(data) - len(data) % width])
    if sys.byteorder == "big" and width > 1:
        samples.byteswap()
    return (max(samples) - min(samples)) / float(1 << (8 * width - 1)) if samples else 0.0


def _no(reason: str, found: dict[str, Any] | None = None) -> dict[str, Any]:
    return dict(found or {"seconds": None, "rate": None, "channels": None, "loud": None}, ok=False, reason=reason)
