"""The settings of the runners, read from the SPARK_ rows of sparkguard/settings.py into what they mean."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from sparkguard.core.record import Record
from sparkguard.core.reserve import runner_reserve
from sparkguard.core.types import MemoryPool
from sparkguard.settings import Settings

_MIB = 1 << 20
_TRUE, _FALSE = ("true", "1", "on", "yes"), ("false", "0", "off", "no")


class RunnerSettings(Record):
    """All of them, checked. Seconds, bytes and shares have their unit in the name."""

    host: str
    port: int
    api_key_file: str
    llama_server: str
    models_dir: str
    device: str  # auto, cpu, cuda, cuda:N
    cuda_devices: tuple[int, ...] | None  # None: all
    cpu_runners: bool | None  # None: only without a CUDA device
    threads: int
    memory_reserve_bytes: int | None  # None, here and of a GPU: the usual one (core/reserve.py)
    vram_reserve_bytes: int | None
    most_loaded: int
    idle_seconds: float
    queue_limit: int
    hang_seconds: float
    host_experts: bool
    expert_cache_percent: float
    log_level: int
    cpu_share: int  # billionths of the usable cores (VLLM_CPU_SHARE)

    def reserve_of(self, pool: MemoryPool) -> int:
        """What stays free of it."""
        return runner_reserve(pool, self.memory_reserve_bytes, self.vram_reserve_bytes)


# What each row is read into; read() and `sparkguard config` share it.
READERS: dict[str, Callable[[Settings], Any]] = {
    "SPARK_HOST": lambda settings: _host(settings),
    "SPARK_PORT": lambda settings: _whole(settings, "SPARK_PORT", 1, 65535),
    "SPARK_DEVICE": lambda settings: _device(settings),
    "SPARK_CUDA_DEVICES": lambda settings: _numbers(settings),
    "SPARK_CPU_RUNNERS": lambda settings: _auto(settings),
    "SPARK_THREADS": lambda settings: _whole(settings, "SPARK_THREADS", 0, 4096),
    "SPARK_VRAM_RESERVE_MB": lambda settings: _vram_reserve(settings),
    "SPARK_MAX_LOADED_MODELS": lambda settings: _whole(settings, "SPARK_MAX_LOADED_MODELS", 0, 1 << 20),
    "SPARK_IDLE_UNLOAD_MINUTES": lambda settings: _number(settings, "SPARK_IDLE_UNLOAD_MINUTES", 0, 1e7) * 60,
    "SPARK_QUEUE_LIMIT": lambda settings: _whole(settings, "SPARK_QUEUE_LIMIT", 1, 1 << 20),
    "SPARK_RUNNER_HANG_SECONDS": lambda settings: _number(settings, "SPARK_RUNNER_HANG_SECONDS", 0, 1e7, above=True),
    "SPARK_HOST_EXPERTS": lambda settings: _flag(settings, "SPARK_HOST_EXPERTS"),
    "SPARK_EXPERT_CACHE_PERCENT": lambda settings: _number(settings, "SPARK_EXPERT_CACHE_PERCENT", 0, 100),
    "SPARK_LOG_LEVEL": lambda settings: int(getattr(logging, settings.choice("SPARK_LOG_LEVEL").upper())),
}


def read(settings: Settings) -> RunnerSettings:
    """Raises SparkguardError for the first value that is none."""
    values = {key: reader(settings) for key, reader in READERS.items()}
    return RunnerSettings(
        host=values["SPARK_HOST"],
        port=values["SPARK_PORT"],
        api_key_file=settings.text("SPARK_API_KEY_FILE"),
        llama_server=settings.text("SPARK_LLAMA_SERVER"),
        models_dir=settings.text("MODELS_DIR"),
        device=values["SPARK_DEVICE"],
        cuda_devices=values["SPARK_CUDA_DEVICES"],
        cpu_runners=values["SPARK_CPU_RUNNERS"],
        threads=values["SPARK_THREADS"],
        memory_reserve_bytes=settings.reserve_bytes(),
        vram_reserve_bytes=values["SPARK_VRAM_RESERVE_MB"],
        most_loaded=values["SPARK_MAX_LOADED_MODELS"],
        idle_seconds=values["SPARK_IDLE_UNLOAD_MINUTES"],
        queue_limit=values["SPARK_QUEUE_LIMIT"],
        hang_seconds=values["SPARK_RUNNER_HANG_SECONDS"],
        host_experts=values["SPARK_HOST_EXPERTS"],
        expert_cache_percent=values["SPARK_EXPERT_CACHE_PERCENT"],
        log_level=values["SPARK_LOG_LEVEL"],
        cpu_share=settings.share("VLLM_CPU_SHARE"),
    )


def _vram_reserve(settings: Settings) -> int | None:
    if not settings.text("SPARK_VRAM_RESERVE_MB"):
        return None
    return _whole(settings, "SPARK_VRAM_RESERVE_MB", 0, 1 << 30) * _MIB


def _host(settings: Settings) -> str:
    host = settings.text("SPARK_HOST").strip()
    try:
        host.encode("idna")  # as whoever connects or listens will
        is_name = not any(c.isspace() or c == "/" for c in host)
    except UnicodeError:
        is_name = False
    if not host or not is_name:
        raise settings.error("SPARK_HOST", "is no address")
    return host


def _device(settings: Settings) -> str:
    device = settings.text("SPARK_DEVICE")
    if not is_device(device):
        raise settings.error("SPARK_DEVICE", "is no device")
    return device


def is_device(text: str) -> bool:
    number = text.removeprefix("cuda:")
    return text in ("auto", "cpu", "cuda") or (number != text and number.isascii() and number.isdigit() and len(number) < 4)


def _numbers(settings: Settings) -> tuple[int, ...] | None:
    text = settings.text("SPARK_CUDA_DEVICES").strip()
    if text == "all":
        return None
    words = [word.strip() for word in text.split(",")] if text else []
    if not all(word.isascii() and word.isdigit() and len(word) < 4 for word in words):
        raise settings.error("SPARK_CUDA_DEVICES", "is no list of numbers")
    return tuple(dict.fromkeys(map(int, words)))


def _auto(settings: Settings) -> bool | None:
    return None if settings.text("SPARK_CPU_RUNNERS") == "auto" else _flag(settings, "SPARK_CPU_RUNNERS")


def _flag(settings: Settings, key: str) -> bool:
    text = settings.text(key).lower()
    if text not in _TRUE + _FALSE:
        raise settings.error(key, "is neither true nor false")
    return text in _TRUE


def _whole(settings: Settings, key: str, least: int, most: int) -> int:
    text = settings.text(key).strip()
    if not (text.isascii() and text.isdigit() and len(text) < 12 and least <= int(text) <= most):
        raise settings.error(key, "is no such number")
    return int(text)


def _number(settings: Settings, key: str, least: float, most: float, above: bool = False) -> float:
    try:
        number = float(settings.text(key))
    except ValueError:
        number = math.nan
    if not least <= number <= most or (above and number == least):
        raise settings.error(key, "is no such number")
    return number
