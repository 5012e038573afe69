"""A model of the catalog on nodes, as containers: the whole arguments of `docker create` for each rank. Pure.

Nothing here is a shell's text: docker gets a list, and so does the engine in the container.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING

from sparkguard.cluster.catalog import entries
from sparkguard.cluster.catalog.derived import tag
from sparkguard.cluster.catalog.engines import PARTS, cache_path
from sparkguard.cluster.catalog.flags import flag_values
from sparkguard.core.cluster import DISTRIBUTED, SINGLE, YUE, Allocation, Rank
from sparkguard.core.share import bytes_of, parse_share
from sparkguard.core.types import Hold

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkguard.cluster.catalog.engines import Part
    from sparkguard.cluster.catalog.entries import Catalog, Checkpoint, Model
    from sparkguard.core.cluster import Node

UNIFIED_POOL = "ram"  # a GB10's CPU and GPU share it
# vLLM's own default of --gpu-memory-utilization (vllm/config/cache.py), and SGLang's on one GPU with a large pool.
_DEFAULT_SHARE = {entries.VLLM: "0.92", entries.DSV4: "0.92", entries.SGLANG: "0.88", entries.NIM: "0.94"}
_ENGINES = {entries.DSV4: "vllm", entries.TENSORFOLD: "tensorfold"}
_METRICS = {entries.NIM: ("/v1/metrics", "/metrics"), entries.TENSORFOLD: ("/health", "/metrics")}


def allocation(catalog: Catalog, model: Model, nodes: Sequence[Node]) -> Allocation:
    """What `up` wants: the first node is rank 0, and clients talk to it."""
    names = tuple(node.name for node in nodes)
    if model.wrapper == entries.SONGS:
        return Allocation(
            "yue", model.label, YUE, names, (), _digest([entries.SONGS, *names]), ready_seconds=catalog.yue.ready_seconds
        )
    ranks = tuple(_rank(catalog, model, tuple(nodes), number) for number in range(len(nodes)))
    provider = model.provider or None
    if provider and nodes[0].name != catalog.head.name:
        provider = f"{provider}-{nodes[0].name}"  # so that both Sparks' endpoints stay configured side by side
    return Allocation(
        model=model.name,
        label=model.label,
        mode=DISTRIBUTED if len(nodes) > 1 else SINGLE,
        nodes=names,
        ranks=ranks,
        digest=_digest([rank.digest for rank in ranks]),
        served=model.served,
        url=nodes[0].lan_url,
        health_path=model.ready_path or None,
        metrics_paths=_METRICS.get(model.wrapper, ("/metrics",)),
        engine=_ENGINES.get(model.wrapper, model.wrapper),
        ready_seconds=model.ready_seconds,
        drain_seconds=model.drain_seconds,
        drop_caches=model.drop_caches,
        context=model.client_context or model.context,
        vision=model.vision,
        client=provider,
        fabric=_fabric(_transport(catalog, model)) if len(nodes) > 1 else "",
    )


def learned(rank: Rank, log: str) -> str | None:
    """The value that rank 0 printed for a rank that starts after it; None: not printed yet.

    Raises ValueError when it printed two, or what is no address: nobody can tell then where the ranks meet.
    """
    plain = re.sub(r"\x1b\[[0-?]*[ -/]*[@-~]", "", log)
    found = {value.strip("\"'") for value in re.findall(rf"(?<![A-Za-z0-9_]){re.escape(rank.learns)}\s*=\s*(\S+)", plain)}
    if len(found) > 1 or any(not re.fullmatch(r"[0-9A-Fa-f:.]{3,45}", value) for value in found):
        raise ValueError(f"rank 0 printed {', '.join(sorted(found))} for {rank.learns}")
    return next(iter(found), None)


def told(rank: Rank, value: str) -> Rank:
    """The rank with what it had to learn from rank 0. Its digest stays: the value is found out, not wanted."""
    create = tuple(f"{rank.learns}={value}" if word == f"{rank.learns}=" else word for word in rank.create)
    return rank.replace(create=create, learns="")


def sized(hold: Hold, total_bytes: int) -> Hold:
    """The hold with the bytes of its share, once the pool's size is known."""
    return hold if hold.share is None else hold.replace(bytes=bytes_of(hold.share, total_bytes))


def image_of(model: Model) -> str:
    """What `docker create` is told: the catalog's image, or the name under which pull keeps the one it derives."""
    return model.image or (tag(model.name, model.build) if model.build else "")


def mounted(catalog: Catalog, model: Model, node: Node) -> tuple[str, ...]:
    """The folders of a node that its container gets; docker makes none of them."""
    part = PARTS[model.wrapper](catalog, model, (node,), 0)
    return tuple(dict.fromkeys(source for source, _, _ in _mounts(catalog, model, node, part)))


def marker(checkpoint: Checkpoint) -> str:
    """Below the cache: the file that pull writes when each file of a pinned checkpoint had the publisher's hash."""
    parts = [checkpoint.source, checkpoint.repo, checkpoint.revision, checkpoint.folder, *checkpoint.include, "|"]
    return f"spark-serve/verified/{_digest([*parts, *checkpoint.exclude, '|', *checkpoint.index_suffixes])[:32]}"


def hub_folder(checkpoint: Checkpoint) -> str:
    """Below the cache: where the Hub's library looks for a repository."""
    return "hub/models--" + checkpoint.repo.replace("/", "--")


def _rank(catalog: Catalog, model: Model, nodes: tuple[Node, ...], number: int) -> Rank:
    node = nodes[number]
    part = PARTS[model.wrapper](catalog, model, nodes, number)
    mounts = _mounts(catalog, model, node, part)
    environment = dict(part.env)
    name, image = model.container, image_of(model)
    words = ["--pull", "never", "--name", name, "--restart", "no", "--network", "host", "--gpus", "all"]
    distributed = len(nodes) > 1
    if model.privileged:
        words += ["--privileged"]
    elif distributed:
        # What RDMA needs and no more: the devices, and memory that may be pinned.
        words += ["--device", "/dev/infiniband", "--cap-add", "IPC_LOCK"]
    # One limit of a kind: docker takes the last, and says nothing.
    if distributed and "memlock" not in " ".join(model.docker_extra):
        words += ["--ulimit", "memlock=-1:-1"]
    if model.shm_size:
        words += ["--shm-size", model.shm_size]
    elif part.host_ipc:
        words += ["--ipc", "host"]
    if "--stop-timeout" not in " ".join(model.docker_extra):
        words += ["--stop-timeout", str(model.drain_seconds + 30)]
    for source, target, readonly in mounts:
        words += ["--mount", f"type=bind,source={source},target={target}{',readonly' if readonly else ''}"]
    for key, value in environment.items():
        words += ["--env", f"{key}={value}"]
    for key in model.secrets:
        words += ["--env", key]
    words += model.docker_extra
    if part.entrypoint:
        words += ["--entrypoint", part.entrypoint]
    command = [image, *part.args]
    digest = _digest([*words, *command])
    labels = {"sparkguard.model": model.name, "sparkguard.rank": str(number), "sparkguard.digest": digest}
    create = [*words, *(word for key, value in labels.items() for word in ("--label", f"{key}={value}")), *command]
    return Rank(
        node=node.name,
        rank=number,
        name=name,
        image=image,
        create=tuple(create),
        digest=digest,
        port=catalog.port if number == 0 else None,
        holds=(_hold(model),),
        paths=_paths(catalog, model, node, mounts),
        interfaces=_interfaces(_transport(catalog, model)) if distributed else (),
        hcas=_hcas(_transport(catalog, model)) if distributed else (),
        preflight=_preflight(model, image, mounts),
        preflight_seconds=model.preflight_seconds,
        secrets=model.secrets,
        learns=part.learns,
        learn_seconds=model.nim.handshake_seconds if model.nim else 300,
    )


def _digest(words: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(words), ensure_ascii=True).encode()).hexdigest()


def _mounts(catalog: Catalog, model: Model, node: Node, part: Part) -> list[tuple[str, str, bool]]:
    # An engine with a cache of its own gets the weights read-only.
    own_cache = model.wrapper in (entries.NIM, entries.TENSORFOLD)
    mounts = [(catalog.cache(node.name), model.hf_mount, own_cache)] if model.default_mount else []
    mounts += [
        (cache_path(catalog, node.name, mount.source_on(node.name)), mount.container, mount.readonly) for mount in model.mounts
    ]
    return mounts + list(part.mounts)


def _paths(catalog: Catalog, model: Model, node: Node, mounts: list[tuple[str, str, bool]]) -> tuple[str, ...]:
    """What must be there before anything is drained: docker refuses a mount whose source is missing, and then it is too late."""
    cache = catalog.cache(node.name)
    paths = [source for source, _, _ in mounts]
    if model.serve_path.startswith(model.hf_mount + "/") and model.default_mount:
        paths.append(cache + model.serve_path[len(model.hf_mount) :])
    if model.file:
        paths.append(f"{cache}/{model.file}")
    for checkpoint in model.checkpoints:
        paths.append(f"{cache}/{marker(checkpoint) if checkpoint.pinned else hub_folder(checkpoint)}")
    return tuple(dict.fromkeys(paths))


def _preflight(model: Model, image: str, mounts: list[tuple[str, str, bool]]) -> tuple[str, ...]:
    """`docker run` of the recipe's own check: no GPU, no network, and it can write nothing."""
    if not model.preflight:
        return ()
    words = ["--rm", "--pull", "never", "--network", "none", "--read-only"]
    for source, target, _ in mounts:
        words += ["--mount", f"type=bind,source={source},target={target},readonly"]
    return (*words, "--entrypoint", model.preflight[0], image, *model.preflight[1:])


def _transport(catalog: Catalog, model: Model) -> dict[str, str]:
    return {} if model.wrapper == entries.NIM else {**dict(catalog.nccl), **dict(model.env)}


def _fabric(env: dict[str, str]) -> str:
    """What the ranks can only talk over. NCCL_NET is an order: NCCL ends where that network is not there."""
    if _over_sockets(env):
        return "socket"
    return "ib" if env.get("NCCL_NET", "").lower() == "ib" else ""


def _over_sockets(env: dict[str, str]) -> bool:
    return env.get("NCCL_NET", "").lower() == "socket" or env.get("NCCL_IB_DISABLE") == "1"


def _interfaces(env: dict[str, str]) -> tuple[str, ...]:
    """The interfaces that the transport is pinned to by name: `=a,b` and `a,b`, not `^a` which only leaves out."""
    names = []
    for key in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        value = env.get(key, "")
        if not value.startswith("^"):
            names += [name.partition(":")[0] for name in value.lstrip("=").split(",") if name]
    return tuple(dict.fromkeys(names))


def _hcas(env: dict[str, str]) -> tuple[str, ...]:
    """The RoCE devices; none where sockets are wanted, so that the fallback of docs/cluster/recovery.md starts without them."""
    if _over_sockets(env):
        return ()
    names = []
    for key in ("NCCL_IB_HCA", "UCX_NET_DEVICES"):
        value = env.get(key, "")
        if not value.startswith("^") and value != "all":
            names += [name.partition(":")[0] for name in value.lstrip("=").split(",") if name]
    return tuple(dict.fromkeys(names))


def _hold(model: Model) -> Hold:
    """A share of the unified pool, in bytes once the node's memory is known (sized()); nothing known: None, never 0."""
    if model.memory_gib is not None:
        return Hold(UNIFIED_POOL, None, int(model.memory_gib * (1 << 30)))
    given = flag_values(model.args)
    env = dict(model.env)
    flag = {entries.SGLANG: "--mem-fraction-static"}.get(model.wrapper, "--gpu-memory-utilization")
    text = given.get(flag) or env.get("NIM_KV_CACHE_PERCENT", "") or model.share or _DEFAULT_SHARE.get(model.wrapper, "")
    return Hold(UNIFIED_POOL, parse_share(text), None) if text else Hold(UNIFIED_POOL, None, None)
