"""What every program on a node stands on: its answers, its end, its children, and the folder it keeps.

Runs on a node: Linux, Python 3.8, the standard library. A program has `def main(request, reply)`. It ends by itself when its
deadline passes or its stdin ends, because ssh carries no signals to it, so that nothing of ours outlives the laptop's interest.
What must not be broken off (a container being stopped) says so with `finishing`.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import traceback

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    Reply = Callable[[dict[str, Any]], None]

MARKER = b"\x1esparkguard node 1\n"
TEMPFAIL, UNAVAILABLE, OSERR, FAILED, CONFIG = 75, 69, 71, 1, 78

_children: dict[int, subprocess.Popen[bytes]] = {}
_lock = threading.Lock()
_unbreakable = 0
_order: dict[str, Any] = {}
_secret = b""
_cleanups: list[Callable[[], None]] = []


class Fault(Exception):
    """An expected failure: a word for programs, a sentence for people, the status that the laptop's command exits with."""

    def __init__(self, code: str, message: str, status: int = FAILED, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status
        self.details = details


class Done:
    """How a child ended. status is None when it had to be killed at its deadline."""

    def __init__(self, status: int | None, out: bytes, err: bytes, truncated: bool) -> None:
        self.status = status
        self.out = out.decode("utf-8", "replace")
        self.err = err.decode("utf-8", "replace").strip()
        self.truncated = truncated


def begin(order: dict[str, Any], secret: bytes) -> None:
    """Called by boot.py. Runs the program and ends the process."""
    global _order, _secret
    _order, _secret = order, secret
    _order["started"] = time.monotonic()
    _write(MARKER)
    threading.Thread(target=_watch, daemon=True).start()
    try:
        sys.modules[order["program"]].main(order["request"], reply)
        _put({"end": True})
        status = 0
    except Fault as fault:
        _put({"error": {"code": fault.code, "message": fault.message, "status": fault.status, "details": fault.details}})
        status = fault.status
    except OSError as error:  # a full disk, a folder of another user's: what this machine is like, and no bug of ours
        where = f"{error.filename}: " if error.filename else ""
        _put({"error": {"code": "system", "message": f"{where}{error.strerror or error}", "status": OSERR, "details": {}}})
        status = OSERR
    except Exception:
        _put({"error": {"code": "bug", "message": traceback.format_exc(), "status": 70, "details": {}}})
        status = 70
    finally:
        _end_children()
    os._exit(status)


def reply(value: dict[str, Any]) -> None:
    _put({"reply": value})


def _put(line: dict[str, Any]) -> None:
    _write(json.dumps(line).encode() + b"\n")


def _write(data: bytes) -> None:
    view = memoryview(data)
    with _lock:
        while view:
            try:
                view = view[os.write(1, view) :]
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # nobody listens; what must be finished still is
                return


def secret() -> bytes:
    """What came apart from the request, once."""
    global _secret
    value, _secret = _secret, b""
    return value


def seconds_left(default: float = 3600.0) -> float:
    """Until this program's deadline."""
    return max(0.0, _order["started"] + _order["seconds"] - time.monotonic()) if _order.get("seconds") else default


class finishing:
    """`with finishing():` what is begun here is ended, although the laptop may be gone: only its own deadlines end it."""

    def __enter__(self) -> None:
        global _unbreakable
        _unbreakable += 1

    def __exit__(self, *_: object) -> None:
        global _unbreakable
        _unbreakable -= 1


def at_end(cleanup: Callable[[], None]) -> None:
    """Called when the laptop has gone or the deadline has passed, before this process ends."""
    _cleanups.append(cleanup)


def _watch() -> None:
    """Ends this process when its stdin ends, stays silent for too long, or its time is over."""
    beat = _order.get("beat_seconds")
    heard = time.monotonic()
    poll = selectors.DefaultSelector()
    poll.register(0, selectors.EVENT_READ)
    while True:
        until = [
            moment for moment in (_order["seconds"] and _order["started"] + _order["seconds"], beat and heard + beat) if moment
        ]
        wait = max(0.0, min(until) - time.monotonic()) if until else None
        if poll.select(wait):
            try:
                if not os.read(0, 65536):
                    break
            except OSError:
                break
            heard = time.monotonic()
        elif until and time.monotonic() >= min(until):
            if _order["seconds"]:
                program = _order["program"].rpartition(".")[2]
                message = f"{program} has not ended within {_order['seconds']:.0f} s"
                _put({"error": {"code": "timeout", "message": message, "status": UNAVAILABLE, "details": {}}})
            break
    while _unbreakable:  # looked at again, since the thread that works cannot be woken and need not hurry
        time.sleep(0.05)
    for cleanup in _cleanups:
        try:
            cleanup()
        except Exception as error:
            sys.stderr.write(f"{error}\n")
    _end_children()
    os._exit(TEMPFAIL)


def _end_children() -> None:
    for child in list(_children.values()):
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except OSError:
            pass


def run(
    argv: Sequence[str],
    seconds: float,
    limit: int = 4 << 20,
    data: bytes | None = None,
    keep: tuple[int, ...] = (),
    env: dict[str, str] | None = None,
    tail: bool = False,
) -> Done:
    """Runs a program to its end, or to its deadline, when all of its group is killed. Of each of its outputs the first (or
    last) `limit` bytes are kept. `keep` are descriptors that it inherits. Fault "missing" (69) when there is no such program."""
    try:
        child = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL if data is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=keep,
            env=env,
        )
    except OSError as error:
        raise Fault("missing", f"{argv[0]} cannot be run: {error.strerror}", UNAVAILABLE) from None
    _children[child.pid] = child
    try:
        if data is not None:
            assert child.stdin is not None
            try:
                child.stdin.write(data)
                child.stdin.close()
            except OSError:
                pass
        return _collect(child, time.monotonic() + seconds, limit, tail)
    finally:
        _children.pop(child.pid, None)


def _collect(child: subprocess.Popen[bytes], deadline: float, limit: int, tail: bool) -> Done:
    assert child.stdout is not None and child.stderr is not None
    out, err = child.stdout.fileno(), child.stderr.fileno()
    kept = {out: bytearray(), err: bytearray()}
    truncated = False
    poll = selectors.DefaultSelector()
    for pipe in kept:
        poll.register(pipe, selectors.EVENT_READ)
    while poll.get_map() and time.monotonic() < deadline:
        ready = poll.select(min(deadline - time.monotonic(), 0.5))
        for key, _ in ready:
            data = os.read(key.fd, 65536)
            if not data:
                poll.unregister(key.fd)
            text = kept[key.fd]
            text += data
            if len(text) > limit:
                truncated = True
                del text[slice(None, -limit) if tail else slice(limit, None)]
        if not ready and child.poll() is not None:
            break  # a descendant holds the pipe
    poll.close()
    status: int | None
    try:
        status = child.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        status = None
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except OSError:
            pass
        child.wait()
    child.stdout.close()
    child.stderr.close()
    return Done(status, bytes(kept[out]), bytes(kept[err]), truncated)


def together(*works: Callable[[], Any]) -> list[Any]:
    """The results of several works at once; a Fault is a result too."""
    results: list[Any] = [None] * len(works)

    def do(index: int) -> None:
        try:
            results[index] = works[index]()
        except Fault as fault:
            results[index] = fault
        except Exception:
            results[index] = Fault("bug", traceback.format_exc(), 70)

    threads = [threading.Thread(target=do, args=(index,), daemon=True) for index in range(1, len(works))]
    for thread in threads:
        thread.start()
    if works:
        do(0)
    for thread in threads:
        thread.join()
    return results


def state_dir() -> str:
    """What is kept on the node: node.lock, node.json. Only its user may enter. Fault "state" when it cannot be made."""
    path = os.environ.get("SPARK_SERVE_STATE_DIR") or os.path.expanduser("~/.local/state/spark-serve")
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError as error:
        raise unwritable(path, error) from None
    return path


def unwritable(path: str, error: OSError) -> Fault:
    """For what is kept in the state folder."""
    advice = "`df -h` and `ls -ld` of it on that machine tell more"
    return Fault("state", f"{path} cannot be written: {error.strerror or error}; {advice}", OSERR)


def proc_root() -> str:
    return os.environ.get("SPARK_SERVE_PROC") or "/proc"


def sys_root() -> str:
    return os.environ.get("SPARK_SERVE_SYS") or "/sys"


def read(path: str, limit: int = 1 << 20) -> str | None:
    """A small file's text, without the blanks around it; None: it is not there, or may not be read."""
    try:
        with open(path, "rb") as file:
            return file.read(limit).decode("utf-8", "replace").strip()
    except OSError:
        return None


def write_whole(path: str, text: str) -> None:
    """The file is the old one or the new one, after a crash too. Mode 0600. Fault "state" (71) when it stays the old one."""
    new = f"{path}.{os.getpid()}.new"
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError as error:
        try:
            os.unlink(new)
        except OSError:
            pass
        raise unwritable(path, error) from None
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
