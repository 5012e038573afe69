"""What each kind of engine is told: the arguments and variables of one rank's container. Pure.

How the container itself is made (devices, mounts, labels, memory) is recipes.py's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkguard.cluster.catalog import entries
from sparkguard.cluster.catalog.derived import entrypoint_path
from sparkguard.cluster.catalog.flags import flag_values
from sparkguard.core.record import Record

if TYPE_CHECKING:
    from sparkguard.cluster.catalog.entries import Catalog, Model
    from sparkguard.core.cluster import Node

_LEARNED = "NIM_PRIMARY_NODE"


class Part(Record):
    """What one kind of engine adds to a rank's container."""

    args: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    entrypoint: str | None = None
    mounts: tuple[tuple[str, str, bool], ...] = ()  # source, target, readonly
    host_ipc: bool = True
    learns: str = ""


def cache_path(catalog: Catalog, node: str, path: str) -> str:
    return path if path.startswith("/") else f"{catalog.cache(node)}/{path}"


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
        (cache_path(catalog, node, mount.source_on(node)), mount.container, mount.readonly)
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


PARTS = {
    entries.VLLM: _vllm,
    entries.DSV4: _dsv4,
    entries.NIM: _nim,
    entries.TENSORFOLD: _tensorfold,
    entries.SGLANG: _sglang,
    entries.LLAMACPP: _llamacpp,
}
