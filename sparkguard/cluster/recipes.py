"""A model of the catalog on nodes, as containers: the whole arguments of `docker create` for each rank. Pure.

Nothing here is a shell's text: docker gets a list, and so does the engine in the container.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING

from sparkguard.cluster import entries
from sparkguard.cluster.derived import entrypoint_path, tag
from sparkguard.cluster.flags import flag_values
from sparkguard.core.cluster import DISTRIBUTED, SINGLE, YUE, Allocation, Rank
from sparkguard.core.record import Record
from sparkguard.core.share import bytes_of, parse_share
from sparkguard.core.types import Hold

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkguard.cluster.entries import Catalog, Checkpoint, Model
    from sparkguard.core.cluster import Node

UNIFIED_POOL = "ram"  # a GB10's CPU and GPU share it
# vLLM's own default of --gpu-memory-utilization (vllm/config/cache.py), and SGLang's on one GPU with a large pool.
_DEFAULT_SHARE = {entries.VLLM: "0.92", entries.DSV4: "0.92", entries.SGLANG: "0.88", entries.NIM: "0.94"}
_ENGINES = {entries.DSV4: "vllm", entries.TENSORFOLD: "tensorfold"}
_METRICS = {entries.NIM: ("/v1/metrics", "/metrics"), entries.TENSORFOLD: ("/health", "/metrics")}
_LEARNED = "NIM_PRIMARY_NODE"


class Part(Record):
    """What one kind of engine adds to a rank's container."""

    args: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    entrypoint: str | None = None
    mounts: tuple[tuple[str, str, bool], ...] = ()  # source, target, readonly
    host_ipc: bool = True
    learns: str = ""


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
    part = _PARTS[model.wrapper](catalog, model, (node,), 0)
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
    part = _PARTS[model.wrapper](catalog, model, nodes, number)
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


def _cache_path(catalog: Catalog, node: str, path: str) -> str:
    return path if path.startswith("/") else f"{catalog.cache(node)}/{path}"


def _mounts(catalog: Catalog, model: Model, node: Node, part: Part) -> list[tuple[str, str, bool]]:
    # An engine with a cache of its own gets the weights read-only.
    own_cache = model.wrapper in (entries.NIM, entries.TENSORFOLD)
    mounts = [(catalog.cache(node.name), model.hf_mount, own_cache)] if model.default_mount else []
    mounts += [
        (_cache_path(catalog, node.name, mount.source_on(node.name)), mount.container, mount.readonly) for mount in model.mounts
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


def _added(args: tuple[str, ...], wanted: dict[str, str | None]) -> tuple[str, ...]:
    """The arguments with the flags that they lack."""
    given = flag_values(args)
    return (*args, *(word for flag, value in wanted.items() if value is not None and flag not in given for word in (flag, value)))


def _host_ip(model: Model, node: Node) -> str | None:
    return dict(model.host_ip).get(node.name) or node.fabric_addr


def _target(model: Model) -> str:
    return model.serve_path or model.hf_id


def _vllm_args(catalog: Catalog, model: Model, nodes: tuple[Node, ...], number: int) -> tuple[str, ...]:
    args = _added(
        model.args,
        {
            "--served-model-name": model.served,
            "--host": "0.0.0.0",
            "--port": str(catalog.port),
            "--tensor-parallel-size": str(model.tensor_parallel),
            "--max-model-len": None if model.context is None else str(model.context),
            "--gpu-memory-utilization": model.share or None,
        },
    )
    if len(nodes) > 1:
        args += ("--distributed-executor-backend", catalog.executor, "--nnodes", str(len(nodes)), "--node-rank", str(number))
        args += ("--master-addr", catalog.master_addr, "--master-port", str(catalog.master_port))
        args += ("--headless",) if number else ()
    return (_target(model), *args)


def _vllm_env(catalog: Catalog, model: Model, nodes: tuple[Node, ...], number: int) -> tuple[tuple[str, str], ...]:
    """The cluster's transport, then the model's own, then the address by which the other ranks reach this one.

    A model on one node gets no transport: pinned to a rail that is down, Gloo would not start, although nothing crosses it.
    """
    if len(nodes) == 1:
        return (*model.env, ("VLLM_HOST_IP", "127.0.0.1"))
    address = _host_ip(model, nodes[number])
    return (*catalog.nccl, *model.env, *((("VLLM_HOST_IP", address),) if address else ()))


def _vllm(catalog: Catalog, model: Model, nodes: tuple[Node, ...], number: int) -> Part:
    args, env = _vllm_args(catalog, model, nodes, number), _vllm_env(catalog, model, nodes, number)
    # A derived image says itself what it runs; vllm/vllm-openai has `vllm serve` as its entrypoint.
    return Part(args, env, entrypoint_path(model.name) if model.build and not model.image else None)


def _dsv4(catalog: Catalog, model: Model, nodes: tuple[Node, ...], number: int) -> Part:
    args, env = _vllm_args(catalog, model, nodes, number), _vllm_env(catalog, model, nodes, number)
    return Part(("serve", *args), env, "/usr/local/bin/dsv4-vllm-entrypoint")


def _nim(catalog: Catalog, model: Model, nodes: tuple[Node, ...], number: int) -> Part:
    """NVIDIA's protocol: rank 0 finds the transport by itself and prints where the others meet it."""
    settings = model.nim or entries.NimSettings()
    own = {
        "NIM_MODEL_PATH": model.serve_path,
        "NIM_CACHE_PATH": "/opt/nim/.cache",
        "NIM_SERVED_MODEL_NAME": model.served,
        "NIM_SERVER_PORT": str(settings.worker_port if number else catalog.port),
    }
    if model.context is not None:
        own["NIM_MAX_MODEL_LEN"] = str(model.context)
    if len(nodes) > 1:
        own["NIM_NODE_MANAGER_PORT"] = str(settings.manager_port)
    if number:
        own[_LEARNED] = ""
    node = nodes[number].name
    mounts = tuple(
        (_cache_path(catalog, node, mount.source_on(node)), mount.container, mount.readonly)
        for mount in (settings.runtime_cache, settings.ffmpeg)
        if mount
    )
    return Part((), (*model.env, *own.items()), None, mounts, False, _LEARNED if number else "")


def _tensorfold(catalog: Catalog, model: Model, nodes: tuple[Node, ...], number: int) -> Part:
    settings = model.tensorfold or entries.TensorFoldSettings()
    args = [_target(model), "--backend", "cuda", "--tp", str(model.tensor_parallel)]
    if len(nodes) > 1:
        args += ["--rank", str(number), "--master", catalog.master_addr, "--master-port", str(settings.master_port)]
        args += ["--drafter", settings.draft_path if settings.drafter == "dflash2" else "none"]
    numbers = {
        "--parallel": settings.parallel,
        "--context": model.context,
        "--kv-dtype": settings.kv_dtype or None,
        "--max-tokens": settings.max_tokens,
        "--mtp-drafts": settings.mtp_drafts,
        "--mtp-confidence": settings.mtp_confidence,
        "--temperature": settings.temperature,
        "--top-p": settings.top_p,
        "--top-k": settings.top_k,
    }
    args += [word for flag, value in numbers.items() if value is not None for word in (flag, str(value))]
    args += ["--thinking" if settings.thinking else "--no-thinking"]
    if number == 0:
        args += ["--name", model.served, "--host", "0.0.0.0", "--port", str(catalog.port)]
    args += ["--vision"] * settings.vision + ["--vision-urls"] * settings.vision_urls + ["--ple-on-ssd"] * settings.ple_on_ssd
    env: dict[str, str] = {}
    if len(nodes) > 1:
        # Of the cluster's transport only what names the fabric: the engine brings its own RoCE collectives.
        pinned = dict(catalog.nccl)
        env = {key: pinned[key].lstrip("=") for key in ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA") if key in pinned}
        env |= {key: pinned[key] for key in ("NCCL_IB_GID_INDEX", "NCCL_DEBUG") if key in pinned}
    serve = model.build.serve if model.build else ("/opt/nvidia/nvidia_entrypoint.sh", "tensorfold", "serve")
    if model.build and not model.image:
        return Part(tuple(args), (*env.items(), *model.env), entrypoint_path(model.name))
    return Part((*serve[1:], *args), (*env.items(), *model.env), serve[0])


def _sglang(catalog: Catalog, model: Model, nodes: tuple[Node, ...], number: int) -> Part:
    args = _added(
        model.args,
        {
            "--served-model-name": model.served,
            "--host": "0.0.0.0",
            "--port": str(catalog.port),
            "--tp-size": str(model.tensor_parallel) if "--tensor-parallel-size" not in flag_values(model.args) else None,
            "--context-length": None if model.context is None else str(model.context),
            "--mem-fraction-static": model.share or None,
        },
    )
    # Without it /metrics is no route at all.
    args += () if "--enable-metrics" in args else ("--enable-metrics",)
    if len(nodes) > 1:  # at one node an address would switch SGLang to its multi-node paths (SGLang PR 23158)
        args += ("--nnodes", str(len(nodes)), "--node-rank", str(number))
        args += ("--dist-init-addr", f"{catalog.master_addr}:{catalog.master_port}")
    env = (*catalog.nccl, *model.env) if len(nodes) > 1 else model.env
    serve = ("-m", "sglang.launch_server", "--model-path", _target(model))
    if model.build and not model.image:
        return Part(("--model-path", _target(model), *args), env, entrypoint_path(model.name))
    return Part((*serve, *args), env, "python3")


def _llamacpp(catalog: Catalog, model: Model, nodes: tuple[Node, ...], number: int) -> Part:
    file = model.serve_path or f"{model.hf_mount}/{model.file}"
    args = _added(
        model.args,
        {
            "--alias": model.served,
            "--host": "0.0.0.0",
            "--port": str(catalog.port),
            "--ctx-size": None if model.context is None else str(model.context),
        },
    )
    args += () if "--metrics" in args else ("--metrics",)
    return Part(("--model", file, *args), model.env, entrypoint_path(model.name) if model.build and not model.image else None)


_PARTS = {
    entries.VLLM: _vllm,
    entries.DSV4: _dsv4,
    entries.NIM: _nim,
    entries.TENSORFOLD: _tensorfold,
    entries.SGLANG: _sglang,
    entries.LLAMACPP: _llamacpp,
}
