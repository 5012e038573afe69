"""The one command line that the guard judges and the launcher executes, made of settings and arguments.

Arguments beat the environment, the environment beats the spec, the spec beats spark.conf. Two different values for one
thing at the level of settings (VLLM_GPU_MEM_UTIL, and a flag inside VLLM_EXTRA_ARGS) are an error, because one of the two
people who wrote them would be wrong about what runs.
"""

from __future__ import annotations

import os

from sparkguard.core.record import Record
from sparkguard.core.share import WHOLE, parse_share
from sparkguard.core.types import Machine, Wanted
from sparkguard.errors import CONFIG, NOT_FOUND, USAGE, SparkguardError
from sparkguard.probe import containers, devices, files, vllm_argv, vllm_version
from sparkguard.settings import Settings, share_in_range

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Setting -> the option of vLLM that means the same.
_SAME = {"VLLM_GPU_MEM_UTIL": "gpu-memory-utilization", "VLLM_PORT": "port", "VLLM_MODEL": "model"}


class Command(Record):
    """serve_args follow `vllm serve`; model is a path, a hub id, or None when a --config file names it."""

    name: str
    serve_args: tuple[str, ...]
    model: str | None
    local_model: str | None  # the model's folder, when it is one
    image: str | None
    docker_args: tuple[str, ...]
    declared: vllm_argv.Declared

    @property
    def opens_host_port(self) -> bool:
        """Whether its port is one of the machine's, on every address: not a bridged container's, not one address's."""
        if any(word.partition("=")[0] == "--host" for word in self.serve_args):
            return False
        words = " ".join(self.docker_args).replace("=", " ")
        return self.image is None or "--network host" in words or "--net host" in words


def build(settings: Settings, name: str, args: Sequence[str], model_required: bool = True) -> Command:
    """Composes the command line. Raises SparkguardError (78; 2 for --help) when it could never start a server."""
    extra = settings.words("VLLM_EXTRA_ARGS")
    in_extra = vllm_argv.flags_set(extra)
    in_args = vllm_argv.flags_set(args)
    for key, option in _SAME.items():
        if (
            settings.is_set(key)
            and settings.text(key)
            and option in in_extra
            and not _equal(option, settings.text(key), in_extra[option])
        ):
            raise SparkguardError(
                f"{key}={settings.text(key)} in {settings.origin(key)} and --{option} {in_extra[option]} "
                f"in VLLM_EXTRA_ARGS of {settings.origin('VLLM_EXTRA_ARGS')} are two values for one thing",
                "keep one of the two",
            )
    given = bool(args) and not args[0].startswith("-")
    has_config = "--config" in (*extra, *args)
    has_model = given or "model" in in_args or "model" in in_extra or has_config
    words: list[str] = []
    model = local = None
    if given:
        words.append(args[0])
        args = args[1:]
    elif settings.text("VLLM_MODEL") and "model" not in in_args and "model" not in in_extra:
        model, local = _model(settings)
        words.append(model)
    elif not has_model and model_required:
        where = settings.spec or os.path.join(settings.config_dir, "models", name + ".env")
        hint = f"add a line to {where}: VLLM_MODEL=a folder, or a hub id"
        if not os.path.exists(where):
            hint = f"there is no {where}: write it, or see which names there are: sparkguard plan"
        raise SparkguardError(f"no model is set for {name}", hint)
    settings.port()
    # Our default must not beat the port that a --config file may name.
    if "port" not in in_extra and "port" not in in_args and (settings.is_set("VLLM_PORT") or not has_config):
        words += ["--port", settings.text("VLLM_PORT")]
    share = settings.text("VLLM_GPU_MEM_UTIL").strip()
    if settings.is_set("VLLM_GPU_MEM_UTIL"):
        settings.share("VLLM_GPU_MEM_UTIL")
        if "gpu-memory-utilization" not in in_args and "gpu-memory-utilization" not in in_extra:
            words += ["--gpu-memory-utilization", share]
    words += [*extra, *args]
    command = Command(
        name=name,
        serve_args=tuple(words),
        model=model or (words[0] if given else None),
        local_model=local,
        image=settings.text("VLLM_IMAGE") or None,
        docker_args=tuple(settings.words("VLLM_DOCKER_ARGS")) if settings.text("VLLM_IMAGE") else (),
        declared=_declare(words, in_extra, in_args, settings),
    )
    if command.image and (client := client_of(command)) and client.detached:
        raise settings.error("VLLM_DOCKER_ARGS", "lets the client end before its container does: leave -d out")
    return command


def _declare(
    words: Sequence[str], in_extra: Mapping[str, str], in_args: Mapping[str, str], settings: Settings
) -> vllm_argv.Declared:
    option = "gpu-memory-utilization"
    place = "the arguments" if option in in_args else f"VLLM_EXTRA_ARGS of {settings.origin('VLLM_EXTRA_ARGS')}"
    if option in in_args or option in in_extra:
        share_in_range(in_args.get(option, in_extra.get(option, "")), f"--{option} in {place}")
    declared = vllm_argv.read(words, _read_file)
    if declared is None:
        raise SparkguardError("--help starts no server", "run vLLM itself: vllm serve --help", USAGE)
    if declared.unreadable:
        raise SparkguardError(
            f"the arguments cannot be judged: {declared.unreadable}", "mend them, or leave the option out", CONFIG
        )
    if declared.share is not None and not 0 < declared.share <= WHOLE:
        raise SparkguardError("gpu-memory-utilization in the --config file is no share above 0 and at most 1")
    return declared


def _read_file(path: str) -> str | None:
    try:
        return files.read_file(path, 1 << 20).decode("utf-8", "replace")
    except OSError:
        return None


def _model(settings: Settings) -> tuple[str, str | None]:
    """(what vLLM is given, the folder when it is one)."""
    text = settings.text("VLLM_MODEL")
    if text.startswith(("/", "./", "../")):
        path = text
    else:
        path = os.path.join(settings.text("MODELS_DIR"), text)
        if not os.path.exists(path):
            _refuse_misspelt(text, settings)
            return text, None  # a hub id, "org/name" or bare
    if not os.path.exists(path):
        raise settings.error("VLLM_MODEL", "does not exist")
    return path, path


def _refuse_misspelt(name: str, settings: Settings) -> None:
    """Taken for a hub id, a folder's name with a slip would be looked for on the net, minutes after the start had succeeded."""
    if "/" in name:
        return
    from difflib import get_close_matches  # only for the few ids that have no owner

    folder = settings.text("MODELS_DIR")
    try:
        there = [entry.name for entry in os.scandir(folder) if entry.is_dir()]
    except OSError:
        return
    if near := get_close_matches(name, there, 1, 0.8):
        error = settings.error("VLLM_MODEL", f"is no folder in {folder}; did you mean {near[0]}?")
        hint = f"a hub id has its owner's name before it; to serve one that has none: VLLM_EXTRA_ARGS=--model {name}"
        raise SparkguardError(error.message, hint)


def _equal(option: str, one: str, other: str) -> bool:
    if option == "gpu-memory-utilization":
        try:
            return parse_share(one) == parse_share(other)
        except ValueError:
            return False
    return one.strip() == other.strip()


def wanted(command: Command, settings: Settings, machine: Machine, env: Mapping[str, str]) -> Wanted:
    """What the start asks of the machine's pools, under the environment that the server will see."""
    declared = command.declared
    default = vllm_version.DEFAULT
    if command.image is None:
        program = find_program(settings.text("VLLM_BIN"), env)
        default = vllm_version.default_share(vllm_version.version_beside(program) if program else None)
        inside: dict[str, str] | None = {key: value for key, value in env.items() if key != "NVIDIA_VISIBLE_DEVICES"}
    else:
        client = client_of(command)
        given = containers.environment_of(client, env, _read_file) if client else {}
        inside = None if given is None else {**container_environment(settings, env), **given}
        if client and client.devices and inside is not None:
            inside["NVIDIA_VISIBLE_DEVICES"] = client.devices
    pools, note = devices.pools_of(machine, inside, declared.device_ids, declared.gpus)
    holds = tuple(devices.hold(declared, pool, default, (inside or {}).get("VLLM_CPU_KVCACHE_SPACE")) for pool in pools)
    flag = "--gpu-memory-utilization"
    if declared.total_bytes is not None:
        flag = "--gpu-memory-utilization-gb, a share of"
    elif declared.share is None and declared.kv_bytes is not None and holds[0].share != default:
        flag = "--kv-cache-memory-bytes, a share of"
    return Wanted(command.name, holds, declared.source, declared.port, note, flag)


def asked(command: Command) -> str:
    """What was judged of the command, in one line: another start of the same unit may bring other arguments."""
    return repr((command.image, command.docker_args, command.declared.replace(model=None)))


def container_environment(settings: Settings, env: Mapping[str, str]) -> dict[str, str]:
    """What a container sees: the keys that the spec hands on, with the environment's value where it has one; nothing else."""
    return {key: env.get(key, value.text) for key, value in settings.passed_on.items()}


def client_of(command: Command) -> containers.Container | None:
    """What VLLM_DOCKER_ARGS say about the container: its name, its devices."""
    return containers.read_client(["docker", "run", *command.docker_args, command.image or ""])


def program_of(command: Command, settings: Settings, env: Mapping[str, str]) -> str:
    """What the launcher executes: vLLM, or the container's client. Raises SparkguardError (127) when it is not there."""
    key = "VLLM_BIN" if command.image is None else "VLLM_DOCKER_BIN"
    program = find_program(settings.text(key), env)
    if program is None:
        raise SparkguardError(
            f"{settings.text(key)} was not found ({key} in {settings.origin(key)})",
            f"set {key} in {os.path.join(settings.config_dir, 'spark.conf')}",
            NOT_FOUND,
        )
    return program


def find_program(text: str, env: Mapping[str, str]) -> str | None:
    """An executable by path, or on PATH."""
    candidates = (
        [text] if "/" in text else [os.path.join(folder or ".", text) for folder in env.get("PATH", os.defpath).split(os.pathsep)]
    )
    return next((path for path in candidates if os.access(path, os.X_OK) and os.path.isfile(path)), None)
