"""What is read of /proc, and what is left out."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from process_tree import ProcessTree

from sparkguard.errors import OSERR, SparkguardError
from sparkguard.probe import procfs

MARKERS = (b"vllm", b"::")


@pytest.fixture
def tree(tmp_path: Path) -> ProcessTree:
    return ProcessTree(tmp_path / "proc")


def scan(tree: ProcessTree) -> procfs.Snapshot:
    return procfs.scan(str(tree.root), MARKERS)


def test_scan(tree: ProcessTree) -> None:
    """Only processes with a marker in their command line are returned, in the order of their pids."""
    tree.add(300, ["vllm", "serve", "a b", ""])
    tree.add(20, ["VLLM::EngineCore"])
    tree.add(40, ["bash"])
    tree.add(50, b"")
    snapshot = scan(tree)
    assert [(process.pid, process.argv) for process in snapshot.processes] == [
        (20, ("VLLM::EngineCore",)),
        (300, ("vllm", "serve", "a b")),
    ]
    assert not snapshot.hidden


def test_scan_keeps_every_byte(tree: ProcessTree) -> None:
    """An argument is what stands between two NULs, be it UTF-8 or not."""
    tree.add(300, b"vllm\0\xff\xfe\n --x\0 \0\xc3\xa9\0")
    (process,) = scan(tree).processes
    assert [os.fsencode(word) for word in process.argv] == [b"vllm", b"\xff\xfe\n --x", b" ", b"\xc3\xa9"]


def test_scan_reads_long_command_lines_whole(tree: ProcessTree) -> None:
    """Also those longer than one read, with the marker anywhere."""
    tree.add(300, ["x" * 200_000, "y" * 200_000, "vllm"])
    (process,) = scan(tree).processes
    assert [len(word) for word in process.argv] == [200_000, 200_000, 4]


def refuse(monkeypatch: pytest.MonkeyPatch, pid: int, error: int) -> None:
    """The tests may run as root, whom no file mode stops."""
    real = os.open

    def fake(path: str, flags: int) -> int:
        if f"/{pid}/" in path:
            raise OSError(error, os.strerror(error))
        return real(path, flags)

    monkeypatch.setattr(procfs.os, "open", fake)


@pytest.mark.parametrize(
    "error, hidden", [(errno.EPERM, True), (errno.EACCES, True), (errno.ENOENT, False), (errno.ESRCH, False)]
)
def test_unreadable_and_vanished(tree: ProcessTree, monkeypatch: pytest.MonkeyPatch, error: int, hidden: bool) -> None:
    """A process that may not be read is hidden (hidepid=1); one that has ended is none."""
    tree.add(300, ["vllm"])
    tree.add(301, ["vllm"])
    refuse(monkeypatch, 300, error)
    snapshot = scan(tree)
    assert [process.pid for process in snapshot.processes] == [301]
    assert snapshot.hidden is hidden


def test_a_process_that_ends_during_the_read(tree: ProcessTree) -> None:
    """Its command line opens and does not read any more."""
    (tree.root / "300" / "cmdline").mkdir(parents=True)
    assert scan(tree) == procfs.Snapshot((), False)


def test_hidepid_2(tree: ProcessTree) -> None:
    """Process 1 always exists: where it is not listed, other users' processes are not."""
    tree.add(300, ["vllm"])
    tree.remove(1)
    assert scan(tree).hidden


@pytest.mark.parametrize("content", [None, "", "version"])
def test_no_proc(tmp_path: Path, content: str | None) -> None:
    """A /proc that is not there, or shows no process, is no machine without servers."""
    root = tmp_path / "proc"
    if content is not None:
        (root / content).mkdir(parents=True)
    with pytest.raises(SparkguardError) as caught:
        procfs.scan(str(root), MARKERS)
    assert caught.value.status == OSERR


@pytest.mark.parametrize("comm", ["a", "a b", "a) S 7 (b", ")", "a\n)", b"\xff"])
def test_stat(tree: ProcessTree, comm: str | bytes) -> None:
    """The fields stand behind the last parenthesis, whatever the name holds."""
    tree.add(300, ["x"], ppid=200, comm=comm, pgrp=250, session=240, starttime=12345, state="D")
    assert procfs.read_stat(str(tree.root), 300) == procfs.Stat("D", 200, 250, 240, 12345)


@pytest.mark.parametrize("text", ["", "300 (x", "300 (x) S 1", "300 (x) S one 1 1 0 -1 0 " + "0 " * 20])
def test_torn_stat(tree: ProcessTree, text: str) -> None:
    """What is no stat line is no process."""
    tree.add(300, ["x"])
    (tree.root / "300" / "stat").write_text(text)
    assert procfs.read_stat(str(tree.root), 300) is None


def test_exiting(tree: ProcessTree) -> None:
    """A killed process gives back its memory for a while, and a zombie has none left."""
    tree.add(300, ["x"], exiting=True)
    tree.add(301, ["x"], state="Z")
    tree.add(302, ["x"])
    stats = [procfs.read_stat(str(tree.root), pid) for pid in (300, 301, 302)]
    assert [stat and stat.exiting for stat in stats] == [True, True, False]


def test_a_reused_pid_has_another_start_time(tree: ProcessTree) -> None:
    """The pid alone does not tell a process from its predecessor."""
    tree.add(300, ["x"], starttime=1000)
    before = procfs.read_stat(str(tree.root), 300)
    tree.remove(300)
    tree.add(300, ["x"], starttime=2000)
    assert procfs.read_stat(str(tree.root), 300) != before


def test_families(tree: ProcessTree) -> None:
    """Above are the parents up to process 1, below are all children and theirs."""
    for pid, ppid in ((10, 1), (20, 10), (30, 20), (31, 20), (40, 1)):
        tree.add(pid, ["x"], ppid=ppid)
    root = str(tree.root)
    assert procfs.ancestors(root, 30) == [20, 10, 1]
    assert sorted(procfs.descendants(root, 10)) == [10, 20, 30, 31]
    assert procfs.ancestors(root, 99) == []
    assert procfs.descendants(root, 99) == [99]


def test_a_circle_of_parents_ends(tree: ProcessTree) -> None:
    """A process is never above itself, whatever a torn read shows."""
    tree.add(10, ["x"], ppid=11)
    tree.add(11, ["x"], ppid=10)
    assert procfs.ancestors(str(tree.root), 10) == [11]
    assert sorted(procfs.descendants(str(tree.root), 10)) == [10, 11]


def test_private_bytes(tree: ProcessTree) -> None:
    """File pages are shared and do not count; a process that has ended has none."""
    tree.add(10, ["x"], anonymous_bytes=64 << 20, file_bytes=640 << 20)
    tree.add(11, ["x"], anonymous_bytes=1 << 20)
    assert procfs.private_bytes(str(tree.root), [10, 11, 99]) == 65 << 20


def test_environment(tree: ProcessTree) -> None:
    """A variable's value may hold anything but NUL; another user's environment is None, not empty."""
    tree.add(10, ["x"], environ={"A": "b=c", "B": "", "C": "x\ny", "D": "\udcff"})
    tree.add(11, ["x"], readable=False)
    assert procfs.environment(str(tree.root), 10) == {"A": "b=c", "B": "", "C": "x\ny", "D": "\udcff"}
    assert procfs.environment(str(tree.root), 11) is None
    assert procfs.environment(str(tree.root), 99) is None


@pytest.mark.parametrize(
    "text, path",
    [
        ("0::/user.slice/a.service\n", "/user.slice/a.service"),
        ("9:name=systemd:/a.service\n8:pids:/b\n", "/a.service"),
        ("9:name=systemd:/a.service\n0::/\n", "/a.service"),
        ("9:name=systemd:/\n0::/a.service\n", "/a.service"),
        ("0::/a:b.service\n", "/a:b.service"),
        ("8:pids:/b\n", None),
        ("", None),
    ],
)
def test_cgroup(tree: ProcessTree, text: str, path: str | None) -> None:
    """The path in systemd's tree, under v2, v1 and both."""
    tree.add(10, ["x"])
    (tree.root / "10" / "cgroup").write_text(text)
    assert procfs.cgroup(str(tree.root), 10) == path


@pytest.mark.parametrize(
    "path, unit",
    [
        ("/user.slice/user-1000.slice/user@1000.service/inference.slice/vllm-model@m.service", "vllm-model@m.service"),
        ("/system.slice/ollama.service", "ollama.service"),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/vllm.service/libpod-payload-1", "vllm.service"),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/app-terminal.scope", None),
        ("/user.slice/user-1000.slice/session-2.scope", None),
        ("/system.slice/docker-0123.scope", None),
        ("/user.slice/user-1000.slice/user@1000.service", None),
        ("/init.scope", None),
        ("/", None),
        (None, None),
    ],
)
def test_unit_of(path: str | None, unit: str | None) -> None:
    """The innermost service; a session, a terminal and a container have none."""
    assert procfs.unit_of(path) == unit


@pytest.mark.parametrize(
    "name, plain",
    [
        (r"vllm-model@my\x2dmodel.service", "vllm-model@my-model.service"),
        (r"a\x20b\x5cc", "a b\\c"),
        (r"m\xc3\xb6del", "mödel"),
        (r"a\x2", r"a\x2"),
        (r"a\xzz\x2d", r"a\xzz-"),
        ("plain", "plain"),
    ],
)
def test_unescape_unit(name: str, plain: str) -> None:
    r"""systemd writes a byte that a unit's name may not hold as \xNN."""
    assert procfs.unescape_unit(name) == plain


@pytest.mark.parametrize(
    "cgroup, nspid, contained",
    [
        ("/user.slice/session-2.scope", [], False),
        ("/user.slice/session-2.scope", [7], True),
        ("/system.slice/docker-0123456789ab.scope", [], True),
        ("/docker/0123456789ab", [], True),
        ("/user.slice/user.slice/libpod-0123.scope/container", [], True),
        ("/system.slice/nerdctl-0123.scope", [], True),
        ("/system.slice/docker.service", [], False),
        ("/user.slice/docker-vllm.service", [], False),
    ],
)
def test_in_container(tree: ProcessTree, cgroup: str, nspid: list[int], contained: bool) -> None:
    """A pid namespace below ours tells a container, or the cgroup that its runtime has made."""
    tree.add(10, ["x"], comm="a\nNSpid:\t1\t2", cgroup=cgroup, nspid=nspid)
    assert procfs.in_container(str(tree.root), 10) is contained
    assert not procfs.in_container(str(tree.root), 99)


def test_listening_ports(tree: ProcessTree) -> None:
    """Ports in state LISTEN, over IPv4 and IPv6, in a namespace of one's own or the machine's."""
    tree.listen("self", 8000, 65535)
    (tree.root / "self" / "net" / "tcp6").write_text("  sl  local\n   0: 00000000000000000000000000000000:1F41 0000:0000 0A\n")
    tree.add(10, ["x"], listens=[9000])
    tree.add(11, ["x"])
    root = str(tree.root)
    assert procfs.listening_ports(root) == procfs.listening_ports(root, 11) == {8000, 65535, 8001}
    assert procfs.listening_ports(root, 10) == {9000}
    assert procfs.listening_ports(root, 99) == set()


def test_the_real_proc() -> None:
    """The same code reads this machine: this very process, its parent and its command line."""
    stat = procfs.read_stat("/proc", os.getpid())
    assert stat is not None and (stat.ppid, stat.session, stat.exiting) == (os.getppid(), os.getsid(0), False)
    assert procfs.ancestors("/proc", os.getpid())[0] == os.getppid()
    program = Path("/proc/self/cmdline").read_bytes().partition(b"\0")[0]  # pytest's, or that of one of its workers
    assert os.getpid() in [process.pid for process in procfs.scan("/proc", (program,)).processes]
    assert procfs.private_bytes("/proc", [os.getpid()]) > 1 << 20
    assert len(procfs.boot_id("/proc")) == 36


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_lack_of_ours_is_nobodys_end(tree: ProcessTree, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """Without a descriptor or memory left a server cannot be read; taking it for ended would admit beside it."""
    tree.add(300, ["vllm", "serve", "m"])
    refuse(monkeypatch, 300, error)
    for read in (lambda: scan(tree), lambda: procfs.read_stat(str(tree.root), 300), lambda: procfs.cgroup(str(tree.root), 300)):
        with pytest.raises(SparkguardError, match="the processes cannot be read") as caught:
            read()
        assert caught.value.status == OSERR


@pytest.mark.parametrize("name", ["evil\x1b[2J", "x'; reboot; '", "a b", "a\nb", "\udcff"])
def test_a_cgroup_with_a_name_that_systemd_never_gives(name: str) -> None:
    """Its owner chose it, perhaps for the command that a refusal proposes: it is no unit."""
    assert procfs.unit_of(f"/user.slice/user@1000.service/app.slice/{name}.service") is None
