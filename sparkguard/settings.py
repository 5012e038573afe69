"""Settings: environment, model spec, spark.conf and defaults, in that order, each value with where it came from.

The guard and the launcher read the files themselves: systemd lets EnvironmentFile= beat a drop-in's Environment=,
and then "retune by drop-in" would not work (docs/adr/0003-units.md). Nothing in a file is ever executed.
"""

from __future__ import annotations

import os

from sparkguard.conf_file import Value, read_conf, split_words
from sparkguard.core.record import Record
from sparkguard.core.share import WHOLE, format_share, parse_share
from sparkguard.errors import CONFIG, SparkguardError
from sparkguard.probe.procfs import unescape_unit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

SITE, MODEL = "site", "model"


class Setting(Record):
    """One key: what it means, its default as text, and the values it takes."""

    key: str
    default: str
    valid: str
    meaning: str
    scope: str = SITE  # SITE keys stand in spark.conf; MODEL keys in a spec; both may be set in the environment
    choices: tuple[str, ...] = ()  # where only some words are valid


SETTINGS = {
    setting.key: setting
    for setting in (
        Setting("MODELS_DIR", "~/models", "a folder", "where a relative VLLM_MODEL is looked for, and the runners' GGUF files"),
        Setting("VLLM_BIN", "vllm", "a program, by path or on PATH", "the vLLM to start; pin your venv's"),
        Setting("VLLM_MEM_BUDGET", "0.80", "a share above 0, at most 1", "ceiling on the sum of all shares of one memory pool"),
        Setting("VLLM_CPU_SHARE", "0.80", "a share above 0, at most 1", "share of the usable cores that a server is pinned to"),
        Setting("VLLM_MEM_WAIT", "60", "seconds, 0 or more", "how long a start waits for memory to come back; 0: no wait"),
        Setting(
            "VLLM_MEM_ASK_RUNNERS",
            "0",
            "0 or 1",
            "1: a start that lacks memory has the runners unload idle models, if that is enough for it",
        ),
        Setting("VLLM_MEM_ALLOW_UNKNOWN", "0", "0 or 1", "1: admit beside holders whose size nobody knows; it is logged"),
        Setting(
            "SPARK_MEMORY_RESERVE_MB",
            "",
            "MB (2^20 bytes), 0 or more; empty: for a runner 1024, for vLLM the larger of that and 5 % of the pool",
            "memory that stays available after a start",
        ),
        Setting(
            "SPARK_MEMORY_POOL",
            "auto",
            "auto, unified, discrete or ram",
            "what the shares are a share of",
            choices=("auto", "unified", "discrete", "ram"),
        ),
        Setting(
            "VLLM_ENV_PROFILE", "stable", "stable or fast", "environment defaults for the server", choices=("stable", "fast")
        ),
        Setting("VLLM_DOCKER_BIN", "docker", "docker or podman, by path or on PATH", "the program that runs VLLM_IMAGE"),
        Setting("SPARK_HOST", "127.0.0.1", "an address or a name of this machine", "where the runners' front listens"),
        Setting("SPARK_PORT", "8090", "1 to 65535", "the port of the runners' front"),
        Setting("SPARK_API_KEY_FILE", "", "a file; empty: no key is asked for", "keys of the runners' front, one a line"),
        Setting(
            "SPARK_LLAMA_SERVER",
            "",
            "a program, by path or on PATH; empty: llama-server on PATH, else the one that came along",
            "the llama.cpp server that runners become",
        ),
        Setting(
            "SPARK_DEVICE",
            "auto",
            "auto, cpu, cuda or cuda:N",
            "where a model runs unless its own setting says; auto: a CUDA device when there is one",
        ),
        Setting("SPARK_CUDA_DEVICES", "all", "all, or numbers as in 0,1", "the CUDA devices that runners may use"),
        Setting(
            "SPARK_CPU_RUNNERS",
            "auto",
            "auto, true or false",
            "whether models may run on the CPU; auto: only when there is no CUDA device",
        ),
        Setting("SPARK_THREADS", "0", "a number, 0 or more", "CPU threads of each runner; 0: all cores of the CPU share"),
        Setting(
            "SPARK_VRAM_RESERVE_MB",
            "",
            "MB (2^20 bytes), 0 or more; empty: the larger of 512 and a sixteenth of the GPU's memory",
            "memory of each GPU that runners leave free",
        ),
        Setting("SPARK_MAX_LOADED_MODELS", "0", "a number, 0 or more", "how many models are loaded at most; 0: memory decides"),
        Setting(
            "SPARK_IDLE_UNLOAD_MINUTES",
            "30",
            "minutes, 0 or more, fractions too",
            "an unused model is unloaded after so long; 0: never",
        ),
        Setting(
            "SPARK_QUEUE_LIMIT",
            "100",
            "a number, 1 or more",
            "how many requests may wait for one model; more are refused with 429",
        ),
        Setting(
            "SPARK_RUNNER_HANG_SECONDS",
            "120",
            "seconds, more than 0",
            "a runner without progress for so long is killed and started again",
        ),
        Setting(
            "SPARK_HOST_EXPERTS",
            "true",
            "true or false",
            "whether a mixture of experts that is larger than the GPU keeps experts in host memory",
        ),
        Setting(
            "SPARK_EXPERT_CACHE_PERCENT",
            "10",
            "percent, 0 to 100",
            "share of such experts that the GPU caches, where the engine has a cache for them",
        ),
        Setting(
            "SPARK_LOG_LEVEL",
            "info",
            "error, warning, info or debug",
            "what the runners and their front log",
            choices=("error", "warning", "info", "debug"),
        ),
        Setting("VLLM_MODEL", "", "a folder, a name under MODELS_DIR, or a hub id", "the model to serve", MODEL),
        Setting(
            "VLLM_PORT", "8000", "1 to 65535", "the HTTP port; not handed on, vLLM's own VLLM_PORT means something else", MODEL
        ),
        Setting(
            "VLLM_GPU_MEM_UTIL",
            "",
            "a share above 0, at most 1; where it is not set, vLLM's own default counts",
            "share of the pool to reserve",
            MODEL,
        ),
        Setting(
            "VLLM_EXTRA_ARGS", "", "words, quoted as in a shell; JSON may stand bare", "further arguments of vllm serve", MODEL
        ),
        Setting("VLLM_IMAGE", "", "a container image; empty: no container", "run the image's vllm instead of VLLM_BIN", MODEL),
        Setting(
            "VLLM_DOCKER_ARGS",
            "--gpus all --ipc host --network host",
            "words, quoted as in a shell",
            "arguments of docker run, before the image",
            MODEL,
        ),
    )
}


class Settings(Record):
    """Every setting's effective value, and what a spec hands on to the server's environment."""

    values: dict[str, Value]
    passed_on: dict[str, Value]
    config_dir: str
    spec: str | None  # path of the model's spec, whether it exists or not

    def text(self, key: str) -> str:
        return self.values[key].text

    def origin(self, key: str) -> str:
        return self.values[key].origin

    def is_set(self, key: str) -> bool:
        return self.values[key].origin != "default"

    def share(self, key: str) -> int:
        """A share above 0 and at most 1, in billionths."""
        return share_in_range(self.text(key), f"{key} in {self.origin(key)}")

    def seconds(self, key: str) -> float:
        try:
            seconds = float(self.text(key))
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < 1e9:
            raise self.error(key, "is no number of seconds")
        return seconds

    def flag(self, key: str) -> bool:
        if self.text(key) not in ("0", "1"):
            raise self.error(key, "is neither 0 nor 1")
        return self.text(key) == "1"

    def choice(self, key: str) -> str:
        if self.text(key) not in SETTINGS[key].choices:
            raise self.error(key, "is not known")
        return self.text(key)

    def reserve_bytes(self) -> int | None:
        text = self.text("SPARK_MEMORY_RESERVE_MB")
        if not text:
            return None
        if not (text.isascii() and text.isdigit() and len(text) < 12):
            raise self.error("SPARK_MEMORY_RESERVE_MB", "is no number of MB")
        return int(text) << 20

    def port(self) -> int:
        text = self.text("VLLM_PORT")
        if not (text.isascii() and text.isdigit() and len(text) < 6 and 0 < int(text) < 65536):
            raise self.error("VLLM_PORT", "is no port number")
        return int(text)

    def words(self, key: str) -> list[str]:
        try:
            return split_words(self.text(key))
        except ValueError as error:
            raise self.error(key, f"cannot be split into words: {error}") from None

    def error(self, key: str, complaint: str) -> SparkguardError:
        setting = SETTINGS[key]
        return SparkguardError(f"{key}={self.text(key)!r} in {self.origin(key)} {complaint}", f"it takes: {setting.valid}")


def share_in_range(text: str, place: str) -> int:
    """Reads a share that somebody asks for: above 0, at most 1; place is for the message."""
    try:
        share = parse_share(text)
    except ValueError:
        share = -1
    if 0 < share <= WHOLE:
        return share
    hint = "a share is a decimal number above 0 and at most 1, such as 0.40"
    bare = text.strip().rstrip("%").replace(",", ".")
    try:
        guess = parse_share(bare)
    except ValueError:
        guess = 0
    if text.strip().endswith("%") and 0 < guess <= 100 * WHOLE:
        hint = f"write {format_share(-(-guess // 100))} for {text.strip()}"
    elif "," in text and 0 < guess <= WHOLE:
        hint = f"write {format_share(guess)}, with a point"
    raise SparkguardError(f"{place} is {text!r}, which is no share", hint)


def home_folder(env: Mapping[str, str]) -> str:
    """HOME, else what the system has for this user. Raises SparkguardError: a folder below '.' would be anybody's."""
    home = env.get("HOME", "")
    if not os.path.isabs(home):
        import pwd

        try:
            home = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            home = ""
    if not os.path.isabs(home):
        raise SparkguardError(
            f"HOME is not set, and user {os.getuid()} has no home", "set HOME to a folder of yours, by its full path"
        )
    return home


def config_home(env: Mapping[str, str]) -> str:
    """XDG_CONFIG_HOME, which counts only as a full path, else ~/.config."""
    folder = env.get("XDG_CONFIG_HOME", "")
    return folder if os.path.isabs(folder) else os.path.join(home_folder(env), ".config")


def load(env: Mapping[str, str], name: str | None = None, spec_must_exist: bool = False) -> Settings:
    """The effective settings of a model (or of the site, without a name) under this environment."""
    home = home_folder(env)
    config_dir = os.path.join(config_home(env), "spark")
    values = {key: Value(setting.default, "default") for key, setting in SETTINGS.items()}
    passed_on: dict[str, Value] = {}
    site = read_conf(os.path.join(config_dir, "spark.conf"), env)
    for key, value in (site or {}).items():
        if key not in SETTINGS:
            raise _unknown(key, value)
        values[key] = value
    spec = None
    if name is not None:
        spec = os.path.join(config_dir, "models", check_name(name) + ".env")
        model = read_conf(spec, {**{key: value.text for key, value in (site or {}).items()}, **env})
        if model is None and spec_must_exist:
            sample = os.path.join(config_dir, "models", "example.env.sample")
            how = f"cp {sample} {spec}, and edit it" if os.path.exists(sample) else "VLLM_MODEL=, VLLM_PORT=, VLLM_GPU_MEM_UTIL="
            raise SparkguardError(f"there is no model spec {spec}", f"write one: {how}")
        for key, value in (model or {}).items():
            if key in SETTINGS:
                values[key] = value
            elif key.upper().startswith(("VLLM_", "SPARK_", "MODEL")) and _nearest(key, 0.85):
                raise _unknown(key, value)
            else:
                passed_on[key] = value
    for key in SETTINGS:
        if key in env:
            values[key] = Value(env[key], "the environment")
    for key in ("MODELS_DIR", "VLLM_BIN", "VLLM_MODEL", "VLLM_DOCKER_BIN", "SPARK_LLAMA_SERVER", "SPARK_API_KEY_FILE"):
        if values[key].text.startswith("~/"):
            values[key] = values[key].replace(text=home + values[key].text[1:])
    return Settings(values, passed_on, config_dir, spec)


def check_name(name: str) -> str:
    """A model's name: systemd's \\xNN escapes undone, and nothing in it that could leave the folder of specs."""
    plain = unescape_unit(name)
    if (
        plain in ("", ".")
        or plain.startswith("-")
        or any(c in "/%\\" or c.isspace() or not c.isprintable() for c in plain)
        or ".." in plain
    ):
        raise SparkguardError(
            f"{plain!r} cannot be a model's name", "letters, digits, '.', '_' and '-'; no '/', '..', '%' or blanks"
        )
    return plain


def _nearest(key: str, cutoff: float) -> str | None:
    from difflib import get_close_matches  # only on the way to an error, or for a key that is the server's

    return next(iter(get_close_matches(key.upper(), SETTINGS, 1, cutoff)), None)


def _unknown(key: str, value: Value) -> SparkguardError:
    nearest = _nearest(key, 0.6)
    hint = f"did you mean {nearest}?" if nearest else "known keys: " + ", ".join(SETTINGS)
    return SparkguardError(f"{value.origin}: unknown key {key}", hint, CONFIG)
