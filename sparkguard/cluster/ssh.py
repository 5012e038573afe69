"""The nodes over OpenSSH: the user's own ssh(1), with its configuration, agent and known_hosts. The only file that runs it.

Each node has one master connection, started here and ended by ssh itself when nobody has used it for a minute, so that one
command after another costs a channel and no login (18 ms in place of 528 ms on a Spark). Nothing else ever logs in:
a channel whose master is gone fails, where ssh by itself would open a slow connection of its own for every call.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import itertools
import os
import signal
import stat
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from sparkguard.cluster import json_text
from sparkguard.cluster.causes import (
    CHANNELS_FULL,
    NO_CHANNEL,
    PROTOCOL,
    TIMEOUT,
    TRANSPORT,
    NodeError,
    Unreachable,
    cause_of,
    last_words,
    never_started,
)
from sparkguard.cluster.deadline import within
from sparkguard.cluster.program import BOOT, MARKER, payload
from sparkguard.core.cluster import Node
from sparkguard.errors import CONFIG, SparkguardError

CHANNELS = 4  # at once and node: sshd allows 10 (MaxSessions), and `watch`, the dashboard and a command may run beside each other
LINGER_SECONDS = 60
CONNECT_SECONDS = 10
# A python3 that starts on a node that swaps; beyond it a master whose link is dead is not told from a slow node.
BEGIN_SECONDS = 15
# Between the program's own deadline, when it says what it waits for, and ours.
GRACE_SECONDS = 3
BEAT_SECONDS = 10  # a held stream's; the node ends it after three that did not come
FULL_SECONDS = 20
MOST_BYTES = 16 << 20  # of one answer
MOST_REPLIES = 1000  # of one call; programs give one, or a few
MOST_MESSAGE = 8 << 10  # its end: that of a traceback tells most
MOST_ERROR_BYTES = 64 << 10
MOST_CHATTER_BYTES = 256 << 10  # a login shell's, before the program
# macOS has 104 bytes for a socket's path, its end included; the master first binds PATH.XXXXXXXXXXXXXXXX.
MOST_PATH_BYTES = 104 - 1 - 17

# Ours come first, and with ssh the first value wins. Keepalives: a link that is gone is noticed within 15 s.
_OURS = (
    "BatchMode=yes", "LogLevel=ERROR", "ForwardAgent=no", "ForwardX11=no", "ClearAllForwardings=yes", "PermitLocalCommand=no",
    "RemoteCommand=none",
)  # fmt: skip
_DEFAULTS = (f"ConnectTimeout={CONNECT_SECONDS}", "ConnectionAttempts=1", "ServerAliveInterval=5", "ServerAliveCountMax=3")


class Fleet:
    """`async with Fleet(nodes, ssh_opts, state_dir) as fleet: await fleet["head"].call(...)`

    notice is told what the user should know and no command's result says. linger_seconds is how long masters outlive their
    last use; 0 ends them with the block.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        ssh_opts: Sequence[str] = (),
        state_dir: str | None = None,
        *,
        notice: Callable[[str], None] = lambda text: None,
        linger_seconds: int = LINGER_SECONDS,
    ) -> None:
        self._linger = linger_seconds
        folder = _socket_folder(state_dir, notice)
        self._links = {node.name: Link(node, tuple(ssh_opts), folder, linger_seconds) for node in nodes}

    async def __aenter__(self) -> Fleet:
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._linger:
            await asyncio.gather(*(link.close() for link in self._links.values()))

    def __getitem__(self, name: str) -> Link:
        return self._links[name]

    def __iter__(self) -> Iterator[Link]:
        return iter(self._links.values())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._links)


class Link:
    """One node. call() and stream() raise Unreachable when the node cannot be asked, NodeError when it says no."""

    def __init__(self, node: Node, ssh_opts: tuple[str, ...], folder: str | None, linger_seconds: int = LINGER_SECONDS) -> None:
        if node.ssh.startswith("-"):
            raise SparkguardError(f"{node.name}: {node.ssh!r} is no name of a machine for ssh", None, CONFIG)
        self.node = node
        self.name = node.name
        self._linger = linger_seconds
        self._slots = asyncio.Semaphore(CHANNELS)
        self._masters = asyncio.Lock()
        self._checked = False
        self._path = None
        if folder is not None:
            key = "\0".join((node.ssh, *ssh_opts, os.environ.get("HOME", "")))
            self._path = os.path.join(folder, hashlib.sha256(key.encode()).hexdigest()[:12])
        self._options = [*_settings(_OURS), *ssh_opts, *_settings(_DEFAULTS)]

    async def call(
        self,
        program: str,
        request: dict[str, Any],
        *,
        seconds: float,
        secret: bytes | None = None,
        repeatable: bool = False,
    ) -> dict[str, Any]:
        """The program's last reply. `repeatable` says that it changes nothing: it is asked again, once, when its
        connection broke. Nothing else is ever sent twice: whether the first was carried out, nobody can tell."""
        text = payload(program, request, seconds, None, secret)
        async with self._slots:
            for attempt in (1, 2):
                try:
                    return await self._once(text, program, seconds, sure=not repeatable)
                except Unreachable as error:
                    if error.cause != TRANSPORT or attempt == 2 or not repeatable:
                        raise
            raise AssertionError("unreachable")

    async def stream(
        self, program: str, request: dict[str, Any], *, quiet_seconds: float
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The program's replies as they come. It ends on the node when the caller stops listening, and here with
        Unreachable when the node has been silent for longer than quiet_seconds."""
        text = payload(program, request, None, 3 * BEAT_SECONDS, None)
        async with self._slots, self._channel(text, sure=True) as channel:
            beat = asyncio.create_task(channel.beat())
            try:
                async for reply in channel.replies(quiet_seconds):
                    yield reply
            finally:
                beat.cancel()

    async def close(self) -> None:
        """Ends the master, whoever else uses it."""
        self._checked = False
        if self._path is not None and os.path.exists(self._path):
            await self._control("exit")

    # ---- one channel

    async def _once(self, text: bytes, program: str, seconds: float, sure: bool) -> dict[str, Any]:
        last: dict[str, Any] | None = None
        async with self._channel(text, sure) as channel:
            try:
                async for reply in channel.replies(None, seconds + GRACE_SECONDS):
                    last = reply
            except Unreachable as error:
                if error.cause == TIMEOUT:
                    await self.close()  # half-open: the next call must not wait for it again
                raise
        if last is None:
            raise Unreachable(self.name, PROTOCOL, f"{program} ended without an answer")
        return last

    @contextlib.asynccontextmanager
    async def _channel(self, text: bytes, sure: bool) -> AsyncIterator[_Channel]:
        """A channel whose program has begun. What surely never began is tried again, by whomever it was asked."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + FULL_SECONDS
        pause = 0.05
        fresh = False
        while True:
            if self._path is not None and (sure or fresh or not os.path.exists(self._path)):
                await self._connect(check=True)
            channel = _Channel(self.name, await self._start(), text)
            try:
                await channel.begin(self._path is not None)
                break
            except _NeverStarted as error:
                await channel.end()
                full = CHANNELS_FULL in error.text
                if loop.time() > give_up or (fresh and not full):
                    raise Unreachable(self.name, TRANSPORT, last_words(error.text)) from None
                fresh = not full
                if full:  # other programs of ours have the rest
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, 1.0)
                else:
                    self._checked = False
            except Unreachable as error:
                await channel.end()
                if error.cause in (TIMEOUT, TRANSPORT):
                    await self.close()
                raise
            except BaseException:
                await channel.end()
                raise
        try:
            yield channel
        finally:
            await channel.end()

    async def _start(self) -> asyncio.subprocess.Process:
        if self._path is None:
            argv = ["ssh", "-T", "-S", "none", *self._options]
        else:
            # Should the master be gone, ssh would log in by itself: this says so instead. Its stdout must outlive the words,
            # since ssh kills it at the end of that; hence the shell.
            instead = f"ProxyCommand=sh -c 'echo {NO_CHANNEL} >&2'"
            argv = ["ssh", "-T", "-S", self._path, "-o", "ControlMaster=no", "-o", instead, *self._options]
        pipe = asyncio.subprocess.PIPE
        return await _spawn([*argv, "--", self.node.ssh, BOOT], stdin=pipe, stdout=pipe, stderr=pipe)

    # ---- the master

    async def _connect(self, check: bool) -> None:
        """A master is there afterwards, or Unreachable says why not."""
        assert self._path is not None
        async with self._masters:
            if self._checked and os.path.exists(self._path):
                return
            if os.path.exists(self._path) and await self._control("check"):
                self._checked = True
                return
            async with _file_lock(self._path + ".lock"):  # another spark-serve may be about to start the same
                if os.path.exists(self._path):
                    if await self._control("check"):
                        self._checked = True
                        return
                    # Left by a master that was killed: ssh would take it for another's and stay without.
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(self._path)
                await self._start_master()
            self._checked = True

    async def _start_master(self) -> None:
        argv = [
            "ssh",
            "-T",
            "-MNf",
            "-S",
            str(self._path),
            "-o",
            f"ControlPersist={self._linger or LINGER_SECONDS}",
            *self._options,
        ]
        with tempfile.TemporaryFile() as words:  # no pipe: the master would hold it open for as long as it lives
            process = await _spawn([*argv, "--", self.node.ssh], stdout=asyncio.subprocess.DEVNULL, stderr=words.fileno())
            try:
                status = await within(CONNECT_SECONDS + 5, process.wait())
            except asyncio.TimeoutError:
                message = f"no ssh connection within {CONNECT_SECONDS + 5} s"
                raise Unreachable(self.name, TIMEOUT, message) from None
            finally:
                await _kill(process)
            words.seek(0)
            said = words.read(MOST_ERROR_BYTES).decode("utf-8", "replace")
        if status:
            raise Unreachable(self.name, cause_of(said), last_words(said))

    async def _control(self, verb: str) -> bool:
        """ssh -O: whether there was a master to hear it. A stuck one counts as none."""
        argv = ["ssh", "-S", str(self._path), "-O", verb, *_settings(("LogLevel=ERROR",)), "--", self.node.ssh]
        process = await _spawn(argv, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL)
        try:
            return await within(3, process.wait()) == 0
        except asyncio.TimeoutError:
            return False
        finally:
            await _kill(process)


class _NeverStarted(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class _Channel:
    """One ssh process: the program's stdin and its lines."""

    def __init__(self, node: str, process: asyncio.subprocess.Process, text: bytes) -> None:
        self._node = node
        self._process = process
        self._text = text
        self._buffer = bytearray()
        self._errors = asyncio.create_task(self._read_errors())
        self._feeding = asyncio.create_task(self._feed())

    async def begin(self, multiplexed: bool) -> None:
        """Returns when the program runs."""
        chatter = 0
        loop = asyncio.get_running_loop()
        until = loop.time() + BEGIN_SECONDS
        while MARKER not in self._buffer:
            try:
                data = await within(until - loop.time(), self._more())
            except asyncio.TimeoutError:
                raise Unreachable(self._node, TIMEOUT, f"no answer within {BEGIN_SECONDS} s") from None
            if not data:
                said = await self._last_errors()
                if multiplexed and self._process.returncode == 255 and never_started(said):
                    raise _NeverStarted(said)
                raise self._ended(said, self._buffer)
            chatter += len(data)
            self._buffer += data
            if chatter > MOST_CHATTER_BYTES:
                raise Unreachable(self._node, PROTOCOL, "its login shell prints without end, and our program does not begin")
        del self._buffer[: self._buffer.index(MARKER) + len(MARKER)]

    async def replies(self, quiet_seconds: float | None, seconds: float | None = None) -> AsyncIterator[dict[str, Any]]:
        loop = asyncio.get_running_loop()
        until = None if seconds is None else loop.time() + seconds
        for count in itertools.count(1):
            line = await self._line(quiet_seconds if until is None else max(0.0, until - loop.time()))
            if "end" in line:
                return
            if seconds is not None and count > MOST_REPLIES:  # each comes in time, and they never end
                raise Unreachable(self._node, PROTOCOL, "it answers without end")
            error = line.get("error")
            if isinstance(error, dict):
                details = error.get("details")
                raise NodeError(
                    self._node,
                    str(error.get("code", "bug")),
                    str(error.get("message", ""))[-MOST_MESSAGE:],
                    int(error.get("status", 1)),
                    details if isinstance(details, dict) else None,
                )
            reply = line.get("reply")
            if not isinstance(reply, dict):
                raise Unreachable(self._node, PROTOCOL, "what it answers is no answer of our program")
            yield reply

    async def _line(self, seconds: float | None) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        until = None if seconds is None else loop.time() + seconds
        seen = 0  # looking through a long answer from its start for every piece would take its square
        while (end := self._buffer.find(b"\n", seen)) < 0:
            seen = len(self._buffer)
            try:
                data = await within(None if until is None else until - loop.time(), self._more())
            except asyncio.TimeoutError:
                raise Unreachable(self._node, TIMEOUT, f"it has said nothing for {seconds:.0f} s") from None
            if not data:
                raise self._ended(await self._last_errors(), self._buffer)
            self._buffer += data
            if len(self._buffer) > MOST_BYTES:
                raise Unreachable(self._node, PROTOCOL, f"its answer is longer than {MOST_BYTES >> 20} MiB")
        head = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        try:
            line = json_text.loads(head)
        except ValueError:
            line = None
        if not isinstance(line, dict):
            shown = head[:200].decode("utf-8", "replace")
            raise Unreachable(self._node, PROTOCOL, f"what it answers is no JSON object: {shown!r}")
        return line

    def _ended(self, said: str, rest: bytearray) -> Unreachable:
        status = self._process.returncode
        if status == 255 or (status is not None and status < 0):
            return Unreachable(self._node, cause_of(said), last_words(said))
        if status == 127:  # a shell's, for a command that it does not find
            return Unreachable(self._node, PROTOCOL, "it has no python3 that its login shell finds; 3.8 or newer is needed")
        shown = said.strip() or rest.decode("utf-8", "replace").strip()
        words = shown.splitlines()[-1][:300] if shown else "without a word"
        return Unreachable(self._node, PROTOCOL, f"our program did not run or broke off, with status {status}: {words}")

    async def _more(self) -> bytes:
        assert self._process.stdout is not None
        return await self._process.stdout.read(65536)

    async def _feed(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(self._text)
            await self._process.stdin.drain()

    async def beat(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            while True:
                await asyncio.sleep(BEAT_SECONDS)
                self._process.stdin.write(b"\n")
                await self._process.stdin.drain()

    async def _read_errors(self) -> bytes:
        assert self._process.stderr is not None
        kept = b""
        while data := await self._process.stderr.read(65536):
            kept = (kept + data)[-MOST_ERROR_BYTES:]
        return kept

    async def _last_errors(self) -> str:
        """All of its stderr, once its stdout has ended."""
        await asyncio.wait((self._errors, ended := asyncio.ensure_future(self._process.wait())), timeout=2)
        ended.cancel()
        return self._errors.result().decode("utf-8", "replace") if self._errors.done() else ""

    async def end(self) -> None:
        """The ssh process and all of its group are gone afterwards; on the node, its stdin ends."""
        for task in (self._feeding, self._errors):
            task.cancel()
        await _kill(self._process)


async def _spawn(argv: list[str], **pipes: Any) -> asyncio.subprocess.Process:
    """In a session of its own: a Ctrl-C is ours to handle, and all that it started can be killed with it."""
    how = {"stdin": asyncio.subprocess.DEVNULL, **pipes}
    try:
        return await asyncio.create_subprocess_exec(*argv, start_new_session=True, env={**os.environ, "LC_ALL": "C"}, **how)
    except FileNotFoundError:
        raise SparkguardError("there is no ssh on this machine", "install OpenSSH's client", CONFIG) from None


async def _kill(process: asyncio.subprocess.Process) -> None:
    """It is gone afterwards, with all of its group."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    # wait() waits for the pipes as well, and one that nobody reads to its end would never be done. (Closing the transport as a
    # whole would reap the process behind the back of asyncio, which then complains.)
    for number in (0, 1, 2):
        pipe = process._transport.get_pipe_transport(number)  # type: ignore[attr-defined]
        if pipe is not None:
            pipe.close()
    await asyncio.shield(asyncio.ensure_future(process.wait()))


def _settings(values: Sequence[str]) -> list[str]:
    return [word for value in values for word in ("-o", value)]


def _socket_folder(state_dir: str | None, notice: Callable[[str], None]) -> str | None:
    """Where control sockets fit; None: nowhere, and every call costs a login."""
    wanted = os.path.join(state_dir or os.path.expanduser("~/.local/state/spark-serve"), "ssh")
    short = f"/tmp/spark-serve-{os.getuid()}"
    why: list[str] = []
    for folder in (wanted, short):
        if len(os.fsencode(folder)) + 13 > MOST_PATH_BYTES:
            why.append(f"{folder} is too long a path for ssh's control sockets (104 bytes)")
        elif not _is_private(folder):
            why.append(f"{folder} is no folder of yours alone, or is read-only: ssh's control sockets cannot be there")
        else:
            for reason in why:
                notice(f"{reason}; {folder} has them")
            return folder
    notice(f"every call to a node costs a login of its own: {'; '.join(why)}")
    return None


def _is_private(folder: str) -> bool:
    """Makes it; whether it is ours alone. A socket in a folder of another's would hand them our connection."""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        found = os.lstat(folder)
    except OSError:
        return False
    if not os.access(folder, os.W_OK):  # a file system that became read-only
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


@contextlib.asynccontextmanager
async def _file_lock(path: str) -> AsyncIterator[None]:
    with open(path, "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(0.02)
        yield
