"""An engine that misbehaves on demand: what llama-server does rarely, and what it may do one day.

Listens on --host PATH, or on --host and --port for whoever has the key of the environment, and answers /health; --act says what
is wrong with it, as many as there are.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
import socket
import sys
import threading
import time

SLOT = b'[{"id":0,"id_task":1,"is_processing":true,"n_prompt_tokens_processed":7,"next_token":[{"n_decoded":3}]}]'


def main(words: list[str]) -> None:
    at: str | tuple[str, int] = words[words.index("--host") + 1]
    if "--port" in words:
        at = (str(at), int(words[words.index("--port") + 1]))
    acts = [value for word, value in itertools.pairwise(words) if word == "--act"]
    if "stubborn" in acts:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "quit" in acts:
        signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))
    if "flood" in acts:
        for _ in range(20):
            os.write(2, b"0.00.001.000 I cmn  flood: water\n" * 5000)
        os.write(2, b"0.00.002.000 E cmn  flood: " + b"x" * 3_000_000 + b"\n")
    if "fork" in acts and os.fork() == 0:
        os.setsid()
        signal.pause()
    if "silent" in acts:
        os.write(2, b"0.00.001.000 I srv  main: silent from now on\n")
        signal.pause()
    if "spin" in acts:
        threading.Thread(target=spin, args=(None,), daemon=True).start()
    if "prefill" in acts:
        threading.Thread(target=spin, args=(3.0,), daemon=True).start()
    with socket.socket(socket.AF_UNIX if isinstance(at, str) else socket.AF_INET) as listening:
        listening.bind(at)
        listening.listen()
        os.write(2, b"0.00.003.000 I srv  llama_server: model loaded\n")
        while True:
            connection, _ = listening.accept()
            try:
                answer(connection, "mute" in acts, "deaf" in acts, None if "open" in acts else os.environ.get("LLAMA_API_KEY"))
            except (OSError, IndexError):
                pass  # the one who asked has left


def spin(seconds: float | None) -> None:
    """Burns CPU beside the thread that answers; for some seconds, and then leaves, or for ever."""
    end = None if seconds is None else time.monotonic() + seconds
    while end is None or time.monotonic() < end:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)
    os._exit(0)


held = []  # connections that are never answered


def answer(connection: socket.socket, working: bool, deaf: bool, key: str | None) -> None:
    request = connection.recv(4096)
    target = request.split()[1]
    if deaf and target == b"/slots":
        held.append(connection)
        return
    with connection:
        body = SLOT if target == b"/slots" else b"{}"
        status = b"200 OK" if target in (b"/health", b"/props") or working else b"404 Not Found"
        if key is not None and target != b"/health" and f"Authorization: Bearer {key}\r\n".encode() not in request:
            status = b"401 Unauthorized"
        connection.sendall(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))


main(sys.argv)
