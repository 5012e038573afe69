"""Settings: environment, model spec, spark.conf and defaults, in that order, each value with where it came from.

The guard and the launcher read the files themselves: systemd lets EnvironmentFile= beat a drop-in's Environment=,
and then "retune by drop-in" would not work (docs/adr/0003-units.md). Nothing in a file is ever executed.
"""

from __future__ import annotations

import os

from sparkguard.core.record import Record
from sparkguard.core.share import WHOLE, format_share, parse_share
from sparkguard.errors import CONFIG, OSERR, SparkguardError
from sparkguard.probe.files import read_file
from sparkguard.probe.procfs import unescape_unit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

SITE, MODEL = "site", "model"
_MOST_FILE_BYTES = 1 << 20
_MOST_VALUE_CHARACTERS = (1 << 17) - 1  # MAX_ARG_STRLEN: a longer argument or variable is refused by the kernel


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
        Setting("VLLM_MEM_ALLOW_UNKNOWN", "0", "0 or 1", "1: admit beside holders whose size nobody knows; it is logged"),
        Setting(
            "SPARK_MEMORY_RESERVE_MB",
            "",
            "MB (2^20 bytes), 0 or more; empty: the larger of 1024 and 5 % of the pool",
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


class Value(Record):
    """A setting's text and where it came from: 'environment', 'default', or 'FILE, line N'."""

    text: str
    origin: str


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
    site = _read_file(os.path.join(config_dir, "spark.conf"), env)
    for key, value in (site or {}).items():
        if key not in SETTINGS:
            raise _unknown(key, value)
        values[key] = value
    spec = None
    if name is not None:
        spec = os.path.join(config_dir, "models", check_name(name) + ".env")
        model = _read_file(spec, {**{key: value.text for key, value in (site or {}).items()}, **env})
        if model is None and spec_must_exist:
            raise SparkguardError(f"there is no model spec {spec}", "write one: VLLM_MODEL=, VLLM_PORT=, VLLM_GPU_MEM_UTIL=")
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


def _read_file(path: str, names: Mapping[str, str]) -> dict[str, Value] | None:
    """Every key's last value; names is what $NAME may mean. None: there is no such file."""
    try:
        text = read_file(path, _MOST_FILE_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SparkguardError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not os.path.islink(path):
            return None
        raise SparkguardError(f"{path} cannot be read: {error.strerror}", status=OSERR) from None
    values: dict[str, Value] = {}
    names = dict(names)
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip()
        if not line or line[0] in "#;":
            continue
        place = f"{path}, line {number}"
        if "\0" in line:
            raise SparkguardError(f"{place} holds a NUL byte", "no argument and no variable can: write the line anew")
        key, equals, rest = line.removeprefix("export ").partition("=")
        key = key.strip()
        if not equals or not key.isidentifier() or not key.isascii():
            raise SparkguardError(f"{place}: {line!r} is not KEY=VALUE", "one setting a line; # starts a comment")
        names[key] = _read_value(rest, place, names)
        # Also against names that double each other: forty such lines would be a terabyte.
        if len(names[key]) > _MOST_VALUE_CHARACTERS:
            raise SparkguardError(f"{place}: the value has {len(names[key])} characters", "no program can be given that much")
        values[key] = Value(names[key], place)
    return values


def _read_value(rest: str, place: str, names: Mapping[str, str]) -> str:
    """The value as a shell and systemd both mean it.

    A quote counts only right after the '=', as in systemd's EnvironmentFile=; an unquoted value keeps its blanks and its
    inner quotes, so that VLLM_EXTRA_ARGS=--dtype bfloat16 needs no quoting. $NAME and ${NAME} are looked up, as a shell
    would; a comment starts at a blank and '#'.
    """
    rest = rest.strip()
    quote = rest[:1] if rest[:1] in ("'", '"') else ""
    if quote:
        end = 1
        while end < len(rest) and rest[end] != quote:
            end += 2 if rest[end] == "\\" and quote == '"' else 1
        if end >= len(rest):
            raise SparkguardError(f"{place}: the quote {quote} is not closed")
        after = rest[end + 1 :].strip()
        if after and not after.startswith("#"):
            raise SparkguardError(
                f"{place}: {after!r} follows the closing quote", "put one pair of quotes around the whole value"
            )
        if quote == "'":
            return rest[1:end]
        rest = rest[1:end]
    else:
        comment = next((at for at, char in enumerate(rest) if char == "#" and (not at or rest[at - 1].isspace())), len(rest))
        rest = rest[:comment].rstrip()
    return _look_up(rest, quote, place, names)


def _look_up(text: str, quote: str, place: str, names: Mapping[str, str]) -> str:
    out = []
    at = 0
    while at < len(text):
        char = text[at]
        # An unquoted value keeps its backslashes: split_words() comes to them, and JSON has its own.
        if char == "\\" and text[at + 1 : at + 2] in (('"', "\\", "$", "`") if quote else ("$", "`")):
            out.append(text[at + 1])
            at += 2
        elif char == "`" or text.startswith("$(", at):
            raise SparkguardError(
                f"{place}: command substitution is never executed", "write the value itself, or '...' to keep it as text"
            )
        elif char == "$":
            braced = text.startswith("${", at)
            start = at + 1 + braced
            end = start
            while end < len(text) and (text[end].isalnum() or text[end] == "_"):
                end += 1
            name = text[start:end]
            if not name or (braced and text[end : end + 1] != "}"):
                raise SparkguardError(
                    f"{place}: {text[at:]!r} is no variable", "$NAME and ${NAME} are looked up; '...' keeps a $"
                )
            if name not in names:
                raise SparkguardError(f"{place}: ${name} is not set")
            out.append(names[name])
            at = end + braced
        else:
            out.append(char)
            at += 1
    return "".join(out)


def split_words(text: str) -> list[str]:
    """Splits arguments as a shell does, except that a word that starts as JSON is kept whole, quotes and blanks too.

    A drop-in can hardly carry two levels of quotes, so {"method": "mtp"} must survive without any.
    Raises ValueError for a quote or a bracket that is not closed.
    """
    words: list[str] = []
    at = 0
    while True:
        while at < len(text) and text[at].isspace():
            at += 1
        if at >= len(text):
            return words
        word: list[str] = []
        while at < len(text) and not text[at].isspace():
            char = text[at]
            if char in "{[" and (not word or word[-1] == "="):
                end = _json_end(text, at)
                word.append(text[at:end])
            elif char == "\\":
                end = at + 2
                word.append(text[at + 1 : end])
            elif char == "'":
                end = text.find("'", at + 1) + 1
                if not end:
                    raise ValueError("a ' is not closed")
                word.append(text[at + 1 : end - 1])
            elif char == '"':
                end = at + 1
                while end < len(text) and text[end] != '"':
                    escaped = text[end] == "\\" and text[end + 1 : end + 2] in ('"', "\\", "$", "`")
                    word.append(text[end + escaped])
                    end += 1 + escaped
                if end >= len(text):
                    raise ValueError('a " is not closed')
                end += 1
            else:
                end = at + 1
                word.append(char)
            at = end
        words.append("".join(word))


def _json_end(text: str, at: int) -> int:
    depth = 0
    quoted = escaped = False
    for i in range(at, len(text)):
        char = text[i]
        if quoted:
            quoted = char != '"' or escaped
            escaped = char == "\\" and not escaped
        elif char == '"':
            quoted = True
        elif char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1
            if not depth:
                return i + 1
    raise ValueError(f"the {text[at]} of {text[at : at + 20]!r} is not closed")


def _nearest(key: str, cutoff: float) -> str | None:
    from difflib import get_close_matches  # only on the way to an error, or for a key that is the server's

    return next(iter(get_close_matches(key.upper(), SETTINGS, 1, cutoff)), None)


def _unknown(key: str, value: Value) -> SparkguardError:
    nearest = _nearest(key, 0.6)
    hint = f"did you mean {nearest}?" if nearest else "known keys: " + ", ".join(SETTINGS)
    return SparkguardError(f"{value.origin}: unknown key {key}", hint, CONFIG)
