"""From processes to claims: one per server, however many processes, wrappers and clients it has.

A server below another server is that server's child. A process title (VLLM::EngineCore) without a server above it is an
engine whose server is gone, or one that a Python program started by LLM(). A container's client and the process in the
container are one server. What is left of the GPU's process list is engine 'other'.
"""

from __future__ import annotations

import os

from sparkguard.core.record import Record
from sparkguard.core.share import share_of
from sparkguard.core.types import RAM, Claim, GpuProcess, Hold, Machine
from sparkguard.probe import devices, engines, procfs, vllm_version
from sparkguard.probe.procfs import Process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sparkguard.probe.containers import Container

# Below this a GPU process is a desktop's, not a model's.
OTHER_BYTES = 256 << 20
# A server that opens no port is taken to have loaded by then; a 75 GiB checkpoint from a slow disk takes about that long.
LOADED_SECONDS = 900
_CONFIG_BYTES = 1 << 20


class Seen(Record):
    """A claim, and every process id that stands for it (the client's and the container's)."""

    claim: Claim
    pids: tuple[int, ...]


class _Server(Record):
    process: Process
    found: engines.Found
    client: Process | None = None  # the container client that started it
    container: Container | None = None


def see(
    proc_root: str, snapshot: procfs.Snapshot, machine: Machine, gpu_processes: tuple[GpuProcess, ...] | None
) -> tuple[Seen, ...]:
    """Every server on the machine. gpu_processes None: NVML was not asked, or did not answer."""
    tree = _Tree(proc_root)
    servers, titles = _collect(proc_root, snapshot, tree)
    ports: set[int] | None = None
    seen = []
    for server in servers:
        if ports is None:
            ports = procfs.listening_ports(proc_root)
        seen.append(_see_server(tree, server, machine, ports))
    seen += _see_orphans(tree, titles, {pid for server in servers for pid in _pids(server)})
    return tuple(_measure(tree, seen, machine, gpu_processes))


def undeclared(seen: tuple[Seen, ...]) -> bool:
    """Whether somebody holds memory without saying how much."""
    return any(hold.share is None for entry in seen for hold in entry.claim.holds)


class _Tree:
    """Parents and start times, each read once."""

    def __init__(self, proc_root: str) -> None:
        self.root = proc_root
        self._above: dict[int, list[int]] = {}

    def above(self, pid: int) -> list[int]:
        if pid not in self._above:
            self._above[pid] = procfs.ancestors(self.root, pid)
        return self._above[pid]

    def age_seconds(self, pid: int) -> float:
        stat = procfs.read_stat(self.root, pid)
        try:
            with open(f"{self.root}/uptime", encoding="ascii") as file:
                uptime = float(file.read().split()[0])
        except (OSError, ValueError, IndexError):
            return 0.0
        return uptime - stat.start_time / os.sysconf("SC_CLK_TCK") if stat else 0.0


def _pids(server: _Server) -> tuple[int, ...]:
    return (server.process.pid, server.client.pid) if server.client else (server.process.pid,)


def _config_reader(proc_root: str, pid: int, container: bool) -> engines.ReadFile:
    """Opens a path as the process itself would."""

    def read_file(path: str) -> str | None:
        base = f"{proc_root}/{pid}/root" if container else ""
        try:
            if not path.startswith("/"):
                base += os.readlink(f"{proc_root}/{pid}/cwd") + "/"
            with open(base + path, encoding="utf-8", errors="replace") as file:
                return file.read(_CONFIG_BYTES)
        except OSError:
            return None

    return read_file


def _collect(proc_root: str, snapshot: procfs.Snapshot, tree: _Tree) -> tuple[list[_Server], list[Process]]:
    servers: list[_Server] = []
    clients: list[_Server] = []
    titles: list[Process] = []
    for process in snapshot.processes:
        inside = procfs.in_container(proc_root, process.pid) if process.argv else False
        read_file = _config_reader(proc_root, process.pid, inside)
        if engines.title_of(process.argv):
            titles.append(process)
        elif started := engines.recognise_client(process.argv, read_file):
            clients.append(_Server(process, started[1], process, started[0]))
        elif found := engines.recognise(process.argv, read_file):
            servers.append(_Server(process, found))
    pids = {server.process.pid for server in servers}
    servers = [server for server in servers if not pids.intersection(tree.above(server.process.pid))]
    for client in clients:
        twin = next((server for server in servers if not server.client and _same(proc_root, client, server)), None)
        if twin:
            servers[servers.index(twin)] = twin.replace(client=client.process, container=client.container)
        else:
            servers.append(client)
    return servers, titles


def _same(proc_root: str, client: _Server, server: _Server) -> bool:
    return (
        client.found.engine == server.found.engine
        and client.found.declared == server.found.declared
        and client.found.port == server.found.port
        and procfs.in_container(proc_root, server.process.pid)
    )


def _see_server(tree: _Tree, server: _Server, machine: Machine, ports: set[int]) -> Seen:
    root, pid, found = tree.root, server.process.pid, server.found
    env = procfs.environment(root, pid)
    if server.container is not None and server.container.devices:
        env = {**(env or {}), "NVIDIA_VISIBLE_DEVICES": server.container.devices}
    declared = found.declared
    pools, note = devices.pools_of(machine, env, *(declared.device_ids, declared.gpus) if declared else ())
    unit = _unit(root, server.client.pid if server.client else pid)
    note = "; ".join(text for text in (found.note, note) if text)
    if declared is None:
        holds = tuple(Hold(pool.id, None, None) for pool in pools)
        claim = Claim(pid, found.engine, holds, "unknown", unit, found.port, engines.GROWS[found.engine], note=note)
        return Seen(claim, _pids(server))
    default = vllm_version.DEFAULT
    if declared.source == "default":
        default = vllm_version.default_share(_version(root, server))
    kv_gib = (env or {}).get("VLLM_CPU_KVCACHE_SPACE")
    holds = tuple(devices.hold(declared, pool, default, kv_gib) for pool in pools)
    source = declared.source
    if source == "default" and kv_gib and any(pool.kind == RAM for pool in pools):
        source = "environment"
    holds = tuple(_taken(tree, server, hold, ports, next(p.kind for p in pools if p.id == hold.pool) == RAM) for hold in holds)
    return Seen(Claim(pid, found.engine, holds, source, unit, found.port, note=note), _pids(server))


def _version(proc_root: str, server: _Server) -> tuple[int, ...] | None:
    argv = server.process.argv
    if server.container is not None and server.client is server.process:
        return None
    program = next((word for word in argv[:2] if word.rpartition("/")[2] == "vllm"), argv[0])
    if not program.startswith("/"):
        return None
    inside = procfs.in_container(proc_root, server.process.pid)
    return vllm_version.version_beside(program, f"{proc_root}/{server.process.pid}/root" if inside else "")


def _taken(tree: _Tree, server: _Server, hold: Hold, ports: set[int], on_cpu: bool) -> Hold:
    """How much of its claim a server uses already, where NVML does not say.

    On system RAM its private pages are the truth. On a unified pool CUDA's memory shows in no process (vllm issue 54200:
    1.8 GiB resident for a 77 GiB model), but vLLM listens on its port only when everything is loaded.
    """
    if hold.bytes is None:
        return hold
    pid = server.process.pid
    private = procfs.private_bytes(tree.root, procfs.descendants(tree.root, pid))
    if not on_cpu:
        port = server.found.port
        if port is None:
            ready = tree.age_seconds(pid) > LOADED_SECONDS
        else:
            ready = port in (procfs.listening_ports(tree.root, pid) if server.client else ports)
        private = hold.bytes if ready else private
    return hold.replace(taken_bytes=min(hold.bytes, private))


def _see_orphans(tree: _Tree, titles: list[Process], servers: set[int]) -> list[Seen]:
    groups: dict[tuple[int, int], list[Process]] = {}
    for process in titles:
        stat = procfs.read_stat(tree.root, process.pid)
        if stat is not None and not servers.intersection(tree.above(process.pid)):
            groups.setdefault((stat.session, stat.pgrp), []).append(process)
    seen = []
    for members in groups.values():
        cores = [process for process in members if engines.title_of(process.argv) == "EngineCore"] or members
        pid = cores[0].pid
        above = tree.above(pid)
        parent = procfs.argv_of(tree.root, above[0]) if above else ()
        in_program = bool(parent) and parent[0].rpartition("/")[2].startswith("python")
        note = f"its share is in the code of pid {above[0]}" if in_program else "its server is gone"
        unit = _unit(tree.root, pid)
        claim = Claim(pid, "vllm", (), "unknown", unit, None, orphan=not in_program, note=note)
        seen.append(Seen(claim, tuple(process.pid for process in members)))
    return seen


def _measure(tree: _Tree, seen: list[Seen], machine: Machine, gpu_processes: tuple[GpuProcess, ...] | None) -> list[Seen]:
    """Adds what NVML measured, and gives the ones that nobody measured an unknown hold on every pool they may use."""
    owners = {pid: entry for entry in seen for pid in entry.pids}
    used: dict[int, dict[str, int | None]] = {}
    others: dict[int, dict[str, int | None]] = {}
    for row in gpu_processes or ():
        owner = next((owners[pid] for pid in [row.pid, *tree.above(row.pid)] if pid in owners), None)
        rows = others.setdefault(row.pid, {}) if owner is None else used.setdefault(owner.pids[0], {})
        so_far = rows.get(row.pool, 0)
        rows[row.pool] = None if row.used_bytes is None or so_far is None else so_far + row.used_bytes
    totals = {pool.id: pool.total_bytes for pool in machine.pools}
    default, _ = devices.pools_of(machine, None)
    result = []
    for entry in seen:
        claim = entry.claim
        rows = used.get(entry.pids[0], {})
        holds = claim.holds or tuple(Hold(pool.id, None, None) for pool in default)
        measured = {pool: amount for pool, amount in rows.items() if amount is not None}
        if claim.source == "unknown":
            if measured:
                holds = tuple(_measured(pool, amount, totals.get(pool)) for pool, amount in measured.items())
                claim = claim.replace(source="measured")
        elif gpu_processes is not None:
            holds = tuple(
                hold.replace(taken_bytes=min(hold.bytes, max(hold.taken_bytes, measured.get(hold.pool, 0))))
                if hold.bytes
                else hold
                for hold in holds
            )
        result.append(entry.replace(claim=claim.replace(holds=holds)))
    for pid, rows in others.items():
        holds = tuple(
            _measured(pool, amount, totals.get(pool))
            for pool, amount in rows.items()
            if amount is not None and amount >= OTHER_BYTES
        )
        if holds:
            argv = procfs.argv_of(tree.root, pid)
            unit = _unit(tree.root, pid)
            name = argv[0].rpartition("/")[2] if argv else ""
            result.append(Seen(Claim(pid, "other", holds, "measured", unit, None, grows=False, note=name), (pid,)))
    return result


def _unit(proc_root: str, pid: int) -> str | None:
    unit = procfs.unit_of(procfs.cgroup(proc_root, pid))
    return unit and procfs.unescape_unit(unit)


def _measured(pool: str, amount: int, total: int | None) -> Hold:
    return Hold(pool, share_of(amount, total) if total else None, amount, amount)
