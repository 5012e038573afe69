"""Runs an experiment of spark_bench on this node, tells its progress, and hands over what is small of its results.

Runs on a node: Linux, Python 3.8, the standard library. Nothing is installed: the package comes with the request and stays
with its results in experiments/ID. The audio stays here.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading

from sparkguard.cluster.node.base import FAILED, TEMPFAIL, Fault, at_end, seconds_left, state_dir

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sparkguard.cluster.node.base import Reply

FOLDER, LOCK = "experiments", "experiment.lock"
SMALL = (".json", ".jsonl", ".csv", ".md")
FILE_BYTES, ALL_BYTES, PIECE_BYTES = 32 << 20, 256 << 20, 512 << 10
ALIVE_SECONDS = 5.0
END_SECONDS = 90  # the dispatcher ends its jobs one way after the other, 20 s each


def main(request: dict[str, Any], reply: Reply) -> None:
    """request: id, files (path -> base64), arguments; {root} in an argument is the experiment's folder. Or wait: true, to return
    when no experiment runs here any more. Replies: {"event"}, {"alive"}, {"file", "data"}, and {"status", "path"} last."""
    lock = os.open(os.path.join(state_dir(), LOCK), os.O_RDWR | os.O_CREAT, 0o600)
    if request.get("wait"):
        _wait(lock)
        reply({"ended": True})
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Fault("busy", "an experiment runs on this node already", TEMPFAIL) from None
    root = os.path.join(state_dir(), FOLDER, request["id"])
    _lay_out(root, request["files"])
    threading.Thread(target=_say_alive, args=(reply,), daemon=True).start()
    status = _run(root, [word.replace("{root}", root) for word in request["arguments"]], lock, reply)
    _hand_over(os.path.join(root, "results"), reply)
    reply({"status": status, "path": root})


def _lay_out(root: str, files: dict[str, str]) -> None:
    os.makedirs(os.path.dirname(root), mode=0o700, exist_ok=True)
    os.mkdir(root, 0o700)
    for name, data in files.items():
        path = os.path.normpath(os.path.join(root, name))
        if not path.startswith(root + os.sep):
            raise Fault("path", f"{name} would not be in the experiment's folder", FAILED)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))


def _run(root: str, arguments: list[str], lock: int, reply: Reply) -> int:
    """The lock is inherited: it is free when the experiment's last process is gone, whatever became of this one."""
    environment = dict(os.environ, PYTHONPATH=os.path.join(root, "src"))
    with open(os.path.join(root, "driver.log"), "wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "spark_bench", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=root,
            env=environment,
            pass_fds=(lock,),
            start_new_session=True,
        )

    def end() -> None:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)

    at_end(end)
    assert child.stdout is not None
    for line in child.stdout:
        try:
            reply({"event": json.loads(line)})
        except ValueError:
            continue
    return child.wait()


def _hand_over(results: str, reply: Reply) -> None:
    left = ALL_BYTES
    for folder, folders, names in os.walk(results):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(folder, name)
            if not name.endswith(SMALL) or os.path.islink(path):
                continue
            left -= os.path.getsize(path)
            if os.path.getsize(path) > FILE_BYTES or left < 0:
                raise Fault("too_large", f"{path} stays on the node: the results are too large to hand over", FAILED)
            with open(path, "rb") as file:
                first = True
                while True:
                    piece = file.read(PIECE_BYTES)
                    if not piece and not first:
                        break
                    first = False
                    reply({"file": os.path.relpath(path, results), "data": base64.b64encode(piece).decode()})


def _say_alive(reply: Reply) -> None:
    """A song takes minutes, and silence would be taken for a lost node."""
    while not threading.Event().wait(ALIVE_SECONDS):
        reply({"alive": True})


def _wait(lock: int) -> None:
    done = threading.Event()

    def take() -> None:
        fcntl.flock(lock, fcntl.LOCK_SH)
        done.set()

    threading.Thread(target=take, daemon=True).start()
    if not done.wait(max(0.0, seconds_left() - 2)):
        raise Fault("busy", "the experiment's processes have not ended", TEMPFAIL)
