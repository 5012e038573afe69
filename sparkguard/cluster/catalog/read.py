"""The catalog, models.toml: found, read and checked whole before anything is touched.

Everything in it reaches the nodes as arguments of a program, never as text of a shell; what could be read as an option
where a name is meant, or could start a program by itself, is refused here (fields.py).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkguard.cluster.catalog import fields
from sparkguard.cluster.catalog.entries import Catalog, ClientSettings, Model, Yue
from sparkguard.cluster.catalog.models import read_model
from sparkguard.cluster.catalog.placeholders import placeholders
from sparkguard.cluster.catalog.tables import Faults, Table
from sparkguard.core.cluster import Node
from sparkguard.core.share import parse_share
from sparkguard.errors import CONFIG, SparkguardError

if TYPE_CHECKING:
    from collections.abc import Mapping

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Catalog", "Model", "Yue", "find", "load", "parse"]
_TOP = ("cluster", "yue", "models", "clients")
_EXAMPLE = "cp models.example.toml models.toml, then edit [cluster]; docs/cluster.md tells each key"


def find(explicit: str | None, env: Mapping[str, str], cwd: Path) -> Path:
    """--config, SPARK_SERVE_CONFIG, ./models.toml, ~/.config/spark/models.toml: the first that is named or is there.

    One that is named is taken although it is not there, so that the error names it.
    """
    if named := explicit or env.get("SPARK_SERVE_CONFIG"):
        return Path(named).expanduser()
    config = Path(env["XDG_CONFIG_HOME"]) if env.get("XDG_CONFIG_HOME") else Path(env.get("HOME", "~")).expanduser() / ".config"
    usual = (cwd / "models.toml", config / "spark" / "models.toml")
    for path in usual:
        if path.is_file():
            return path
    raise SparkguardError(f"no catalog: neither {usual[0]} nor {usual[1]} is there", _EXAMPLE, CONFIG)


def load(path: Path, *, example: bool = False) -> Catalog:
    """example: placeholders may stand in it, for verbs that touch no node. Raises SparkguardError with every fault."""
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise SparkguardError(f"{path} cannot be read: {error.strerror}", _EXAMPLE, CONFIG) from None
    except UnicodeDecodeError as error:
        raise SparkguardError(f"{path} is no UTF-8 at byte {error.start}", None, CONFIG) from None
    return parse(text, str(path), example=example)


def parse(text: str, path: str, *, example: bool = False) -> Catalog:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SparkguardError(f"{path} is no TOML: {error}", None, CONFIG) from None
    except RecursionError:
        raise SparkguardError(f"{path} is nested too deeply", None, CONFIG) from None
    faults = Faults()
    catalog = _catalog(document, path, faults)
    if not example:
        for where, what in placeholders(document):
            faults.add(where, what)
    if faults.lines:
        count = "1 fault" if len(faults.lines) == 1 else f"{len(faults.lines)} faults"
        lines = "\n".join(f"  {line}" for line in faults.lines)
        raise SparkguardError(f"{path} has {count}; no node was asked anything\n{lines}", None, CONFIG)
    return catalog


def _catalog(document: dict[str, Any], path: str, faults: Faults) -> Catalog:
    top = Table(document, "", faults)
    cluster = top.table("cluster")
    if "cluster" not in document:
        top.fault("[cluster]", "is missing")
    port = cluster.number("port", 8000, 1, 65535)
    nodes, caches = _nodes(cluster, port)
    yue = _yue(top.table("yue"), nodes) if "yue" in document else Yue()
    nodes = _song_urls(top.table("yue"), nodes, yue.port)
    container = cluster.text("container", "vllm_cluster", fields.container)
    tensor_parallel = cluster.optional_number("tensor_parallel", 1, 64)
    cluster.number("nnodes", len(nodes), 1, 16)
    models = tuple(
        read_model(name, Table(values, f"[models.{name}]", faults), nodes, container, tensor_parallel, port)
        for name, values in _named(top.table("models"))
    )
    _unique(models, faults)
    ssh_opts = cluster.texts("ssh_opts")
    for fault in fields.ssh_options(ssh_opts):
        cluster.fault("ssh_opts", fault)
    head_fabric = nodes[0].fabric_addr if nodes else None
    share = cluster.real("memory_budget", 0, 1)
    executors = ("mp", "ray", "uni")
    catalog = Catalog(
        path=path,
        nodes=nodes,
        models=models,
        caches=caches,
        master_addr=cluster.text("master_addr", head_fabric or "", fields.address),
        master_port=cluster.number("master_port", 29501, 1, 65535),
        port=port,
        executor=cluster.text("executor", "mp", lambda word: None if word in executors else f"{word!r} is no mp, ray or uni"),
        nccl=cluster.environment("nccl"),
        ssh_opts=ssh_opts,
        keep_containers=cluster.texts("keep_containers", check=fields.container),
        stop_names=cluster.texts("stop_names", check=fields.container),
        yue=yue,
        clients=_clients(top.table("clients"), faults),
        budget_share=parse_share("0.95" if share is None else str(cluster.values["memory_budget"])),
        reserve_bytes=cluster.number("memory_reserve_mib", 2048, 0, 1 << 20) << 20,
        disk_reserve_bytes=cluster.number("disk_reserve_gib", 20, 0, 1 << 20) << 30,
    )
    for key, value in catalog.nccl:
        if what := fields.credential(key, value):
            cluster.table("nccl").fault(key, what)
    if len(nodes) > 1 and any(model.nodes_needed > 1 for model in models) and not catalog.master_addr:
        cluster.fault("master_addr", "is missing: the head's address on the fabric, where the ranks meet")
    cluster.end()
    top.known += list(_TOP)
    top.end()
    return catalog


def _nodes(cluster: Table, port: int) -> tuple[tuple[Node, ...], tuple[tuple[str, str], ...]]:
    listed = cluster.tables("nodes")
    default_cache = cluster.text("hf_cache_host", "", fields.folder)
    nodes: list[Node] = []
    caches: dict[str, str] = {}
    if listed:
        for key in ("head", "worker", "lan_url", "worker_lan_url", "worker_addr", "worker_hf_cache_host"):
            if cluster.has(key):
                cluster.known.append(key)
                cluster.fault(key, "does not go with [[cluster.nodes]], whose first one is the head")
        for each in listed:
            for key in ("name", "ssh", "lan_url"):
                if not each.has(key):
                    each.fault(key, "is missing")
            node = Node(
                each.text("name", "", fields.name),
                each.text("ssh", "", fields.host),
                each.text("lan_url", "", fields.origin).rstrip("/"),
                each.text("fabric_addr", "", fields.address) or None,
                each.text("yue_url", "", fields.origin).rstrip("/") or None,
            )
            caches[node.name] = each.text("hf_cache_host", default_cache, fields.folder)
            if node.name in ("both", "all") or (nodes and node.name == "head"):
                each.fault("name", f"{node.name!r} means something else to --node")
            nodes.append(node)
            each.end()
    else:
        for key in ("head", "lan_url"):
            if not cluster.has(key):
                cluster.fault(key, "is missing")
        head = Node(
            "head",
            cluster.text("head", "", fields.host),
            cluster.text("lan_url", "", fields.origin).rstrip("/"),
            cluster.text("master_addr", "", fields.address) or None,
        )
        nodes.append(head)
        caches["head"] = default_cache
        worker = cluster.text("worker", "", fields.host)
        worker_url = cluster.text("worker_lan_url", f"http://{_bare(worker)}:{port}" if worker else "", fields.origin)
        worker_addr = cluster.text("worker_addr", "", fields.address)
        caches["worker"] = cluster.text("worker_hf_cache_host", default_cache, fields.folder)
        if worker:
            nodes.append(Node("worker", worker, worker_url.rstrip("/"), worker_addr or None))
        elif cluster.has("worker_lan_url") or worker_addr:
            cluster.fault("worker", "is missing, and its address is there")
    if not all(caches[node.name] for node in nodes):
        cluster.fault("hf_cache_host", "is missing: the folder of the Hugging Face cache on the nodes")
    _distinct(cluster, nodes, port)
    return tuple(nodes), tuple((node.name, caches[node.name]) for node in nodes)


def _bare(host: str) -> str:
    """The machine's name in user@host."""
    return host.removeprefix("ssh://").rpartition("@")[2].partition(":")[0]


def _distinct(cluster: Table, nodes: list[Node], port: int) -> None:
    """Two names for one machine would start two ranks on it, and stop one for the other."""
    for what, values in (
        ("name", [node.name for node in nodes]),
        ("ssh host", [node.ssh for node in nodes]),
        ("lan_url", [node.lan_url for node in nodes]),
        ("fabric address", [node.fabric_addr for node in nodes if node.fabric_addr]),
    ):
        for value in {value for value in values if value and values.count(value) > 1}:
            cluster.fault("nodes", f"two have the {what} {value}")
    for node in nodes:
        if node.lan_url and fields.url_port(node.lan_url) != port:
            cluster.fault("lan_url", f"{node.lan_url} is not at port {port}, where models serve (port = {port})")


def _yue(table: Table, nodes: tuple[Node, ...]) -> Yue:
    yue = Yue(
        table.text("service", Yue.service, fields.unit),
        table.text("factory_root", Yue.factory_root, fields.home_folder),
        table.number("port", Yue.port, 1, 65535),
        table.number("ready_timeout", Yue.ready_seconds, 1, 86400),
    )
    table.known += ["head_url", "worker_url"]
    if table.has("worker_url") and len(nodes) < 2:
        table.fault("worker_url", "there is no worker")
    table.end()
    return yue


def _song_urls(table: Table, nodes: tuple[Node, ...], port: int) -> tuple[Node, ...]:
    """The head's default is its lan_url's host, the worker's its ssh name: both with YuE's port."""
    given = [table.text("head_url", "", fields.origin), table.text("worker_url", "", fields.origin)]
    found = []
    for position, node in enumerate(nodes):
        url = node.yue_url or (given[position] if position < 2 else "")
        host = _bare(node.ssh) if position == 1 else node.lan_url.rpartition(":")[0].rpartition("//")[2] or _bare(node.ssh)
        found.append(node.replace(yue_url=(url or f"http://{host}:{port}").rstrip("/")))
    return tuple(found)


def _clients(table: Table, faults: Faults) -> tuple[ClientSettings, ...]:
    found = []
    for name, values in _named(table):
        each = Table(values, f"[clients.{name}]", faults)
        kind = each.text("kind", "hermes")
        if kind not in ("hermes", "env"):
            each.fault("kind", f"{kind!r} is neither hermes nor env")
        found.append(
            ClientSettings(name, kind, each.text("path", "~/.hermes/config.yaml" if kind == "hermes" else "", fields.home_folder))
        )
        if kind == "env" and not each.has("path"):
            each.fault("path", "is missing")
        each.end()
    return tuple(found)


def _named(table: Table) -> list[tuple[str, dict[str, Any]]]:
    """The tables of a table of tables."""
    for name, value in table.values.items():
        if not isinstance(value, dict):
            table.fault(name, f"is no table: {table.where[:-1]}.{name}]")
    return [(name, value) for name, value in table.values.items() if isinstance(value, dict)]


def _unique(models: tuple[Model, ...], faults: Faults) -> None:
    seen: dict[str, str] = {}
    for model in models:
        for word in (model.name, *model.aliases):
            other = seen.setdefault(word.lower(), model.name)
            if other != model.name or (word.lower() == "yue"):
                faults.add(f"[models.{model.name}] aliases", f"{word!r} already means {other if other != model.name else 'YuE'}")
