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
from sparkguard.probe import containers, devices, engines, files, ports, procfs, vllm_version
from sparkguard.probe.procfs import Process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

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
    loading: bool = False  # undeclared and not ready yet: what it holds now is not what it will hold


class _Server(Record):
    """container without client: the client's own process, because the container is not up yet."""

    process: Process
    found: engines.Found
    container: Container | None = None
    client: Process | None = None


def see(
    proc_root: str, snapshot: procfs.Snapshot, machine: Machine, gpu_processes: tuple[GpuProcess, ...] | None
) -> tuple[Seen, ...]:
    """Every server on the machine. gpu_processes None: NVML was not asked, or did not answer."""
    tree = _Tree(proc_root)
    servers, titles = _collect(snapshot, tree)
    seen = [_see_server(tree, server, machine) for server in servers]
    seen += _see_orphans(tree, titles, {pid for entry in seen for pid in entry.pids})
    return tuple(_measure(tree, seen, machine, gpu_processes))


def undeclared(seen: tuple[Seen, ...]) -> bool:
    """Whether somebody holds memory without saying how much."""
    return any(hold.share is None for entry in seen for hold in entry.claim.holds)


class _Tree:
    """Parents and times of start, each read once."""

    def __init__(self, proc_root: str) -> None:
        self.root = proc_root
        self._above: dict[int, list[int]] = {}
        self._began: dict[int, int] = {}

    def above(self, pid: int) -> list[int]:
        if pid not in self._above:
            self._above[pid] = procfs.ancestors(self.root, pid)
        return self._above[pid]

    def began(self, pid: int) -> int:
        if pid not in self._began:
            stat = procfs.read_stat(self.root, pid)
            self._began[pid] = stat.start_time if stat else 0
        return self._began[pid]

    def listens(self, pid: int, port: int, contained: bool) -> bool:
        """Whether the port is open where the process lives: a container has ports of its own."""
        if contained:
            return port in procfs.listening_ports(self.root, pid)
        return ports.listens(self.root, port)

    def age_seconds(self, pid: int) -> float:
        stat = procfs.read_stat(self.root, pid)
        try:
            with open(f"{self.root}/uptime", encoding="ascii") as file:
                uptime = float(file.read().split()[0])
        except (OSError, ValueError, IndexError):
            return 0.0
        return uptime - stat.start_time / os.sysconf("SC_CLK_TCK") if stat else 0.0


def _file_reader(proc_root: str, pid: int) -> engines.ReadFile:
    """Opens a path as the process itself would: from its folder, below its root."""

    def read_file(path: str) -> str | None:
        if path.startswith("/"):
            text = _read_text(f"{proc_root}/{pid}/root{path}")
            # Another user's root is closed to us; outside a container it is the same as ours.
            return _read_text(path) if text is None and not procfs.in_container(proc_root, pid) else text
        return _read_text(f"{proc_root}/{pid}/cwd/{path}")

    return read_file


def _read_text(path: str) -> str | None:
    try:
        return files.read_file(path, _CONFIG_BYTES).decode("utf-8", "replace")
    except OSError:
        return None


def _collect(snapshot: procfs.Snapshot, tree: _Tree) -> tuple[list[_Server], list[Process]]:
    servers: list[_Server] = []
    clients: list[_Server] = []
    titles: list[Process] = []
    for process in snapshot.processes:
        read_file = _file_reader(tree.root, process.pid)
        if engines.title_of(process.argv):
            titles.append(process)
        elif started := engines.recognise_client(process.argv, read_file):
            if _daemon_is_here(tree.root, process.pid):
                clients.append(_Server(process, started[1], started[0]))
        elif found := engines.recognise(process.argv, read_file):
            servers.append(_Server(process, found))
    servers = _without_children(servers, tree)
    contained = [server for server in servers if procfs.in_container(tree.root, server.process.pid)] if clients else []
    for client in clients:
        twin = _twin(client, contained, tree)
        if twin is None:
            servers.append(client)
        else:
            contained.remove(twin)
            servers[servers.index(twin)] = twin.replace(container=client.container, client=client.process)
    return servers, titles


def _without_children(servers: list[_Server], tree: _Tree) -> list[_Server]:
    by_pid = {server.process.pid: server for server in servers}
    above = {pid: [by_pid[other] for other in tree.above(pid) if other in by_pid] for pid in by_pid}
    busy = {parent.process.pid for parents in above.values() for parent in parents if parent.found.starts_others}
    return [
        server
        for pid, server in by_pid.items()
        if pid not in busy
        and not any(
            engines.runs(parent.found.engine, server.found.engine) and not parent.found.starts_others for parent in above[pid]
        )
    ]


def _daemon_is_here(proc_root: str, pid: int) -> bool:
    env = procfs.environment(proc_root, pid) or {}
    return all(containers.is_local(env.get(name, "")) for name in ("DOCKER_HOST", "CONTAINER_HOST"))


def _twin(client: _Server, contained: list[_Server], tree: _Tree) -> _Server | None:
    """The process in the container that this client started: by its arguments, else by what they declare.

    One that is older than the client is another container with the same arguments, and this client's is not up yet.
    """
    words = client.container.command if client.container else ()
    began = tree.began(client.process.pid)
    inside = [
        server for server in contained if server.found.engine == client.found.engine and tree.began(server.process.pid) >= began
    ]
    for tail in (words, words[1:]):  # the first word may be the program, by another name
        for server in inside:
            if tail and server.process.argv[-len(tail) :] == tail:
                return server
    return next((server for server in inside if server.found == client.found), None)


def _see_server(tree: _Tree, server: _Server, machine: Machine) -> Seen:
    root, pid, found, container = tree.root, server.process.pid, server.found, server.container
    waiting = container is not None and server.client is None
    contained = not waiting and procfs.in_container(root, pid)
    env = None if waiting else procfs.environment(root, pid)
    if container is not None:
        if env is None:
            client_pid = (server.client or server.process).pid
            env = containers.environment_of(container, procfs.environment(root, client_pid), _file_reader(root, client_pid))
        if container.devices and env is not None:
            env["NVIDIA_VISIBLE_DEVICES"] = container.devices
    elif env is not None and not contained:
        env.pop("NVIDIA_VISIBLE_DEVICES", None)
    declared = found.declared
    pools, note = devices.pools_of(machine, env, *(declared.device_ids, declared.gpus) if declared else ())
    client = server.client or server.process
    pids = (pid,) if client is server.process else (pid, client.pid)
    port = found.port if container is None else dict(container.published).get(found.port or 0, found.port)
    unit = _unit(root, client.pid)
    note = "; ".join(text for text in (found.note, note) if text)
    if declared is None:
        holds = tuple(Hold(pool.id, None, None) for pool in pools)
        grows = engines.GROWS[found.engine]
        claim = Claim(pid, found.engine, holds, "unknown", port=port, grows=grows, note=note, **unit)
        return Seen(claim, pids, loading=waiting or not _is_ready(tree, server, contained))
    default = vllm_version.DEFAULT
    if declared.source == "default" and not waiting:
        default = vllm_version.default_share(_version(root, server.process, contained))
    kv_gib = (env or {}).get("VLLM_CPU_KVCACHE_SPACE")
    source = declared.source
    if source == "default" and kv_gib and any(pool.kind == RAM for pool in pools):
        source = "environment"
    holds = tuple(devices.hold(declared, pool, default, kv_gib) for pool in pools)
    if not waiting:
        holds = tuple(_taken(tree, server, hold, pool.kind == RAM, contained) for hold, pool in zip(holds, pools))
    return Seen(Claim(pid, found.engine, holds, source, port=port, note=note, **unit), pids)


def _version(proc_root: str, process: Process, contained: bool) -> tuple[int, ...] | None:
    for program in reversed(process.argv[:2]):  # the console script knows better than the interpreter
        if program.startswith("/"):
            root = f"{proc_root}/{process.pid}/root" if contained else ""
        elif "/" in program and not program.startswith("-"):
            root = f"{proc_root}/{process.pid}/cwd/"
        else:
            continue
        version = vllm_version.version_beside(program, root)
        if version is not None:
            return version
    return None


def _taken(tree: _Tree, server: _Server, hold: Hold, on_cpu: bool, contained: bool) -> Hold:
    """How much of its claim a server uses already, where NVML does not say.

    On system RAM its private pages are the truth. On a unified pool CUDA's memory shows in no process (vllm issue 54200:
    1.8 GiB resident for a 77 GiB model), but vLLM listens on its port only when everything is loaded.
    """
    if hold.bytes is None:
        return hold
    if not on_cpu and _is_ready(tree, server, contained):
        return hold.replace(taken_bytes=hold.bytes)
    private = procfs.private_bytes(tree.root, procfs.descendants(tree.root, server.process.pid))
    return hold.replace(taken_bytes=min(hold.bytes, private))


def _is_ready(tree: _Tree, server: _Server, contained: bool) -> bool:
    pid, port = server.process.pid, server.found.port
    return tree.age_seconds(pid) > LOADED_SECONDS if port is None else tree.listens(pid, port, contained)


def _see_orphans(tree: _Tree, titles: list[Process], servers: set[int]) -> list[Seen]:
    """The titles without a server above them, those of one server together: they share its session and process group."""
    titled = {process.pid for process in titles}
    groups: dict[tuple[int, int, int], list[Process]] = {}
    for process in titles:
        stat = procfs.read_stat(tree.root, process.pid)
        above = tree.above(process.pid)
        if stat is not None and not stat.exiting and not servers.intersection(above):
            parent = next((pid for pid in above if pid not in titled), 0)
            groups.setdefault((stat.session, stat.pgrp, parent), []).append(process)
    seen = []
    for (session, pgrp, parent), members in groups.items():
        names = {process.pid: engines.title_of(process.argv) or ("", "") for process in members}
        pid = next((pid for pid, (_, title) in names.items() if title == "EngineCore"), members[0].pid)
        starter = procfs.read_stat(tree.root, parent) if parent > 1 else None
        # Whoever adopts an orphan (init, a user manager, a supervisor) leads a session or a group of its own.
        gone = starter is None or starter.exiting or (starter.session, starter.pgrp) != (session, pgrp)
        note = "its server is gone" if gone else f"its share is in the code of pid {parent}"
        claim = Claim(pid, names[pid][0], (), "unknown", orphan=gone, note=note, **_unit(tree.root, pid))
        # What an engine in somebody's code holds while it loads is no measure of what it will hold.
        seen.append(Seen(claim, tuple(names), loading=not gone and tree.age_seconds(pid) <= LOADED_SECONDS))
    return seen


def _measure(tree: _Tree, seen: list[Seen], machine: Machine, gpu_processes: tuple[GpuProcess, ...] | None) -> list[Seen]:
    """Adds what NVML measured, and gives the ones that nobody measured an unknown hold on every pool they may use."""
    owners = {pid: entry for entry in seen for pid in entry.pids}
    used: dict[int, dict[str, int | None]] = {}
    others: dict[int, dict[str, int | None]] = {}
    for row in gpu_processes or ():
        owner = next((owners[pid] for pid in [row.pid, *tree.above(row.pid)] if pid in owners), None) or _ray_driver(
            tree, seen, row
        )
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
        if claim.source == "unknown" and rows and not (entry.loading and claim.grows):
            holds = tuple(_measured(pool, amount, totals.get(pool)) for pool, amount in rows.items())
            claim = claim.replace(source="unknown" if None in rows.values() else "measured")
        elif claim.source != "unknown" and gpu_processes is not None:
            holds = tuple(
                hold.replace(taken_bytes=min(hold.bytes, max(hold.taken_bytes, rows.get(hold.pool) or 0))) if hold.bytes else hold
                for hold in holds
            )
        result.append(entry.replace(claim=claim.replace(holds=holds)))
    for pid, rows in others.items():
        holds = tuple(
            _measured(pool, amount, totals.get(pool)) for pool, amount in rows.items() if amount is None or amount >= OTHER_BYTES
        )
        if holds:
            argv = procfs.argv_of(tree.root, pid)
            name = engines.command(argv)[0] or argv[0].rpartition("/")[2] if argv else ""
            source = "unknown" if None in rows.values() else "measured"
            claim = Claim(pid, "other", holds, source, grows=False, note=name, **_unit(tree.root, pid))
            result.append(Seen(claim, (pid,)))
    return result


def _ray_driver(tree: _Tree, seen: list[Seen], row: GpuProcess) -> Seen | None:
    """Ray's workers descend from Ray, not from the vLLM that they work for: they are put down to one on their GPU."""
    argv = procfs.argv_of(tree.root, row.pid)
    if not argv or not argv[0].startswith("ray::"):
        return None
    return next(
        (entry for entry in seen if entry.claim.engine == "vllm" and any(hold.pool == row.pool for hold in entry.claim.holds)),
        None,
    )


def _unit(proc_root: str, pid: int) -> dict[str, Any]:
    """The fields of a claim that say of which unit it is. Users' units, and the system's, may have one name."""
    path = procfs.cgroup(proc_root, pid)
    service = procfs.unit_of(path)
    user = procfs.manager_of(path)
    manager = "system" if user is None else "user" if user == os.getuid() else None
    return {"unit": service and procfs.unescape_unit(service), "service": service, "manager": manager}


def _measured(pool: str, amount: int | None, total: int | None) -> Hold:
    if amount is None:
        return Hold(pool, None, None)
    return Hold(pool, share_of(amount, total) if total else None, amount, amount)
