"""The settings of the runners, read from the SPARK_ rows of sparkguard/settings.py into what they mean."""

from __future__ import annotations

import logging
import math

from sparkguard.core.record import Record
from sparkguard.core.types import DISCRETE, MemoryPool
from sparkguard.settings import Settings

_MIB = 1 << 20
_HOST_RESERVE_BYTES = 1024 * _MIB
_LEAST_VRAM_RESERVE_BYTES = 512 * _MIB
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
    memory_reserve_bytes: int
    vram_reserve_bytes: int | None
    most_loaded: int
    idle_seconds: float
    queue_limit: int
    hang_seconds: float
    host_experts: bool
    expert_cache_percent: float
    log_level: int

    def reserve_of(self, pool: MemoryPool) -> int:
        """What stays free. Unified memory is the host's, and keeps one reserve, not two."""
        if pool.kind != DISCRETE:
            return self.memory_reserve_bytes
        if self.vram_reserve_bytes is not None:
            return self.vram_reserve_bytes
        return max(_LEAST_VRAM_RESERVE_BYTES, (pool.total_bytes or 0) // 16)


def read(settings: Settings) -> RunnerSettings:
    """Raises SparkguardError for the first value that is none."""
    vram = settings.text("SPARK_VRAM_RESERVE_MB")
    reserve = settings.reserve_bytes()
    return RunnerSettings(
        host=_host(settings),
        port=_whole(settings, "SPARK_PORT", 1, 65535),
        api_key_file=settings.text("SPARK_API_KEY_FILE"),
        llama_server=settings.text("SPARK_LLAMA_SERVER"),
        models_dir=settings.text("MODELS_DIR"),
        device=_device(settings),
        cuda_devices=_numbers(settings),
        cpu_runners=_auto(settings),
        threads=_whole(settings, "SPARK_THREADS", 0, 4096),
        memory_reserve_bytes=_HOST_RESERVE_BYTES if reserve is None else reserve,
        vram_reserve_bytes=_whole(settings, "SPARK_VRAM_RESERVE_MB", 0, 1 << 30) * _MIB if vram else None,
        most_loaded=_whole(settings, "SPARK_MAX_LOADED_MODELS", 0, 1 << 20),
        idle_seconds=_number(settings, "SPARK_IDLE_UNLOAD_MINUTES", 0, 1e7) * 60,
        queue_limit=_whole(settings, "SPARK_QUEUE_LIMIT", 1, 1 << 20),
        hang_seconds=_number(settings, "SPARK_RUNNER_HANG_SECONDS", 0, 1e7, above=True),
        host_experts=_flag(settings, "SPARK_HOST_EXPERTS"),
        expert_cache_percent=_number(settings, "SPARK_EXPERT_CACHE_PERCENT", 0, 100),
        log_level=int(getattr(logging, settings.choice("SPARK_LOG_LEVEL").upper())),
    )


def _host(settings: Settings) -> str:
    host = settings.text("SPARK_HOST").strip()
    if not host or any(c.isspace() or c == "/" for c in host):
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
