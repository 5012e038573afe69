"""What changes, told to those who follow it: each step's runners, models and devices, and nothing when nobody listens."""

from __future__ import annotations

from collections.abc import Mapping

from sparkguard.core import events, lifecycle
from sparkguard.core.dispatch import Dispatch
from sparkguard.supervisor.subscribers import Subscribers
from sparkguard.supervisor.view import View


class News:
    def __init__(self, dispatch: Dispatch, view: View) -> None:
        self.subscribers = Subscribers()
        self._dispatch = dispatch
        self._view = view
        self._told: dict[str, str] = {}  # model -> the state that was told last
        self._progress: dict[str, object] = {}  # of the runners that load, as it was told last
        self._warning: str | None = None  # about the library, as it was told last

    def runner(self, id: str) -> None:
        if not self.subscribers:
            return
        runner = self._dispatch.runners.get(id)
        queue = len(runner.queue) if runner is not None else 0
        self.subscribers.tell({"type": "queue", "model": id, "queue": queue})
        self.subscribers.tell({"type": "runner", **self._view.runner(id)})
        state = runner.state if runner is not None else lifecycle.STOPPED
        if self._told.get(id) != state:
            self._told[id] = state
            if (card := self._view.model(id)) is not None:
                self.subscribers.tell({"type": "model", **card})

    def progress(self) -> None:
        """Of the runners that load, where it has changed."""
        runners = self._dispatch.runners.items() if self.subscribers else ()
        loading = {id: self._view.runner(id) for id, runner in runners if runner.state == lifecycle.STARTING}
        for id, card in loading.items():
            if card["progress"] != self._progress.get(id):
                self.subscribers.tell({"type": "runner", **card})
        self._progress = {id: card["progress"] for id, card in loading.items()}

    def library(self, before: Mapping[str, events.Model], warning: str | None) -> None:
        if warning != self._warning:
            self._warning = warning
            self.subscribers.tell({"type": "library", "warning": warning})
        after = self._dispatch.models
        for id in {**before, **after} if self.subscribers else ():
            if before.get(id) != after.get(id):
                self.subscribers.tell({"type": "model", **(self._view.model(id) or {"id": id, "state": "removed"})})

    def devices(self) -> None:
        if self.subscribers:
            self.subscribers.tell({"type": "devices", "devices": self._view.devices()})
