"""A list of the supervisor's, as `models` and `runners` show it: a table and remarks for people, its own object for programs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from sparkguard.cli.front import Front
from sparkguard.cli.terminal import printable, show, show_json, table
from sparkguard.core.record import Record
from sparkguard.errors import OK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Listing(Record):
    """name is the list's in the control API; figures are the columns that are flush right."""

    name: str
    columns: tuple[str, ...]
    figures: tuple[str, ...]
    row: Callable[[dict[str, Any]], tuple[str, ...]]
    remarks: Callable[[dict[str, Any]], Iterable[str | None]]  # what does not fit into a row, each below the table
    nothing: str  # what is said of an empty list

    def run(self, as_json: bool) -> int:
        """Returns the exit status. Raises SparkguardError when the supervisor does not answer."""
        answer = Front(os.environ).get(f"/api/{self.name}")
        if as_json:
            show_json(answer)
            return OK
        entries = answer[self.name]
        if not entries:
            show(printable(answer["warning"]) if answer.get("warning") else self.nothing)
            return OK
        show(table(self.columns, [self.row(entry) for entry in entries], self.figures))
        said = [answer["warning"]] if answer.get("warning") else []
        said += [f"{entry['id']}: {text}" for entry in entries for text in dict.fromkeys(self.remarks(entry)) if text]
        if said:
            show("\n" + "\n".join(map(printable, said)))
        return OK
