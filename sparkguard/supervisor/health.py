"""Asks a runner over its socket whether it lives, and tells a long computation from one that stands still."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import secrets
import socket
import struct
import time
from typing import Any

from sparkguard.core.record import Record
from sparkguard.probe import gpu_work
from sparkguard.supervisor.door import Door, connect, holds

HEALTH_SECONDS = 5.0  # between two checks, and at most as often /slots: polled fast it starves the engine's own timers
_MOST_BYTES = 1 << 20
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
# A thread that answers /health every 5 s takes some 0.02 % of a core, a batch all of one, or what an overloaded machine leaves.
_LEAST_CPU_SHARE = 0.01
# One batch has 512 tokens or so. That it takes this many times the time after which silence is a hang was never seen.
_LONGEST_BATCH = 8


_OUR_WANT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)


class Answer(Record):
    """pid: who listens on the socket, as the kernel tells; None on a system that does not."""

    status: int
    body: bytes
    pid: int | None


UNASKED = Answer(0, b"", None)  # for want of a descriptor or of memory of ours, which says nothing about the runner


async def get(door: Door, target: str, seconds: float, key: str | None = None) -> Answer | None:
    """One request on one connection, with the door's key or another. None: no answer within the time."""
    # /health wants no key, and is asked before it is known who answers.
    asking = asyncio.ensure_future(_get(door, target, None if target == "/health" else key or door.key))
    if not await within(asking, seconds):
        return None
    try:
        return asking.result()
    except OSError as error:
        return UNASKED if error.errno in _OUR_WANT else None
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, IndexError):
        return None


async def within(task: asyncio.Future[Any], seconds: float) -> bool:
    """Whether it ended in time; it is cancelled if not. asyncio.wait_for() before Python 3.12 may swallow a cancellation."""
    try:
        return bool((await asyncio.wait({task}, timeout=seconds))[0])
    finally:
        task.cancel()


async def _get(door: Door, target: str, key: str | None) -> Answer:
    reader, writer = await connect(door)
    try:
        pid = listener(writer.get_extra_info("socket")) if door.port is None else None
        authorization = f"Authorization: Bearer {key}\r\n" if key else ""
        writer.write(f"GET {target} HTTP/1.1\r\nHost: runner\r\n{authorization}Connection: close\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head.split(None, 2)[1])
        length = next((line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), None)
        body = await reader.readexactly(int(length)) if length else await reader.read(_MOST_BYTES)
        return Answer(status, body, pid)
    finally:
        writer.close()


def listener(connection: socket.socket) -> int | None:
    """The process that made the socket listen: whoever else has put a socket at that path is found out (unix(7))."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("3i", raw)[0])


async def proven(door: Door, pid: int, seconds: float) -> bool:
    """Whether it is this process that answers at the door's port, and nobody else. A wrong key goes first."""
    assert door.port is not None
    if not holds(pid, door.port):
        return False
    refused = await get(door, "/props", seconds, key=secrets.token_hex(32))
    if refused is None or refused.status != 401:
        return False
    answer = await get(door, "/props", seconds)
    return answer is not None and answer.status == 200


class Slots(Record):
    """What /slots says of the engine's work. mark changes with each token read or written."""

    working: bool
    mark: object


def read_slots(body: bytes) -> Slots | None:
    """None: not as we know it."""
    try:
        slots: Any = json.loads(body)
        mark = [
            (each["id"], each["id_task"], each["n_prompt_tokens_processed"], [step["n_decoded"] for step in each["next_token"]])
            for each in slots
            if each["is_processing"]
        ]
    except (ValueError, KeyError, TypeError):
        return None
    return Slots(bool(mark), mark)


class Vital(Record):
    """What the kernel knows of a process: CPU time in ticks, resident and read bytes."""

    ticks: int
    resident_bytes: int
    read_bytes: int


def vital(pid: int, proc_root: str = "/proc") -> Vital:
    """Zeros for what cannot be read."""
    stat = _read(f"{proc_root}/{pid}/stat")
    fields = stat[stat.rfind(b")") + 2 :].split()
    ticks = int(fields[11]) + int(fields[12]) if len(fields) > 12 else 0
    pages = _read(f"{proc_root}/{pid}/statm").split()
    resident = int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if len(pages) > 1 else 0
    read = next((int(line.split()[1]) for line in _read(f"{proc_root}/{pid}/io").splitlines() if line.startswith(b"rchar")), 0)
    return Vital(ticks, resident, read)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


async def look(watch: Watch, door: Door, pid: int, on_gpu: bool, seconds: float) -> None:
    """Asks one runner once, and tells its watch. on_gpu: a batch may keep the GPU busy and the CPU idle."""
    answer = await get(door, "/health", seconds)
    if answer is UNASKED:
        watch.unasked(time.monotonic())
        return
    if answer is not None and answer.status == 200:
        watch.answered(time.monotonic())
    if not watch.requests:
        return
    answer = await get(door, "/slots", seconds)
    seen = read_slots(answer.body) if answer is not None and answer.status == 200 else None
    if seen is not None:
        watch.slots(seen, time.monotonic())
        return
    # It is within one batch, and answers there when that is done; or it hangs; or it has no slots to tell of.
    worked = watch.ticks(vital(pid).ticks, time.monotonic())
    if on_gpu and not worked and await asyncio.to_thread(gpu_work.has_worked, pid, 2 * HEALTH_SECONDS):
        watch.worked(time.monotonic())


class Watch:
    """Decides, from what is seen of one runner, whether it hangs. The clock is the caller's; times are in seconds.

    Alive is a runner that answers /health. Working is one whose tokens go on while a request runs. An engine that is within a
    batch does not answer /slots: then the time that it takes of CPU or GPU is its progress, for as long as any batch may take.
    One that answers there, and burns CPU without a token, spins.
    """

    def __init__(self, hang_seconds: float, now: float) -> None:
        self.hang_seconds = hang_seconds
        self.requests = 0
        self._alive_at = now
        self._moved_at = now
        self._token_at = now  # the last progress that was more than time
        self._mark: object = None
        self._ticks: tuple[int, float] | None = None  # of its CPU, and when they were counted

    def busy(self, requests: int, now: float) -> None:
        """A request has begun or ended, which is progress."""
        self.requests = requests
        self._moved_at = self._token_at = now
        self._ticks = None

    def answered(self, now: float) -> None:
        self._alive_at = now

    def unasked(self, now: float) -> None:
        """Nobody could look: what is not known is not held against it."""
        self._alive_at = self._moved_at = now
        self._ticks = None

    def slots(self, seen: Slots, now: float) -> None:
        """An engine that has nothing to do does not hang: the client is slow to read."""
        self._ticks = None
        if not seen.working or seen.mark != self._mark:
            self._mark = seen.mark
            self._moved_at = self._token_at = now

    def ticks(self, ticks: int, now: float) -> bool:
        """Whether it has computed since this was told last: its threads that answer /health take next to nothing."""
        before, self._ticks = self._ticks, (ticks, now)
        if before is None or ticks - before[0] < max(1.0, _LEAST_CPU_SHARE * _TICKS_A_SECOND * (now - before[1])):
            return False
        self.worked(now)
        return True

    def worked(self, now: float) -> None:
        if now - self._token_at <= _LONGEST_BATCH * self.hang_seconds:
            self._moved_at = now

    def verdict(self, now: float) -> str | None:
        """Why it must be ended; None: it lives."""
        if self.requests and now - self._moved_at > self.hang_seconds:
            return f"no token for {now - self._token_at:.0f} s while a request ran"
        if now - self._alive_at > self.hang_seconds:
            return f"no answer to /health for {now - self._alive_at:.0f} s"
        return None
