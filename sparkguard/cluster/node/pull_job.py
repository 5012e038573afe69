"""The work of a pull: files first, then the image; each step can be broken off anywhere and goes on where it was.

Runs on a node: Linux, Python 3.8, the standard library. It gives way to everything else: idle I/O, the lowest priority, and it
is the first that the kernel ends when memory is short.
"""

from __future__ import annotations

import errno
import http.client
import json
import os
import signal
import subprocess
import time
import traceback

from sparkguard.cluster.node import pull_fetch, pull_image, pull_share, pull_sources
from sparkguard.cluster.node.base import FAILED, Fault, write_whole
from sparkguard.cluster.node.pull_base import Cancelled, Job
from sparkguard.cluster.node.pull_web import NotYet, Web

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def run(folder: str, order: dict[str, Any], secrets: dict[str, str]) -> None:
    """The whole job, in a process of its own. It raises nothing."""
    job = Job(folder, order, secrets)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: job.stopped.set())
    _give_way()
    told = {"id": order["id"], "key": order["key"], "model": order["model"], "pid": os.getpid(), "since": time.time()}
    write_whole(os.path.join(folder, "job.json"), json.dumps(told))
    share = None
    try:
        job.tell("pull_start", model=order["model"], pid=os.getpid())
        if order.get("share"):
            share = _share(job)
        image = _work(job, share)
        job.tell("pull_done", model=order["model"], image=image)
        if share is not None:
            share.wait()
    except Cancelled:
        job.tell("pull_cancelled", model=order["model"])
    except Fault as fault:
        job.tell("pull_failed", model=order["model"], code=fault.code, message=fault.message, status=fault.status)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        message = f"{error.filename or 'a file'}: {error.strerror}"
        job.tell("pull_failed", model=order["model"], code="disk" if full else "os", message=message, status=FAILED)
    except Exception:
        job.tell("pull_failed", model=order["model"], code="bug", message=traceback.format_exc(), status=70)
    finally:
        if share is not None:
            share.close()
        if order.get("mirror"):
            _through(job)


def _share(job: Job) -> pull_share.Share | None:
    """None: the fabric's address is not this node's, or is down; the others download by themselves then."""
    try:
        return pull_share.Share(job)
    except OSError as error:
        job.tell("pull_alone", text=f"nothing is shared at {job.order['share']['address']}: {error.strerror}")
        write_whole(os.path.join(job.folder, "share.json"), "null")
        return None


def _through(job: Job) -> None:
    """Lets the other node end its share: this one needs it no more, or has failed."""
    try:
        Web(job).open_mirror(f"done/{job.order['node']}").close()
    except (OSError, http.client.HTTPException, NotYet):
        pass


def _give_way() -> None:
    os.nice(19)
    try:
        subprocess.run(["ionice", "-c", "3", "-p", str(os.getpid())], stdin=subprocess.DEVNULL, check=False, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        pass
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass


def _work(job: Job, share: pull_share.Share | None) -> str | None:
    """The image's id. Everything is planned before the first byte comes, so that a disk that is too small is told at once."""
    for folder in job.order["folders"]:
        os.makedirs(folder, exist_ok=True)
    web = Web(job)
    plans = []
    for checkpoint in job.order["checkpoints"]:
        job.check()
        plans.append(pull_sources.plan(job, web, checkpoint))
    if share is not None:
        share.offer(plans)
    missing = sum(plan.missing_bytes() for plan in plans)
    total = sum(plan.total_bytes() for plan in plans)
    job.tell("pull_plan", files=sum(len(plan.files) for plan in plans), total_bytes=total, missing_bytes=missing)
    if missing:
        job.check_room(job.order["cache"], missing)
    pull_fetch.fetch_all(job, web, plans, total)
    return pull_image.prepare(job, web, share)
