"""The running supervisor as the verbs see it: its control API, asked over HTTP."""

from __future__ import annotations

import http.client
import json
import socket
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from sparkguard.errors import CONFIG, TEMPFAIL, UNAVAILABLE, SparkguardError
from sparkguard.settings import load
from sparkguard.supervisor.runner_settings import READERS
from sparkguard.web.keys import read_keys

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# What binds every address is reached on this machine's own.
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class Front:
    """Raises SparkguardError: 69 when nobody answers, 75 for what may work later, 78 for what never will."""

    def __init__(self, env: Mapping[str, str]) -> None:
        settings = load(env)
        host = READERS["SPARK_HOST"](settings)
        self._host = _EVERYWHERE.get(host, host)
        self._port = READERS["SPARK_PORT"](settings)
        keys = read_keys(settings.text("SPARK_API_KEY_FILE"), {})
        self._headers = {"Authorization": f"Bearer {keys[0].decode('latin-1')}"} if keys else {}  # latin-1: byte for byte

    def get(self, path: str) -> dict[str, Any]:
        return self._json("GET", path)

    def post(self, path: str) -> dict[str, Any]:
        return self._json("POST", path)

    def lines(self, path: str) -> Iterator[str]:
        """The lines of an answer that may go on for ever, each when it comes."""
        connection = self._connect()
        try:
            answer = self._ask(connection, "GET", path)
            while line := answer.readline():
                yield line.decode("utf-8", "replace").rstrip("\r\n")
        except (OSError, http.client.HTTPException):
            return  # the supervisor stops, and the lines so far are whole
        finally:
            connection.close()

    def _json(self, method: str, path: str) -> dict[str, Any]:
        connection = self._connect()
        try:
            answer = json.loads(self._ask(connection, method, path).read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise SparkguardError(f"{self._where} broke off: {error}", status=UNAVAILABLE) from None
        finally:
            connection.close()
        if not isinstance(answer, dict):
            raise SparkguardError(f"{self._where} is no supervisor of ours", status=UNAVAILABLE)
        return answer

    @property
    def _where(self) -> str:
        return f"{self._host}:{self._port}"

    def _connect(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=5)
        try:
            connection.connect()
        except OSError as error:
            raise SparkguardError(
                f"no supervisor answers on {self._where}: {error.strerror or error}",
                "start it: systemctl --user start spark-runners, or sparkguard serve; SPARK_HOST and SPARK_PORT say where",
                UNAVAILABLE,
            ) from None
        connection.sock.settimeout(None)  # a load takes as long as it takes
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return connection

    def _ask(self, connection: http.client.HTTPConnection, method: str, path: str) -> http.client.HTTPResponse:
        connection.request(method, path, headers=self._headers)
        answer = connection.getresponse()
        if answer.status < 400:
            return answer
        text = answer.read().decode("utf-8", "replace")
        try:
            message = str(json.loads(text)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            message = f"{self._where} answers {answer.status} {answer.reason}"
        if answer.status == 401:
            raise SparkguardError(message, "SPARK_API_KEY_FILE names the file with the key", CONFIG)
        raise SparkguardError(message, status=TEMPFAIL if answer.status in (429, 502, 503) else CONFIG)


def segment(id: str) -> str:
    """An id as one segment of a path."""
    return quote(id, safe="")
