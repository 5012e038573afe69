"""Every SPARK_ setting of the runners: its default, what it takes, what it does not."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from sparkguard.core.types import DISCRETE, UNIFIED, MemoryPool
from sparkguard.errors import SparkguardError
from sparkguard.settings import SETTINGS, load
from sparkguard.supervisor.runner_settings import READERS, RunnerSettings, read

MIB = 1 << 20


def with_(**env: str) -> RunnerSettings:
    return read(load({"HOME": "/home/a", **env}))


def test_the_defaults() -> None:
    """They are those of the documentation."""
    settings = with_()
    assert (settings.host, settings.port, settings.queue_limit, settings.most_loaded) == ("127.0.0.1", 8090, 100, 0)
    assert (settings.device, settings.cuda_devices, settings.cpu_runners, settings.threads) == ("auto", None, None, 0)
    assert (settings.idle_seconds, settings.hang_seconds) == (1800, 120)
    assert (settings.host_experts, settings.expert_cache_percent, settings.log_level) == (True, 10, logging.INFO)
    assert (settings.memory_reserve_bytes, settings.vram_reserve_bytes) == (None, None)
    assert (settings.api_key_file, settings.llama_server, settings.models_dir) == ("", "", "/home/a/models")


@pytest.mark.parametrize(
    ("key", "text", "field", "value"),
    [
        ("SPARK_HOST", "0.0.0.0", "host", "0.0.0.0"),
        ("SPARK_PORT", "65535", "port", 65535),
        ("SPARK_API_KEY_FILE", "~/key", "api_key_file", "/home/a/key"),
        ("SPARK_LLAMA_SERVER", "~/bin/llama-server", "llama_server", "/home/a/bin/llama-server"),
        ("SPARK_DEVICE", "cuda:1", "device", "cuda:1"),
        ("SPARK_CUDA_DEVICES", "0, 2,0", "cuda_devices", (0, 2)),
        ("SPARK_CUDA_DEVICES", "", "cuda_devices", ()),
        ("SPARK_CPU_RUNNERS", "true", "cpu_runners", True),
        ("SPARK_CPU_RUNNERS", "false", "cpu_runners", False),
        ("SPARK_THREADS", "6", "threads", 6),
        ("SPARK_MEMORY_RESERVE_MB", "2048", "memory_reserve_bytes", 2048 * MIB),
        ("SPARK_MEMORY_RESERVE_MB", "0", "memory_reserve_bytes", 0),
        ("SPARK_VRAM_RESERVE_MB", "700", "vram_reserve_bytes", 700 * MIB),
        ("SPARK_VRAM_RESERVE_MB", "0", "vram_reserve_bytes", 0),
        ("SPARK_MAX_LOADED_MODELS", "3", "most_loaded", 3),
        ("SPARK_IDLE_UNLOAD_MINUTES", "0.05", "idle_seconds", 3.0),
        ("SPARK_IDLE_UNLOAD_MINUTES", "0", "idle_seconds", 0.0),
        ("SPARK_QUEUE_LIMIT", "1", "queue_limit", 1),
        ("SPARK_RUNNER_HANG_SECONDS", "0.5", "hang_seconds", 0.5),
        ("SPARK_HOST_EXPERTS", "0", "host_experts", False),
        ("SPARK_EXPERT_CACHE_PERCENT", "12.5", "expert_cache_percent", 12.5),
        ("SPARK_LOG_LEVEL", "debug", "log_level", logging.DEBUG),
    ],
)
def test_a_value(key: str, text: str, field: str, value: Any) -> None:
    """Each setting has its effect by its name."""
    assert getattr(with_(**{key: text}), field) == value


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("SPARK_HOST", ""),
        ("SPARK_HOST", "/tmp/x"),
        ("SPARK_PORT", "0"),
        ("SPARK_PORT", "65536"),
        ("SPARK_PORT", "٣"),
        ("SPARK_DEVICE", "gpu"),
        ("SPARK_DEVICE", "cuda:"),
        ("SPARK_DEVICE", "cuda:-1"),
        ("SPARK_CUDA_DEVICES", "0;1"),
        ("SPARK_CPU_RUNNERS", "maybe"),
        ("SPARK_THREADS", "-1"),
        ("SPARK_THREADS", "two"),
        ("SPARK_VRAM_RESERVE_MB", "1.5"),
        ("SPARK_MAX_LOADED_MODELS", "many"),
        ("SPARK_IDLE_UNLOAD_MINUTES", "-1"),
        ("SPARK_IDLE_UNLOAD_MINUTES", "nan"),
        ("SPARK_IDLE_UNLOAD_MINUTES", "inf"),
        ("SPARK_QUEUE_LIMIT", "0"),
        ("SPARK_RUNNER_HANG_SECONDS", "0"),
        ("SPARK_HOST_EXPERTS", "auto"),
        ("SPARK_EXPERT_CACHE_PERCENT", "101"),
        ("SPARK_LOG_LEVEL", "trace"),
    ],
)
def test_what_is_no_value(key: str, text: str) -> None:
    """The message names the setting, the value and where it came from; the hint says what it takes."""
    with pytest.raises(SparkguardError) as caught:
        with_(**{key: text})
    assert caught.value.message.startswith(f"{key}={text!r} in the environment ")
    assert caught.value.hint == f"it takes: {SETTINGS[key].valid}"


def test_each_reader_has_its_row() -> None:
    """A reader of a setting that does not exist would never be asked."""
    assert READERS.keys() <= SETTINGS.keys()


def test_unified_memory_keeps_one_reserve() -> None:
    """It is the host's; a GPU's own memory keeps the larger of 512 MB and a sixteenth."""
    settings = with_()
    assert settings.reserve_of(MemoryPool("ram", UNIFIED, 128 << 30)) == 1024 * MIB
    assert settings.reserve_of(MemoryPool("gpu0", DISCRETE, 4 << 30)) == 512 * MIB
    assert settings.reserve_of(MemoryPool("gpu0", DISCRETE, 80 << 30)) == 5 << 30
    assert with_(SPARK_VRAM_RESERVE_MB="1").reserve_of(MemoryPool("gpu0", DISCRETE, 80 << 30)) == MIB
