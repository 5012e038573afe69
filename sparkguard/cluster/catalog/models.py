"""[models.NAME]: one entry of the catalog, checked against itself and against the cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkguard.cluster.catalog import entries, fields
from sparkguard.cluster.catalog.entries import Build, Checkpoint, Input, Model, Mount, NimSettings, TensorFoldSettings
from sparkguard.cluster.catalog.flags import CLUSTERS_OWN, flag_values
from sparkguard.cluster.catalog.tables import nearest

if TYPE_CHECKING:
    from sparkguard.cluster.catalog.tables import Table
    from sparkguard.core.cluster import Node

# What `docker create` is told by recipes.py; said twice, the second would win or docker would refuse.
_DOCKERS_OWN = {
    "--name": "container = ...", "--label": None, "-l": None, "--restart": None, "--rm": None, "-d": None, "--detach": None,
    "--pull": None, "--network": None, "--net": None, "--privileged": "privileged = true", "--gpus": None, "--entrypoint": None,
    "--env": "[models.NAME.env]", "-e": "[models.NAME.env]", "--env-file": "secrets = [...]", "--cidfile": None,
    "--label-file": None, "--shm-size": "shm_size = ...",
}  # fmt: skip
_RESERVED_NAMES = ("yue", "head", "worker", "both", "all")
_NIM_OWN = (
    "NIM_PRIMARY_NODE", "NIM_NODE_MANAGER_PORT", "NIM_SERVER_PORT", "NIM_MODEL_PATH", "NIM_CACHE_PATH", "NIM_MAX_MODEL_LEN",
    "NIM_SERVED_MODEL_NAME", "MASTER_ADDR", "MASTER_PORT", "NIM_TENSOR_PARALLEL_SIZE", "NIM_PIPELINE_PARALLEL_SIZE",
)  # fmt: skip
_NIM_TRANSPORT = ("NCCL_", "UCX_", "GLOO_", "TP_", "NVSHMEM_", "OMPI_MCA_")


def read_model(name: str, table: Table, nodes: tuple[Node, ...], container: str, tensor_parallel: int | None, port: int) -> Model:
    if what := fields.name(name):
        table.fault("", what)
    if name.lower() in _RESERVED_NAMES:
        table.fault("", f"{name} is a word of spark-serve itself; choose another name")
    wrapper = table.text("wrapper", entries.VLLM)
    if wrapper not in entries.WRAPPERS:
        known = ", ".join(entries.WRAPPERS)
        table.fault("wrapper", f"{wrapper!r} is none of {known}{nearest(wrapper, entries.WRAPPERS)}")
    needed = table.number("nnodes", 1, 1, 16)
    if needed > 1 and wrapper == entries.LLAMACPP:
        table.fault("nnodes", "llamacpp runs on one node")
    build = _build(table)
    image = table.text("image", "", fields.image)
    if not image and build is None:
        table.fault("image", "is missing, and there is no build table either")
    if build is not None and build.dockerfile is not None and not image.startswith("sha256:"):
        table.fault("image", "a build by a publisher's dockerfile is checked against the image's id: image = \"sha256:...\"")
    if wrapper == entries.NIM and image and fields.digest_image(image):
        table.fault("image", "a NIM is pinned: NAME@sha256:..., or an image's id")
    model = Model(
        name=name,
        label=table.text("label", name),
        wrapper=wrapper,
        image=image,
        container=table.text("container", container, fields.container),
        served=table.text("served_name", name),
        nodes_needed=needed,
        aliases=table.texts("aliases", check=fields.name),
        hf_id=table.text("hf_id", "", fields.repo),
        revision=table.text("revision", ""),
        serve_path=table.text("serve_path", "", fields.folder),
        tensor_parallel=table.number("tensor_parallel", tensor_parallel or needed if needed > 1 else 1, 1, 64),
        args=_arguments(table),
        env=table.environment("env"),
        secrets=table.texts("secrets", check=lambda word: None if word.isidentifier() else f"{word!r} is no variable's name"),
        mounts=_mounts(table, nodes),
        hf_mount=table.text("hf_mount", "/root/.cache/huggingface", fields.folder),
        default_mount=not table.flag("skip_default_cache_mount"),
        docker_extra=_docker_extra(table),
        shm_size=table.text("shm_size", "", fields.size),
        privileged=table.flag("privileged"),
        build=build,
        nim=_nim(table, nodes) if wrapper == entries.NIM else None,
        tensorfold=_tensorfold(table) if wrapper == entries.TENSORFOLD else None,
        file=table.table("llamacpp").text("file", "", fields.inside),
        ready_path=table.text(
            "ready_path", "", lambda path: None if path.startswith("/") else f"{path!r} begins without a slash"
        ),
        ready_seconds=table.number("ready_timeout", 1500, 10, 86400),
        drain_seconds=table.number("drain_timeout", 120, 0, 86400),
        preflight=table.texts("preflight_args"),
        preflight_seconds=table.number("preflight_timeout", 120, 1, 86400),
        drop_caches=table.flag("drop_caches"),
        context=table.optional_number("max_model_len", 1, 1 << 31),
        share=_share(table),
        memory_gib=table.real("memory_gib", 0, 1 << 20),
        host_ip=_host_ips(table, nodes),
        provider=table.text("hermes_provider", "", fields.name),
        client_context=table.optional_number("hermes_context_length", 1, 1 << 31),
        vision=table.flag("hermes_supports_vision"),
        copy_over_fabric=table.flag("copy_over_fabric", True),
        notes=table.text("notes", ""),
        recipe=table.text("recipe", "", fields.name),
    )
    model = model.replace(checkpoints=_checkpoints(table, model))
    _check(table, model, port, table.optional_number("max_num_seqs", 1, 1 << 20))
    for key in ("vllm", "sglang", "llamacpp", "nim", "tensorfold"):
        if table.has(key) and key != (entries.VLLM if wrapper == entries.DSV4 else wrapper):
            table.fault(key, f"is for wrapper = {key!r}, and this model's is {wrapper!r}")
    table.end()
    return model


def _arguments(table: Table) -> tuple[str, ...]:
    found: tuple[str, ...] = ()
    for key in (entries.VLLM, entries.SGLANG, entries.LLAMACPP):
        inner = table.table(key)
        found += inner.texts("args")
        inner.known.append("file")
        if key != entries.LLAMACPP and inner.has("file"):
            inner.fault("file", "is llamacpp's")
        inner.end()
    return found


def _share(table: Table) -> str:
    value = table.real("gpu_memory_utilization", 0, 1)
    return "" if value is None else str(table.values["gpu_memory_utilization"])


def _check(table: Table, model: Model, port: int, sequences: int | None) -> None:
    """The keys against the arguments and the variables: what is said twice is said alike."""
    for key, value in model.env:
        if what := fields.credential(key, value):
            table.table("env").fault(key, what)
        if model.wrapper == entries.NIM and (key in _NIM_OWN or key.startswith(_NIM_TRANSPORT)):
            table.table("env").fault(key, "is what spark-serve or the NIM itself finds out")
    for first, second in zip(("", *model.args), model.args):
        flag, _, value = second.partition("=")
        what = fields.credential(flag, value) if value else fields.credential(first, second)
        if what:
            table.table(_arguments_of(model.wrapper)).fault("args", f"{flag if value else first or 'one'} {what}")
    twice: dict[str, tuple[str, object]] = {
        "--served-model-name": ("served_name", model.served if table.has("served_name") else None),
        "--alias": ("served_name", model.served if table.has("served_name") else None),
        "--port": ("[cluster] port", str(port)),
        "--max-model-len": ("max_model_len", model.context),
        "--context-length": ("max_model_len", model.context),
        "--max-num-seqs": ("max_num_seqs", sequences),
        "--gpu-memory-utilization": ("gpu_memory_utilization", model.share or None),
        "--mem-fraction-static": ("gpu_memory_utilization", model.share or None),
        "--tensor-parallel-size": ("tensor_parallel", model.tensor_parallel if table.has("tensor_parallel") else None),
    }
    given = flag_values(model.args)
    where = table.table(_arguments_of(model.wrapper))
    for flag, (key, wanted) in twice.items():
        if wanted is not None and flag in given and not _same(given[flag], str(wanted)):
            where.fault("args", f"{flag} is {given[flag]}, and {key} is {wanted}")
    for flag in CLUSTERS_OWN:
        if flag in given:
            where.fault("args", f"{flag} is set by spark-serve, for each rank")
    if model.tensorfold and sequences is not None and sequences != model.tensorfold.parallel:
        table.fault("max_num_seqs", f"is {sequences}, and the tensorfold table's parallel is {model.tensorfold.parallel}")
    if model.wrapper == entries.NIM and not model.serve_path:
        table.fault("serve_path", "is missing: a NIM is started on a prepared checkpoint")
    if model.wrapper == entries.TENSORFOLD and not model.serve_path:
        table.fault("serve_path", "is missing")
    if model.wrapper == entries.LLAMACPP and not (model.file or model.serve_path):
        table.fault("llamacpp file", "is missing: the GGUF below the cache")
    if model.wrapper in (entries.VLLM, entries.DSV4, entries.SGLANG) and not (model.serve_path or model.hf_id):
        table.fault("hf_id", "is missing: OWNER/NAME on the Hub, or serve_path for a folder in the container")
    if model.wrapper in (entries.NIM, entries.TENSORFOLD) and model.docker_extra:
        table.fault("docker_extra", f"is not taken with wrapper = {model.wrapper!r}, whose containers are the publisher's")


def _arguments_of(wrapper: str) -> str:
    return entries.VLLM if wrapper == entries.DSV4 else wrapper


def _same(first: str, second: str) -> bool:
    try:
        return first == second or float(first) == float(second)
    except ValueError:
        return False


def _docker_extra(table: Table) -> tuple[str, ...]:
    words = table.texts("docker_extra")
    for word in words:
        flag = word.partition("=")[0]
        if flag in _DOCKERS_OWN:
            instead = _DOCKERS_OWN[flag]
            table.fault("docker_extra", f"{flag} is " + (f"said by {instead}" if instead else "set by spark-serve"))
        if "docker.sock" in word:
            table.fault("docker_extra", "hands the docker daemon to the container")
    if words and not words[0].startswith("-"):
        table.fault("docker_extra", f"begins with {words[0]!r}, which docker would take for the image")
    return words


def _mounts(table: Table, nodes: tuple[Node, ...]) -> tuple[Mount, ...]:
    found = []
    for each in table.tables("mounts"):
        container = each.text("container", "", fields.folder)
        if not each.has("container"):
            each.fault("container", "is missing")
        source = each.text("source", "", fields.anywhere)
        on = _by_node(each, nodes, "{}", fields.anywhere)
        if not source and len(on) < len(nodes):
            each.fault("source", "is missing: a folder below the cache, or an absolute path")
        found.append(Mount(container, source, on, each.flag("readonly")))
        each.end()
    return tuple(found)


def _by_node(table: Table, nodes: tuple[Node, ...], pattern: str, check: object) -> tuple[tuple[str, str], ...]:
    """Values for single nodes: by the roles head and worker, and by name."""
    found = {}
    roles = {"head": nodes[0].name if nodes else "head", "worker": nodes[1].name if len(nodes) > 1 else "worker"}
    for word, node in {**roles, **{node.name: node.name for node in nodes}}.items():
        value = table.text(pattern.format(word), "", check)  # type: ignore[arg-type]
        if value:
            found[node] = value
    return tuple(found.items())


def _host_ips(table: Table, nodes: tuple[Node, ...]) -> tuple[tuple[str, str], ...]:
    return _by_node(table, nodes, "host_ip_{}", fields.address)


def _input(table: Table, to_image: bool) -> Input:
    for key in ("url", "sha256"):
        if not table.has(key):
            table.fault(key, "is missing")
    found = Input(
        table.text("url", "", fields.source_url),
        table.text("sha256", "", fields.sha256),
        table.text("path", "", fields.folder if to_image else fields.inside),
    )
    table.end()
    return found


def _build(table: Table) -> Build | None:
    inner = table.table("build")
    if not table.has("build"):
        return None
    if not inner.has("base"):
        inner.fault("base", "is missing")
    dockerfile = _input(inner.table("dockerfile"), False) if inner.has("dockerfile") else None
    inner.known.append("dockerfile")
    build = Build(
        inner.text("base", "", fields.digest_image),
        tuple(_input(each, dockerfile is None) for each in inner.tables("files")),
        inner.commands("before"),
        inner.texts("serve"),
        dockerfile,
    )
    if dockerfile is not None and (build.before or build.serve):
        inner.fault("dockerfile", "is the publisher's whole recipe: before and serve do not go with it")
    if dockerfile is None and not build.serve:
        inner.fault("serve", 'is missing: what the container runs, such as ["vllm", "serve"]')
    inner.end()
    return build


def _checkpoints(table: Table, model: Model) -> tuple[Checkpoint, ...]:
    found = []
    for number, each in enumerate(table.tables("checkpoints"), 1):
        source = each.text("source", "hf")
        if source not in ("hf", "ngc"):
            each.fault("source", f"{source!r} is neither hf nor ngc")
        for key in ("repo", "revision", "folder"):
            if not each.has(key):
                each.fault(key, "is missing")
        gib = each.real("gib", 0, 1 << 20)
        checkpoint = Checkpoint(
            each.text("name", f"checkpoint{number}", fields.name),
            source,
            each.text("repo", "", fields.repo),
            each.text("revision", "", fields.name),
            each.text("folder", "", fields.inside),
            each.texts("include"),
            each.texts("exclude"),
            each.texts("index_suffixes"),
            each.environment("index_metadata"),
            None if gib is None else int(gib * (1 << 30)),
        )
        if each.has("revision") and not checkpoint.pinned:
            each.fault("revision", f"{checkpoint.revision!r} is no commit of 40 hexadecimal digits: a branch moves")
        found.append(checkpoint)
        each.end()
    if not found and model.hf_id and not model.serve_path:
        found.append(Checkpoint("model", "hf", model.hf_id, model.revision or "main", ""))
    return tuple(found)


def _nim(table: Table, nodes: tuple[Node, ...]) -> NimSettings:
    inner = table.table("nim")
    inner.text("model_source", "ngc", lambda word: None if word in ("hf", "ngc") else f"{word!r} is neither hf nor ngc")
    inner.text("model_revision", "", fields.name)
    runtime = inner.text("runtime_cache", "", fields.anywhere)
    runtime_on = _by_node(inner, nodes, "runtime_cache_{}", fields.anywhere)
    ffmpeg = inner.text("ffmpeg_path", "", fields.anywhere)
    ffmpeg_on = _by_node(inner, nodes, "ffmpeg_path_{}", fields.anywhere)
    settings = NimSettings(
        inner.number("manager_port", 20000, 1, 65535),
        inner.number("worker_port", 8002, 1, 65535),
        Mount("/opt/nim/.cache", runtime, runtime_on) if runtime or runtime_on else None,
        Mount("/opt/ffmpeg8", ffmpeg, ffmpeg_on, True) if ffmpeg or ffmpeg_on else None,
        inner.number("handshake_timeout", 300, 1, 3600),
    )
    inner.end()
    return settings


def _tensorfold(table: Table) -> TensorFoldSettings:
    inner = table.table("tensorfold")
    drafter = inner.text("drafter", "mtp")
    if drafter not in ("dflash2", "mtp"):
        inner.fault("drafter", f"{drafter!r} is neither dflash2 nor mtp")
    settings = TensorFoldSettings(
        drafter,
        inner.text("draft_path", "", fields.folder),
        inner.number("parallel", 1, 1, 8),
        inner.number("master_port", 29551, 1, 65535),
        inner.optional_number("max_tokens", 1, 1 << 31),
        inner.flag("thinking", True),
        inner.flag("vision"),
        inner.flag("vision_urls"),
        inner.real("temperature", -1e-9, 2),
        inner.real("top_p", 0, 1),
        inner.optional_number("top_k", 0, 1 << 20),
        inner.optional_number("mtp_drafts", 0, 8),
        inner.real("mtp_confidence", -1e-9, 1),
        inner.flag("ple_on_ssd"),
        inner.text("kv_dtype", "", lambda word: None if word in ("fp8", "int8", "bf16") else f"{word!r} is no fp8, int8 or bf16"),
    )
    if drafter == "dflash2" and not settings.draft_path:
        inner.fault("draft_path", 'is missing: drafter = "dflash2" needs its checkpoint')
    if settings.vision_urls and not settings.vision:
        inner.fault("vision_urls", "needs vision = true")
    inner.end()
    return settings
