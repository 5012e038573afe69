"""Server-sent events from bytes, strictly and within a bound. Pure: no clock, no socket."""

from __future__ import annotations

LIMIT_BYTES = 16 << 20  # of one stream; 32,768 tokens with their envelopes take about 8 MiB


class StreamFault(Exception):
    """The stream is none that may be counted; kind is the class of failure, as it is recorded."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail


class Parser:
    """feed() takes bytes as they come and returns the events that are whole by then: (event's name, data)."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit = limit_bytes
        self._seen = 0
        self._rest: list[bytes] = []  # of a line that has not ended
        self._data: list[bytes] = []
        self._name = b""
        self._after_cr = False

    def feed(self, piece: bytes) -> list[tuple[str, str]]:
        """Raises StreamFault: too_large, or not_utf8."""
        self._seen += len(piece)
        if self._seen > self._limit:
            raise StreamFault("too_large", f"more than {self._limit} bytes")
        if b"\r" in piece or self._after_cr:
            piece = self._mend(piece)
        lines = piece.split(b"\n")
        if len(lines) == 1:
            self._rest.append(piece)
            return []
        lines[0] = b"".join([*self._rest, lines[0]])
        self._rest = [lines.pop()]
        found = []
        for line in lines:
            if line:
                self._field(line)
            elif self._data:
                found.append((_text(self._name), _text(b"\n".join(self._data))))
                self._data, self._name = [], b""
        return found

    @property
    def is_between_events(self) -> bool:
        """No event is half read: what a clean end of the stream looks like."""
        return not self._data and not any(self._rest)

    def _mend(self, piece: bytes) -> bytes:
        """A line may end with CR LF, LF or CR, and a CR LF may be cut in two by the network."""
        if self._after_cr and piece.startswith(b"\n"):
            piece = piece[1:]
            self._after_cr = False
        if piece:
            self._after_cr = piece.endswith(b"\r")
        return piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value[1:] if value.startswith(b" ") else value
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._name = value
        # A comment has an empty name; id and retry say nothing here, and others are ignored by the standard.


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise StreamFault("not_utf8", str(error)) from None
