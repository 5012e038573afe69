"""The nodes over OpenSSH: the user's own ssh(1), with its configuration, agent and known_hosts. The only file that runs it.

Each node has one master connection, started here and ended by ssh itself when nobody has used it for a minute, so that one
command after another costs a channel and no login (18 ms in place of 528 ms on a Spark). Nothing else ever logs in:
a channel whose master is gone fails, where ssh by itself would open a slow connection of its own for every call.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from sparkguard.cluster import channel as channels
from sparkguard.cluster.causes import (
    CHANNELS_FULL,
    NO_CHANNEL,
    PROTOCOL,
    TIMEOUT,
    TRANSPORT,
    Unreachable,
    cause_of,
    last_words,
)
from sparkguard.cluster.channel import Channel, NeverStarted, kill
from sparkguard.cluster.deadline import within
from sparkguard.cluster.program import BOOT, payload
from sparkguard.cluster.sockets import file_lock, socket_folder
from sparkguard.core.cluster import Node
from sparkguard.errors import CONFIG, SparkguardError

CHANNELS = 4  # at once and node: sshd allows 10 (MaxSessions), and `watch`, the dashboard and a command may run beside each other
LINGER_SECONDS = 60
CONNECT_SECONDS = 10
# Between the program's own deadline, when it says what it waits for, and ours.
GRACE_SECONDS = 3
FULL_SECONDS = 20

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
        folder = socket_folder(state_dir, notice)
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
        text = payload(program, request, None, 3 * channels.BEAT_SECONDS, None)
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
    async def _channel(self, text: bytes, sure: bool) -> AsyncIterator[Channel]:
        """A channel whose program has begun. What surely never began is tried again, by whomever it was asked."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + FULL_SECONDS
        pause = 0.05
        fresh = False
        while True:
            if self._path is not None and (sure or fresh or not os.path.exists(self._path)):
                await self._connect(check=True)
            channel = Channel(self.name, await self._start(), text)
            try:
                await channel.begin(self._path is not None)
                break
            except NeverStarted as error:
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
            async with file_lock(self._path + ".lock"):  # another spark-serve may be about to start the same
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
                await kill(process)
            words.seek(0)
            said = words.read(channels.MOST_ERROR_BYTES).decode("utf-8", "replace")
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
            await kill(process)


async def _spawn(argv: list[str], **pipes: Any) -> asyncio.subprocess.Process:
    """In a session of its own: a Ctrl-C is ours to handle, and all that it started can be killed with it."""
    how = {"stdin": asyncio.subprocess.DEVNULL, **pipes}
    try:
        return await asyncio.create_subprocess_exec(*argv, start_new_session=True, env={**os.environ, "LC_ALL": "C"}, **how)
    except FileNotFoundError:
        raise SparkguardError("there is no ssh on this machine", "install OpenSSH's client", CONFIG) from None


def _settings(values: Sequence[str]) -> list[str]:
    return [word for value in values for word in ("-o", value)]
