"""Settings: who wins, what is refused, and that nothing in a file is ever executed."""

from __future__ import annotations

import ctypes
import os
import pwd
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkguard.conf_file import split_words
from sparkguard.errors import CONFIG, OSERR, SparkguardError
from sparkguard.settings import SETTINGS, Settings, check_name, home_folder, load


@pytest.fixture
def folder(home: Path) -> Path:
    folder = home / ".config" / "spark"
    (folder / "models").mkdir(parents=True)
    return folder


def write(folder: Path, conf: str | bytes | None = None, spec: str | bytes | None = None) -> None:
    for path, text in ((folder / "spark.conf", conf), (folder / "models" / "m.env", spec)):
        if text is not None:
            path.write_bytes(text.encode() if isinstance(text, str) else text)


def read(folder: Path, **env: str) -> Settings:
    return load({"HOME": str(folder.parents[1]), **env}, "m")


def complaint(folder: Path, **env: str) -> SparkguardError:
    """The error of loading, or of the first share that is read."""
    with pytest.raises(SparkguardError) as caught:
        read(folder, **env).share("VLLM_GPU_MEM_UTIL")
    return caught.value


PRECEDENCE = {
    "nothing": (None, None, {}, "0.80", "default"),
    "spark.conf": ("VLLM_MEM_BUDGET=0.5", None, {}, "0.5", "{conf}, line 1"),
    "spec over spark.conf": ("VLLM_MEM_BUDGET=0.5", "\nVLLM_MEM_BUDGET=0.6", {}, "0.6", "{spec}, line 2"),
    "environment over spec": ("VLLM_MEM_BUDGET=0.5", "VLLM_MEM_BUDGET=0.6", {"VLLM_MEM_BUDGET": "0.7"}, "0.7", "the environment"),
    "environment over spark.conf": ("VLLM_MEM_BUDGET=0.5", None, {"VLLM_MEM_BUDGET": "0.7"}, "0.7", "the environment"),
    "the last line of a file": ("VLLM_MEM_BUDGET=0.5\nVLLM_MEM_BUDGET=0.4", None, {}, "0.4", "{conf}, line 2"),
}


@pytest.mark.parametrize(("conf", "spec", "env", "text", "origin"), PRECEDENCE.values(), ids=PRECEDENCE)
def test_precedence(folder: Path, conf: str, spec: str, env: dict[str, str], text: str, origin: str) -> None:
    """Environment beats spec beats spark.conf beats default, and each value knows where it came from."""
    write(folder, conf, spec)
    settings = read(folder, **env)
    places = {"conf": folder / "spark.conf", "spec": folder / "models" / "m.env"}
    assert settings.text("VLLM_MEM_BUDGET") == text
    assert settings.origin("VLLM_MEM_BUDGET") == origin.format(**places)
    assert settings.is_set("VLLM_MEM_BUDGET") == (origin != "default")


VALUES = {
    "plain": ("X=a", "a"),
    "blanks around": ("  X = a  ", "a"),
    "export": ("export X=a", "a"),
    "unquoted words, as systemd reads them": (
        "X=--dtype bfloat16 --max-model-len 65536",
        "--dtype bfloat16 --max-model-len 65536",
    ),
    "double quotes": ('X="a b"', "a b"),
    "single quotes": ("X='a $HOME `b`'", "a $HOME `b`"),
    "inner quotes stay": ("X=--a 'b c' --d \"e\"", "--a 'b c' --d \"e\""),
    "inner double quotes": (r'X="{\"a\": 1}"', '{"a": 1}'),
    "a name": ("X=$HOME/models", "{home}/models"),
    "a name in braces": ('X="${HOME}x"', "{home}x"),
    "a line above": ("Y=1\nX=$Y$Y", "11"),
    "an escaped $": (r'X="\$HOME \\ \`"', r"$HOME \ `"),
    "an escaped $ without quotes": (r"X=\$HOME", "$HOME"),
    "backslashes without quotes stay": (r"X=a\ b\n", r"a\ b\n"),
    "comment behind a value": ("X=a # b", "a"),
    "comment behind a tab": ("X=a\t# b", "a"),
    "comment behind quotes": ('X="a # b" # c', "a # b"),
    "no comment without a blank": ("X=a#b", "a#b"),
    "only a comment": ("X= # b", ""),
    "empty": ("X=", ""),
    "equals": ("X=a=b", "a=b"),
    "comments and empty lines": ("# X=b\n; X=c\n\n   \nX=a", "a"),
    "a separator that no editor shows as a line's end": ("X=a\x0bb\u2028c\x85d", "a\x0bb\u2028c\x85d"),
    "CRLF": ("X=a\r\nY=b\r\n", "a"),
    "CRLF in quotes": ('X="a"\r\n', "a"),
    "BOM": ("\ufeffX=a", "a"),
    "UTF-8": ("X=modèle", "modèle"),
}


@pytest.mark.parametrize(("text", "value"), VALUES.values(), ids=VALUES)
def test_value(folder: Path, text: str, value: str) -> None:
    """A line means what a shell and systemd's EnvironmentFile= mean by it."""
    write(folder, spec=text)
    assert read(folder).passed_on["X"].text == value.replace("{home}", str(folder.parents[1]))


BROKEN = {
    "no =": ("VLLM_PORT", "is not KEY=VALUE"),
    "no key": ("=1", "is not KEY=VALUE"),
    "a key with a dash": ("A-B=1", "is not KEY=VALUE"),
    "a key that is not ASCII": ("VLLM_PÖRT=1", "is not KEY=VALUE"),
    "an open quote": ('VLLM_PORT="1', 'the quote " is not closed'),
    "an open single quote": ("VLLM_PORT='1", "the quote ' is not closed"),
    "a closing quote that is escaped": ('VLLM_PORT="1\\"', 'the quote " is not closed'),
    "words behind a quote": ('VLLM_EXTRA_ARGS="--a" --b', "'--b' follows the closing quote"),
    "a name that is not set": ("VLLM_MODEL=$NOBODY/x", "$NOBODY is not set"),
    "no name": ("VLLM_MODEL=a$", "'$' is no variable"),
    "an open brace": ("VLLM_MODEL=${HOME", "'${HOME' is no variable"),
    "a default in braces": ("VLLM_MODEL=${HOME:-x}", "'${HOME:-x}' is no variable"),
}


@pytest.mark.parametrize(("line", "words"), BROKEN.values(), ids=BROKEN)
def test_broken_line(folder: Path, line: str, words: str) -> None:
    """A line that cannot be read is an error with its file and number, never a guess."""
    write(folder, spec=f"# one\n{line}\n")
    error = complaint(folder)
    assert words in error.message
    assert error.message.startswith(f"{folder / 'models' / 'm.env'}, line 2: ")
    assert error.status == CONFIG


SUBSTITUTIONS = ["$(touch {proof})", "`touch {proof}`", '"$(touch {proof})"', '"a`touch {proof}`"', "a$(touch {proof})b"]


@pytest.mark.parametrize("where", ["conf", "spec"])
@pytest.mark.parametrize("text", SUBSTITUTIONS)
def test_command_substitution_is_never_executed(folder: Path, tmp_path: Path, text: str, where: str) -> None:
    """It is an error that says so, and the command has left no trace."""
    proof = tmp_path / "proof"
    write(folder, **{where: "VLLM_MODEL=" + text.format(proof=proof)})
    assert "command substitution is never executed" in complaint(folder).message
    assert not proof.exists()


def test_command_substitution_in_single_quotes_is_text(folder: Path, tmp_path: Path) -> None:
    """'...' keeps it as it stands, and from the environment it is text as well."""
    proof = tmp_path / "proof"
    write(folder, spec=f"VLLM_MODEL='$(touch {proof})'")
    assert read(folder).text("VLLM_MODEL") == f"$(touch {proof})"
    assert read(folder, VLLM_MODEL=f"`touch {proof}`").text("VLLM_MODEL") == f"`touch {proof}`"
    assert not proof.exists()


def test_a_spec_may_use_what_spark_conf_has_set(folder: Path) -> None:
    """$MODELS_DIR in a spec is spark.conf's, or the environment's where it has one; spark.conf does not see the spec."""
    write(folder, "MODELS_DIR=/models", "VLLM_MODEL=$MODELS_DIR/x")
    assert read(folder).text("VLLM_MODEL") == "/models/x"
    assert read(folder, MODELS_DIR="/other").text("VLLM_MODEL") == "/other/x"


def test_tilde(folder: Path) -> None:
    """~/ is the home in the keys that are paths."""
    write(folder, "VLLM_BIN=~/venv/bin/vllm")
    home = folder.parents[1]
    assert read(folder).text("VLLM_BIN") == f"{home}/venv/bin/vllm"
    assert read(folder).text("MODELS_DIR") == f"{home}/models"
    assert read(folder, VLLM_MODEL="~/m").text("VLLM_MODEL") == f"{home}/m"


NO_SHARE = {
    "percent": ("40%", "write 0.40 for 40%"),
    "comma": ("0,4", "write 0.40, with a point"),
    "nan": ("nan", "a share is a decimal number above 0 and at most 1"),
    "inf": ("inf", "a share is a decimal number"),
    "negative": ("-1", "a share is a decimal number"),
    "above one": ("1.5", "a share is a decimal number"),
    "a trace above one": ("1.0000000001", "a share is a decimal number"),
    "zero": ("0", "a share is a decimal number"),
    "empty": ("", "a share is a decimal number"),
    "a word": ("half", "a share is a decimal number"),
    "too many percent": ("140%", "a share is a decimal number"),
}


@pytest.mark.parametrize("where", ["conf", "spec", "environment"])
@pytest.mark.parametrize(("text", "hint"), NO_SHARE.values(), ids=NO_SHARE)
def test_malformed_share(folder: Path, where: str, text: str, hint: str) -> None:
    """What is no share is 78 wherever it stands; the message names the place and the text, the hint what to write."""
    env = {"VLLM_GPU_MEM_UTIL": text} if where == "environment" else {}
    if not env:
        write(folder, **{where: f"VLLM_GPU_MEM_UTIL={text}"})
    error = complaint(folder, **env)
    place = {"conf": folder / "spark.conf", "spec": folder / "models" / "m.env", "environment": "the environment"}[where]
    assert error.message.startswith(f"VLLM_GPU_MEM_UTIL in {place}")
    assert repr(text) in error.message
    assert hint in (error.hint or "")
    assert error.status == CONFIG


def test_blanks_around_a_share(folder: Path) -> None:
    """' 0.4 ' is a share, as it is for vLLM."""
    assert read(folder, VLLM_GPU_MEM_UTIL=" 0.4 ").share("VLLM_GPU_MEM_UTIL") == 400_000_000


GETTERS = {
    "seconds": ("VLLM_MEM_WAIT", "90", 90.0, ["", "-1", "soon", "nan", "inf", "1e10"]),
    "flag": ("VLLM_MEM_ALLOW_UNKNOWN", "1", True, ["", "yes", "true", "2"]),
    "reserve_bytes": ("SPARK_MEMORY_RESERVE_MB", "512", 512 << 20, ["-1", "1.5", "1G", "\u0664"]),
    "port": ("VLLM_PORT", "8001", 8001, ["", "0", "65536", "0000065536", "http", "-1", "80.0", "tcp://10.0.0.1:80"]),
}


@pytest.mark.parametrize(("getter", "key", "good", "value", "bad"), [(g, *row) for g, row in GETTERS.items()], ids=GETTERS)
def test_typed_value(folder: Path, getter: str, key: str, good: str, value: object, bad: list[str]) -> None:
    """A well-formed text gives its value; every other is 78, and says which key, which text, where, and what it takes."""

    def get(text: str) -> object:
        method = getattr(read(folder, **{key: text}), getter)
        return method() if getter in ("reserve_bytes", "port") else method(key)

    assert get(good) == value
    for text in bad:
        with pytest.raises(SparkguardError) as caught:
            get(text)
        assert caught.value.message.startswith(f"{key}={text!r} in the environment ")
        assert caught.value.hint == f"it takes: {SETTINGS[key].valid}"
        assert caught.value.status == CONFIG


def test_reserve_that_is_not_set(folder: Path) -> None:
    """Empty means what is usual, which takes a pool and who starts there to tell."""
    assert read(folder).reserve_bytes() is None
    assert read(folder, SPARK_MEMORY_RESERVE_MB="0").reserve_bytes() == 0


def test_choice(folder: Path) -> None:
    """A word that is none of the choices is 78."""
    assert read(folder).choice("VLLM_ENV_PROFILE") == "stable"
    with pytest.raises(SparkguardError, match="VLLM_ENV_PROFILE='slow' in the environment is not known"):
        read(folder, VLLM_ENV_PROFILE="slow").choice("VLLM_ENV_PROFILE")


UNKNOWN_KEYS = {
    "near": ("VLLM_MEM_BUDGT=0.5", "did you mean VLLM_MEM_BUDGET?"),
    "in small letters": ("vllm_bin=x", "did you mean VLLM_BIN?"),
    "far": ("HF_HOME=/x", "known keys: MODELS_DIR, VLLM_BIN,"),
}


@pytest.mark.parametrize(("line", "hint"), UNKNOWN_KEYS.values(), ids=UNKNOWN_KEYS)
def test_unknown_key_in_spark_conf(folder: Path, line: str, hint: str) -> None:
    """spark.conf holds settings only: another key is 78, with the nearest known one."""
    write(folder, conf=line)
    error = complaint(folder)
    assert error.message == f"{folder / 'spark.conf'}, line 1: unknown key {line.partition('=')[0]}"
    assert hint in (error.hint or "")
    assert error.status == CONFIG


@pytest.mark.parametrize(
    "key", ["VLLM_GPU_MEM_UTILS", "VLLM_EXTRA_ARG", "MODEL_DIR", "VLLM_MODELS", "SPARK_MEMORY_POOLS", "vllm_model"]
)
def test_near_miss_in_a_spec(folder: Path, key: str) -> None:
    """A slip in one of our keys is not handed to the server as if it were its own."""
    write(folder, spec=f"{key}=1")
    error = complaint(folder)
    assert f"unknown key {key}" in error.message
    assert "did you mean" in (error.hint or "")


# vLLM's own variables, from vllm/envs.py of 0.32, whose names come closest to ours, and others' that specs set.
HANDED_ON = [
    "VLLM_CPU_KVCACHE_SPACE", "VLLM_LOGGING_LEVEL", "VLLM_USE_V1", "VLLM_HOST_IP", "VLLM_API_KEY", "VLLM_CACHE_ROOT",
    "VLLM_CPU_OMP_THREADS_BIND", "VLLM_USE_MODELSCOPE", "VLLM_MOE_USE_DEEP_GEMM", "VLLM_MODEL_REDIRECT_PATH", "VLLM_PLUGINS",
    "HF_TOKEN", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MODELSCOPE_CACHE", "PATH",
]  # fmt: skip


@pytest.mark.parametrize("key", HANDED_ON)
def test_other_keys_of_a_spec_are_handed_on(folder: Path, key: str) -> None:
    """What is not a setting is the server's environment, with its origin."""
    write(folder, spec=f"VLLM_MODEL=x\n{key}=value")
    value = read(folder).passed_on[key]
    assert (value.text, value.origin) == ("value", f"{folder / 'models' / 'm.env'}, line 2")


def test_no_files(folder: Path) -> None:
    """Neither file has to exist; a spec that must is asked for by its path."""
    assert read(folder).spec == str(folder / "models" / "m.env")
    with pytest.raises(SparkguardError, match=r"there is no model spec .*/m\.env") as raised:
        load({"HOME": str(folder.parents[1])}, "m", spec_must_exist=True)
    assert raised.value.hint == "write one: VLLM_MODEL=, VLLM_PORT=, VLLM_GPU_MEM_UTIL="
    (folder / "models").mkdir(exist_ok=True)
    (folder / "models" / "example.env.sample").write_text("VLLM_MODEL=\n")
    with pytest.raises(SparkguardError) as raised:
        load({"HOME": str(folder.parents[1])}, "m", spec_must_exist=True)
    assert raised.value.hint == f"write one: cp {folder}/models/example.env.sample {folder}/models/m.env, and edit it"


def test_xdg_config_home(folder: Path, tmp_path: Path) -> None:
    """XDG_CONFIG_HOME moves both files."""
    (tmp_path / "spark").mkdir()
    (tmp_path / "spark" / "spark.conf").write_text("VLLM_MEM_BUDGET=0.33")
    assert read(folder, XDG_CONFIG_HOME=str(tmp_path)).text("VLLM_MEM_BUDGET") == "0.33"


def test_not_utf8(folder: Path) -> None:
    """Bytes that are no UTF-8 are 78, with the place of the first."""
    write(folder, conf=b"VLLM_BIN=\xff\n")
    error = complaint(folder)
    assert error.message == f"{folder / 'spark.conf'} is not UTF-8: invalid start byte at byte 9"
    assert error.status == CONFIG


@pytest.mark.parametrize("name", ["spark.conf", "models/m.env"])
def test_a_folder_in_its_place(folder: Path, name: str) -> None:
    """A folder where a file should be is 71: it cannot be read."""
    (folder / name).mkdir()
    error = complaint(folder)
    assert error.message == f"{folder / name} cannot be read: Is a directory"
    assert error.status == OSERR


@pytest.mark.parametrize("name", ["spark.conf", "models/m.env"])
def test_a_link_to_nothing(folder: Path, name: str) -> None:
    """A broken link is not 'no file': somebody meant to have settings there."""
    (folder / name).symlink_to("nowhere")
    error = complaint(folder)
    assert error.message == f"{folder / name} cannot be read: No such file or directory"
    assert error.status == OSERR


@pytest.mark.parametrize("name", ["spark.conf", "models/m.env"])
def test_what_is_no_file(folder: Path, name: str) -> None:
    """A fifo must not hold the start up, nor a gigabyte fill the memory that the start needs: both are 71."""
    os.mkfifo(folder / name)
    error = complaint(folder)
    assert (error.status, error.message) == (OSERR, f"{folder / name} cannot be read: it is no regular file")
    (folder / name).unlink()
    with open(folder / name, "wb") as file:
        file.truncate(1 << 30)
    error = complaint(folder)
    assert (error.status, error.message) == (OSERR, f"{folder / name} cannot be read: it is larger than 1024 KiB")


@pytest.mark.parametrize("line", ["VLLM_MODEL=a\0b", "VLLM_EXTRA_ARGS='--x \0'", "HF_HOME=/a\0"])
def test_a_nul(folder: Path, line: str) -> None:
    """A NUL can stand in no argument: it is said with its place, and not by exec after the admission."""
    write(folder, spec=f"VLLM_PORT=8000\n{line}\n")
    error = complaint(folder)
    assert (error.status, error.message) == (CONFIG, f"{folder / 'models' / 'm.env'}, line 2 holds a NUL byte")


def test_values_that_double(folder: Path) -> None:
    """Names that are looked up in each other end at what an argument may have, before they fill the memory."""
    write(folder, spec="A=xxxxxxxx\n" + "A=$A$A\n" * 40)
    error = complaint(folder)
    assert (error.status, error.message) == (CONFIG, f"{folder / 'models' / 'm.env'}, line 15: the value has 131072 characters")


def errno_as_nobody(path: Path) -> str:
    """What load() says when the user is not root, for whom nothing is unreadable: in a child, because it is for good."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        ctypes.CDLL(None).setresuid(65534, 65534, 65534)
        try:
            load({"HOME": str(path)}, "m")
            os.write(writer, b"loaded")
        except SparkguardError as error:
            os.write(writer, f"{error.status} {error.message}".encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with open(reader) as file:
        return file.read()


@pytest.mark.parametrize("closed", ["the file", "its folder"])
def test_unreadable(folder: Path, closed: str) -> None:
    """A file that may not be read is 71, and so is one in a folder that may not be searched: neither is 'no file'."""
    write(folder, conf="VLLM_MEM_BUDGET=0.5")
    home = folder.parents[1]
    for path in [home, *home.parents]:
        if path != Path("/") and os.stat(path).st_uid == os.getuid() and not os.stat(path).st_mode & 0o001:
            path.chmod(path.stat().st_mode | 0o011)
    (folder / "spark.conf" if closed == "the file" else folder).chmod(0)
    if os.getuid() == 0:
        said = errno_as_nobody(home)
    else:
        error = complaint(folder)
        said = f"{error.status} {error.message}"
    (folder / "spark.conf" if closed == "the file" else folder).chmod(0o700)
    assert said == f"71 {folder / 'spark.conf'} cannot be read: Permission denied"


NAMES = {
    "plain": ("longcontext", "longcontext"),
    "dash": ("vision-agent", "vision-agent"),
    "systemd's escape": (r"my\x2dmodel", "my-model"),
    "dot and underscore": ("qwen3.5_8b", "qwen3.5_8b"),
}


@pytest.mark.parametrize(("given", "name"), NAMES.values(), ids=NAMES)
def test_name(given: str, name: str) -> None:
    """A model's name, with systemd's escapes undone."""
    assert check_name(given) == name


BAD_NAMES = [
    "", ".", "..", "a/b", "/etc/passwd", "../x", "a..b", "a b", "a\tb", "a\nb", "100%", "%i", "-x", "a\\b",
    r"\x2f", r"a\x2fb", r"\x2e\x2e", r"a\x20b", r"a\x5cx2fb", r"\x00", "\udcff", "a\u2028b",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD_NAMES, ids=ascii)
def test_bad_name(folder: Path, name: str) -> None:
    """A name that could leave the folder of specs, or break a unit, is 78, escaped or not."""
    with pytest.raises(SparkguardError, match="cannot be a model's name") as caught:
        load({"HOME": str(folder.parents[1])}, name)
    assert caught.value.status == CONFIG


JSON = '{"method": "ngram", "a b": [1, {"c": "}]"}], "q": "x\\"y"}'
WORDS = {
    "blanks": ("  --a  b\t--c\n", ["--a", "b", "--c"]),
    "nothing": ("  ", []),
    "single quotes": ("--a 'b c'", ["--a", "b c"]),
    "double quotes": ('--a "b c"', ["--a", "b c"]),
    "quotes inside a word": ("--a=b' 'c", ["--a=b c"]),
    "an empty word": ("--a '' \"\"", ["--a", "", ""]),
    "a backslash": (r"--a b\ c \"", ["--a", "b c", '"']),
    "escapes in double quotes": (r'"a\"b\\c\$d\ne"', [r'a"b\c$d\ne']),
    "bare JSON": (f"--x {JSON} --y", ["--x", JSON, "--y"]),
    "quoted JSON": (f"--x '{JSON}' --y", ["--x", JSON, "--y"]),
    "JSON behind =": (f"--x={JSON} --y", [f"--x={JSON}", "--y"]),
    "a bare list": ('--x ["a b", "c"]', ["--x", '["a b", "c"]']),
    "a brace inside a word is no JSON": ("a{b c}", ["a{b", "c}"]),
    "JSON in double quotes": (r'"{\"a\": 1}"', ['{"a": 1}']),
}


@pytest.mark.parametrize("source", ["spec", "environment"])
@pytest.mark.parametrize(("text", "words"), WORDS.values(), ids=WORDS)
def test_words(folder: Path, source: str, text: str, words: list[str]) -> None:
    """VLLM_EXTRA_ARGS come apart as a shell would, JSON stays whole, from a file and from a drop-in alike."""
    assert split_words(text) == words
    if source == "environment":
        assert read(folder, VLLM_EXTRA_ARGS=text).words("VLLM_EXTRA_ARGS") == words
    elif "$" not in text:
        line = text.replace("\n", " ")
        # A value that begins with a quote is a quoted value, in a shell and for systemd: such words are quoted once more.
        write(folder, spec="VLLM_EXTRA_ARGS=" + (line if line.strip()[:1] != '"' else f"'{line}'"))
        assert read(folder).words("VLLM_EXTRA_ARGS") == words


@pytest.mark.parametrize("text", ["--a 'b", '--a "b', '--a {"b": 1', '["a"', '--a {"b": "}'], ids=ascii)
def test_words_that_do_not_close(folder: Path, text: str) -> None:
    """An open quote or bracket is 78, with the key and where it stands."""
    with pytest.raises(SparkguardError, match=r"VLLM_EXTRA_ARGS=.* in the environment cannot be split into words: .* closed"):
        read(folder, VLLM_EXTRA_ARGS=text).words("VLLM_EXTRA_ARGS")


SCALARS = st.none() | st.booleans() | st.integers() | st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=8)
DOCUMENTS = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab {}\"'\\", max_size=3), inner)
)


@given(st.lists(st.dictionaries(st.text("ab {}\"'\\", max_size=3), DOCUMENTS, max_size=3), max_size=3))
def test_any_json_object_stays_whole(documents: list[dict[str, object]]) -> None:
    """Whatever stands in it, a JSON object is one word and comes out as it went in."""
    import json

    texts = [json.dumps(document) for document in documents]
    assert split_words(" ".join(texts)) == texts


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8), max_size=4))
def test_quoted_words_come_back(words: list[str]) -> None:
    """What a shell quotes, these rules read."""
    import shlex

    assert split_words(shlex.join(words)) == words


@pytest.mark.parametrize("home", [None, "", "not/a/full/path"])
def test_a_home_that_is_none(home: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's own entry counts then, and never a folder below the current one, which may be anybody's."""
    monkeypatch.chdir(tmp_path)
    env = {} if home is None else {"HOME": home}
    assert home_folder(env) == pwd.getpwuid(os.getuid()).pw_dir

    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    with pytest.raises(SparkguardError, match="user 4000000000 has no home") as caught:
        load(env, "m")
    assert caught.value.status == CONFIG


def test_a_relative_xdg_config_home(folder: Path) -> None:
    """It does not count, as the XDG specification has it: it would be another folder for each start."""
    assert read(folder, XDG_CONFIG_HOME="elsewhere").config_dir == str(folder)
