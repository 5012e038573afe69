"""Hermes: ~/.hermes/config.yaml, edited in place (yaml_edit.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkguard.cluster.clients.yaml_edit import Document

if TYPE_CHECKING:
    from sparkguard.cluster.clients.target import Target

DEFAULT_PATH = "~/.hermes/config.yaml"


class Hermes:
    name = "Hermes"
    makes_file = False  # without its other settings a file of ours would be none of Hermes's

    def retarget(self, text: str, target: Target) -> str:
        """The default model and its provider, and the provider's address and limits. A context length under `model` would hold
        for whichever model is the default, so a stale one goes: the limit stands with the model it is of."""
        document = Document(text)
        if isinstance(document.get("model"), str):  # the short form: a model's name alone
            document.set(("model",), {"default": target.served, "provider": target.provider})
        else:
            document.set(("model", "default"), target.served)
            document.set(("model", "provider"), target.provider)
            document.delete(("model", "context_length"))
        document.set(("providers", target.provider, "base_url"), target.base_url)
        limits = ("providers", target.provider, "models", target.served)
        if target.context is not None:
            document.set((*limits, "context_length"), target.context)
        document.set((*limits, "supports_vision"), target.vision)
        return document.text
