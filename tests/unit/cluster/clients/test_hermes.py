"""Hermes's own file: pointed at another model, with all else as it was."""

from __future__ import annotations

import yaml

from sparkguard.cluster.clients import Hermes, Target

CONFIG = """\
# mine
model:
  default: old   # the one I like
  provider: inferencer
  context_length: 1048576
  max_tokens: 32768
providers:
  inferencer:
    base_url: 'http://127.0.0.1:54323/v1'
    api_key: "sk-secret"
    models:
      deepseek-v41: {context_length: 1048576}
  spark:
    models:
      deepseek-text:
        context_length: 1048576

toolsets: [all]   # everything
"""
TARGET = Target("spark", "http://spark.local:8000/v1", "deepseek-vision", 131072, True)


def test_the_model_its_provider_and_its_limits() -> None:
    """A stale context length goes, other models and providers stay, and so does every comment."""
    text = Hermes().retarget(CONFIG, TARGET)
    assert yaml.safe_load(text) == {
        "model": {"default": "deepseek-vision", "provider": "spark", "max_tokens": 32768},
        "providers": {
            "inferencer": yaml.safe_load(CONFIG)["providers"]["inferencer"],
            "spark": {
                "models": {
                    "deepseek-text": {"context_length": 1048576},
                    "deepseek-vision": {"context_length": 131072, "supports_vision": True},
                },
                "base_url": "http://spark.local:8000/v1",
            },
        },
        "toolsets": ["all"],
    }
    kept = [line for line in CONFIG.splitlines() if not line.startswith(("  default", "  provider", "  context_length"))]
    assert [line for line in text.splitlines() if line in kept] == kept


def test_twice_is_once() -> None:
    """A file that says it already is not changed."""
    text = Hermes().retarget(CONFIG, TARGET)
    assert Hermes().retarget(text, TARGET) == text


def test_a_model_by_its_name_alone() -> None:
    """The short form becomes the long one."""
    text = Hermes().retarget("model: anthropic/claude\nx: 1\n", Target("spark", "http://s:8000/v1", "org/m"))
    assert yaml.safe_load(text) == {
        "model": {"default": "org/m", "provider": "spark"},
        "x": 1,
        "providers": {"spark": {"base_url": "http://s:8000/v1", "models": {"org/m": {"supports_vision": False}}}},
    }


def test_a_served_id_that_looks_like_something_else() -> None:
    """It stays a string."""
    text = Hermes().retarget("model: {}\n", Target("on", "http://s:8000/v1", "4.1"))
    found = yaml.safe_load(text)
    assert found["model"] == {"default": "4.1", "provider": "on"}
    assert list(found["providers"]["on"]["models"]) == ["4.1"]
