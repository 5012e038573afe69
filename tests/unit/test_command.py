"""One command line: what the guard judges is what the launcher executes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from sparkguard import command
from sparkguard.core.types import DISCRETE, RAM, UNIFIED, Machine, MemoryPool
from sparkguard.errors import CONFIG, NOT_FOUND, USAGE, SparkguardError
from sparkguard.settings import Settings, load

GIB = 1 << 30
SPARK = Machine((MemoryPool("ram", UNIFIED, 128 * GIB),))
TWO_CARDS = Machine(tuple(MemoryPool(f"gpu{i}", DISCRETE, 24 * GIB, name="NVIDIA RTX 4090") for i in (0, 1)))
PLAIN = Machine((MemoryPool("ram", RAM, 64 * GIB),))


@pytest.fixture
def spec(home: Path) -> Path:
    path = home / ".config" / "spark" / "models" / "m.env"
    path.parent.mkdir(parents=True)
    (home / "models" / "local").mkdir(parents=True)
    return path


def settings_of(spec: Path, text: str, conf: str = "", **env: str) -> Settings:
    spec.write_text(text)
    (spec.parents[1] / "spark.conf").write_text(conf)
    return load({"HOME": str(spec.parents[3]), **env}, "m")


def build(spec: Path, text: str, args: Sequence[str] = (), conf: str = "", **env: str) -> command.Command:
    return command.build(settings_of(spec, text, conf, **env), "m", args)


def complaint(spec: Path, text: str, args: Sequence[str] = (), **env: str) -> SparkguardError:
    with pytest.raises(SparkguardError) as caught:
        build(spec, text, args, **env)
    return caught.value


JSON = '{"method": "ngram", "n": [1, 2]}'
ARGV = {
    "a hub id, nothing else": ("VLLM_MODEL=org/name", [], {}, ["org/name", "--port", "8000"]),
    "the customer's example": (
        "VLLM_MODEL=local\nVLLM_PORT=8000\nVLLM_GPU_MEM_UTIL=0.70\nVLLM_EXTRA_ARGS=--dtype bfloat16 --max-model-len 65536",
        [], {},
        ["{models}/local", "--port", "8000", "--gpu-memory-utilization", "0.70", "--dtype", "bfloat16", "--max-model-len",
         "65536"],
    ),
    "a bare name that is not there": ("VLLM_MODEL=gpt2", [], {}, ["gpt2", "--port", "8000"]),
    "an absolute path": ("VLLM_MODEL={models}/local", [], {}, ["{models}/local", "--port", "8000"]),
    "a home path": ("VLLM_MODEL=~/models/local", [], {}, ["{models}/local", "--port", "8000"]),
    "another MODELS_DIR": ("VLLM_MODEL=models/local\nMODELS_DIR=$HOME", [], {}, ["{models}/local", "--port", "8000"]),
    "environment over spec": (
        "VLLM_MODEL=org/name\nVLLM_PORT=8001\nVLLM_GPU_MEM_UTIL=0.70", [], {"VLLM_GPU_MEM_UTIL": "0.75", "VLLM_PORT": "8002"},
        ["org/name", "--port", "8002", "--gpu-memory-utilization", "0.75"],
    ),
    "arguments over environment and spec": (
        "VLLM_MODEL=org/name\nVLLM_PORT=8001\nVLLM_GPU_MEM_UTIL=0.70",
        ["--gpu-memory-utilization=0.5", "--port", "9"], {"VLLM_GPU_MEM_UTIL": "0.75"},
        ["org/name", "--gpu-memory-utilization=0.5", "--port", "9"],
    ),
    "arguments come last, so that they win": (
        "VLLM_MODEL=org/name\nVLLM_EXTRA_ARGS=--max-model-len 1", ["--max-model-len", "2"], {},
        ["org/name", "--port", "8000", "--max-model-len", "1", "--max-model-len", "2"],
    ),
    "a model among the arguments": (
        "VLLM_MODEL=org/name\nVLLM_GPU_MEM_UTIL=0.1", ["other/name", "--x"], {},
        ["other/name", "--port", "8000", "--gpu-memory-utilization", "0.1", "--x"],
    ),
    "--model among the arguments": ("VLLM_MODEL=org/name", ["--model", "o/n"], {}, ["--port", "8000", "--model", "o/n"]),
    "--model in VLLM_EXTRA_ARGS": ("VLLM_EXTRA_ARGS=--model o/n", [], {}, ["--port", "8000", "--model", "o/n"]),
    "a share in VLLM_EXTRA_ARGS": (
        "VLLM_MODEL=o/n\nVLLM_EXTRA_ARGS=--gpu-mem 0.3 --port=81", [], {}, ["o/n", "--gpu-mem", "0.3", "--port=81"]
    ),
    "the same value twice is no contradiction": (
        "VLLM_MODEL=o/n\nVLLM_GPU_MEM_UTIL=.3\nVLLM_PORT=81\nVLLM_EXTRA_ARGS=--gpu-memory-utilization 0.30 --port 81", [], {},
        ["o/n", "--gpu-memory-utilization", "0.30", "--port", "81"],
    ),
    "blanks around a share": (
        "VLLM_MODEL=o/n", [], {"VLLM_GPU_MEM_UTIL": " 0.4 "}, ["o/n", "--port", "8000", "--gpu-memory-utilization", "0.4"]
    ),
    "JSON from the spec": (f"VLLM_MODEL=o/n\nVLLM_EXTRA_ARGS=--spec {JSON}", [], {}, ["o/n", "--port", "8000", "--spec", JSON]),
    "JSON from a drop-in": (
        "VLLM_MODEL=o/n", [], {"VLLM_EXTRA_ARGS": f"--spec '{JSON}'"}, ["o/n", "--port", "8000", "--spec", JSON]
    ),
    "a config file may name the port": ("VLLM_EXTRA_ARGS=--config /c.yaml", [], {}, ["--config", "/c.yaml"]),
    "VLLM_PORT beats the config file": (
        "VLLM_PORT=81\nVLLM_EXTRA_ARGS=--config /c.yaml", [], {}, ["--port", "81", "--config", "/c.yaml"]
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "args", "env", "words"), ARGV.values(), ids=ARGV)
def test_argv(
    spec: Path, monkeypatch: pytest.MonkeyPatch, text: str, args: list[str], env: dict[str, str], words: list[str]
) -> None:
    """A spec, an environment and arguments make these words after `vllm serve`."""
    monkeypatch.setattr(command, "_read_file", lambda path: "gpu-memory-utilization: 0.2\n")
    models = str(spec.parents[3] / "models")
    built = build(spec, text.replace("{models}", models), args, **env)
    assert list(built.serve_args) == [word.replace("{models}", models) for word in words]


CONTRADICTIONS = {
    "share": (
        "VLLM_GPU_MEM_UTIL=0.70\nVLLM_EXTRA_ARGS=--gpu-memory-utilization 0.5",
        {},
        "VLLM_GPU_MEM_UTIL=0.70 in {spec}, line 2",
    ),
    "share, by its other name": ("VLLM_GPU_MEM_UTIL=0.70\nVLLM_EXTRA_ARGS=--device_memory_utilization=0.5", {}, "0.5"),
    "share, by a drop-in": (
        "VLLM_EXTRA_ARGS=--gpu-memory-utilization 0.5",
        {"VLLM_GPU_MEM_UTIL": "0.6"},
        "=0.6 in the environment",
    ),
    "port": ("VLLM_PORT=8001\nVLLM_EXTRA_ARGS=--port 8002", {}, "VLLM_PORT=8001 in {spec}, line 2"),
    "model": ("VLLM_EXTRA_ARGS=--model other", {}, "VLLM_MODEL=org/name in {spec}, line 1"),
    "a share that is none": ("VLLM_GPU_MEM_UTIL=0.70\nVLLM_EXTRA_ARGS=--gpu-memory-utilization x", {}, "x in VLLM_EXTRA_ARGS"),
}


@pytest.mark.parametrize(("text", "env", "words"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_two_values_for_one_thing(spec: Path, text: str, env: dict[str, str], words: str) -> None:
    """A setting and a flag inside VLLM_EXTRA_ARGS that differ are 78, and both places are named."""
    error = complaint(spec, f"VLLM_MODEL=org/name\n{text}", **env)
    assert words.format(spec=spec) in error.message
    assert f"in VLLM_EXTRA_ARGS of {spec}, line {1 + len(text.splitlines())} are two values for one thing" in error.message
    assert error.status == CONFIG


MISSING = {
    "no model": ("VLLM_MODEL=", "no model is set for m", "add a line to {spec}: VLLM_MODEL="),
    "no spec's line at all": ("", "no model is set for m", "add a line to {spec}: VLLM_MODEL="),
    "a path that is not there": ("VLLM_MODEL=/nowhere", "VLLM_MODEL='/nowhere' in {spec}, line 1 does not exist", "it takes:"),
    "a relative path that is not there": ("VLLM_MODEL=./no", "VLLM_MODEL='./no' in {spec}, line 1 does not exist", "it takes:"),
    "a home path that is not there": ("VLLM_MODEL=~/no", "VLLM_MODEL='{home}/no' in {spec}, line 1 does not exist", "it takes:"),
}


@pytest.mark.parametrize(("text", "message", "hint"), MISSING.values(), ids=MISSING)
def test_no_model(spec: Path, text: str, message: str, hint: str) -> None:
    """Nothing to serve is 78, with the line to edit."""
    error = complaint(spec, text)
    names = {"spec": spec, "home": spec.parents[3]}
    assert error.message == message.format(**names)
    assert (error.hint or "").startswith(hint.format(**names))
    assert error.status == CONFIG


def test_a_misspelt_folder_is_no_hub_id(spec: Path) -> None:
    """A bare name that is nearly a folder under MODELS_DIR is refused with that folder's name; other names are hub ids."""
    models = spec.parents[3] / "models"
    (models / "Qwen3-8B-FP8").mkdir(parents=True)
    (models / "gpt-oss-20.gguf").write_text("a file is none")
    error = complaint(spec, "VLLM_MODEL=Qwen3-8-FP8")
    assert error.message.endswith(f"is no folder in {models}; did you mean Qwen3-8B-FP8?")
    assert (error.hint or "").endswith("to serve one that has none: VLLM_EXTRA_ARGS=--model Qwen3-8-FP8")
    for name in ("Qwen3-8B-FP8", "Qwen/Qwen3-8B-FP8", "gpt2", "gpt-oss-20"):
        assert build(spec, f"VLLM_MODEL={name}").model.endswith(name)
    assert build(spec, "VLLM_EXTRA_ARGS=--model Qwen3-8-FP8").serve_args[:2] == ("--port", "8000")


BAD_SHARES = ["40%", "0,4", "nan", "-1", "1.5", "", "0"]


@pytest.mark.parametrize("text", BAD_SHARES)
def test_malformed_share_as_a_flag(spec: Path, text: str) -> None:
    """A flag whose value is no share is 78 before vLLM sees it, in the arguments and in VLLM_EXTRA_ARGS; both say where."""
    error = complaint(spec, "VLLM_MODEL=o/n", [f"--gpu-memory-utilization={text}"])
    assert error.message == f"--gpu-memory-utilization in the arguments is {text!r}, which is no share"
    assert error.status == CONFIG
    error = complaint(spec, f"VLLM_MODEL=o/n\nVLLM_EXTRA_ARGS=--gpu-memory-utilization={text}")
    assert error.message == f"--gpu-memory-utilization in VLLM_EXTRA_ARGS of {spec}, line 2 is {text!r}, which is no share"


def test_a_share_in_a_config_file(spec: Path, tmp_path: Path) -> None:
    """A --config file is read for its share; one that is none, or a file that is not there, is 78."""
    config = tmp_path / "c.yaml"
    config.write_text("model: o/n\ngpu_memory_utilization: 0.3\nport: 8003\n")
    built = build(spec, f"VLLM_EXTRA_ARGS=--config {config}")
    assert (built.declared.share, built.declared.port, built.declared.source) == (300_000_000, 8003, "config")
    config.write_text("model: o/n\ngpu-memory-utilization: 1.3\n")
    assert "is no share above 0 and at most 1" in complaint(spec, f"VLLM_EXTRA_ARGS=--config {config}").message
    assert "cannot be read" in complaint(spec, f"VLLM_EXTRA_ARGS=--config {config.with_name('gone.yaml')}").message


def test_help_starts_no_server(spec: Path) -> None:
    """--help among the arguments is a usage error."""
    assert complaint(spec, "VLLM_MODEL=o/n", ["--help"]).status == USAGE


def test_the_empty_share_is_malformed(spec: Path) -> None:
    """VLLM_GPU_MEM_UTIL= is a value that somebody forgot, not vLLM's default, which takes nearly everything."""
    assert complaint(spec, "VLLM_MODEL=o/n\nVLLM_GPU_MEM_UTIL=").status == CONFIG


WANTED = {
    "a share": (SPARK, "VLLM_GPU_MEM_UTIL=0.5", {}, [("ram", 500_000_000, 64 * GIB)], "argument"),
    "no share: the largest default of an unknown vLLM": (SPARK, "", {}, [("ram", 920_000_000, None)], "default"),
    "one card": (TWO_CARDS, "VLLM_GPU_MEM_UTIL=0.5", {}, [("gpu0", 500_000_000, 12 * GIB)], "argument"),
    "two cards": (
        TWO_CARDS, "VLLM_GPU_MEM_UTIL=0.5\nVLLM_EXTRA_ARGS=-tp 2", {},
        [("gpu0", 500_000_000, 12 * GIB), ("gpu1", 500_000_000, 12 * GIB)], "argument",
    ),
    "the card that the spec names": (
        TWO_CARDS, "VLLM_GPU_MEM_UTIL=0.5\nCUDA_VISIBLE_DEVICES=1", {}, [("gpu1", 500_000_000, 12 * GIB)], "argument"
    ),
    "the card that a drop-in names": (
        TWO_CARDS, "VLLM_GPU_MEM_UTIL=0.5\nCUDA_VISIBLE_DEVICES=0", {"CUDA_VISIBLE_DEVICES": "1"},
        [("gpu1", 500_000_000, 12 * GIB)], "argument",
    ),
    "a container sees neither the host's environment": (
        TWO_CARDS, "VLLM_GPU_MEM_UTIL=0.5\nVLLM_IMAGE=vllm/vllm-openai", {"CUDA_VISIBLE_DEVICES": "1"},
        [("gpu0", 500_000_000, 12 * GIB)], "argument",
    ),
    "nor other cards than it is given": (
        TWO_CARDS, "VLLM_GPU_MEM_UTIL=0.5\nVLLM_IMAGE=vllm/vllm-openai\nVLLM_DOCKER_ARGS=--gpus device=1", {},
        [("gpu1", 500_000_000, 12 * GIB)], "argument",
    ),
    "or whose environment names them": (
        TWO_CARDS, "VLLM_GPU_MEM_UTIL=0.5\nVLLM_IMAGE=vllm/vllm-openai\nVLLM_DOCKER_ARGS=-e CUDA_VISIBLE_DEVICES=1", {},
        [("gpu1", 500_000_000, 12 * GIB)], "argument",
    ),
    "or whose client hands them on": (
        TWO_CARDS, "VLLM_GPU_MEM_UTIL=0.5\nVLLM_IMAGE=vllm/vllm-openai\nVLLM_DOCKER_ARGS=-e CUDA_VISIBLE_DEVICES",
        {"CUDA_VISIBLE_DEVICES": "1"}, [("gpu1", 500_000_000, 12 * GIB)], "argument",
    ),
    "unless a file that cannot be read says it": (
        TWO_CARDS, "VLLM_GPU_MEM_UTIL=0.5\nVLLM_IMAGE=vllm/vllm-openai\nVLLM_DOCKER_ARGS=--env-file /nowhere", {},
        [("gpu0", 500_000_000, 12 * GIB), ("gpu1", 500_000_000, 12 * GIB)], "argument",
    ),
    "the containers' variable means nothing outside of one": (
        TWO_CARDS, "VLLM_GPU_MEM_UTIL=0.5", {"NVIDIA_VISIBLE_DEVICES": "1"}, [("gpu0", 500_000_000, 12 * GIB)], "argument"
    ),
    "a container sees what the spec hands on": (
        TWO_CARDS, "VLLM_GPU_MEM_UTIL=0.5\nVLLM_IMAGE=vllm/vllm-openai\nCUDA_VISIBLE_DEVICES=0", {"CUDA_VISIBLE_DEVICES": "1"},
        [("gpu1", 500_000_000, 12 * GIB)], "argument",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("machine", "text", "env", "holds", "source"), WANTED.values(), ids=WANTED)
def test_wanted(
    spec: Path, machine: Machine, text: str, env: dict[str, str], holds: list[tuple[str, int, int | None]], source: str
) -> None:
    """What the start asks of each pool, under the environment that the server will see."""
    settings = settings_of(spec, f"VLLM_MODEL=o/n\nVLLM_BIN=/nowhere\n{text}", **env)
    server = {**{key: value.text for key, value in settings.passed_on.items()}, **env}
    asked = command.wanted(command.build(settings, "m", ()), settings, machine, server)
    assert [(hold.pool, hold.share) for hold in asked.holds] == [(pool, share) for pool, share, _ in holds]
    assert all(amount in (None, hold.bytes) for hold, (_, _, amount) in zip(asked.holds, holds, strict=True))
    assert asked.source == source


@pytest.mark.parametrize("option", ["-d", "-itd", "--detach"])
def test_a_container_in_the_background_is_refused(spec: Path, option: str) -> None:
    """Its client would end at once, and systemd would start it again and again beside the container that goes on."""
    settings = settings_of(spec, f"VLLM_MODEL=o/n\nVLLM_IMAGE=i\nVLLM_DOCKER_ARGS=--gpus all {option}")
    with pytest.raises(SparkguardError, match="leave -d out") as refused:
        command.build(settings, "m", ())
    assert refused.value.status == CONFIG


def test_wanted_of_a_given_cache(spec: Path) -> None:
    """On a machine without a GPU a given cache size stands for the fraction, and the text says what was asked for."""
    settings = settings_of(spec, "VLLM_MODEL=o/n\nVLLM_EXTRA_ARGS=--kv-cache-memory-bytes 16G")
    asked = command.wanted(command.build(settings, "m", ()), settings, PLAIN, {})
    assert (asked.holds[0].bytes, asked.holds[0].share) == (16 * GIB, 250_000_000)
    assert asked.flag == "--kv-cache-memory-bytes, a share of"


VERSIONS = {"0.19.1": 900_000_000, "0.20.0": 920_000_000, "0.32.0": 920_000_000}


def install_vllm(home: Path, version: str) -> Path:
    program = home / "venv" / "bin" / "vllm"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    (home / "venv" / "lib" / "python3.12" / "site-packages" / f"vllm-{version}.dist-info").mkdir(parents=True)
    return program


@pytest.mark.parametrize(("version", "share"), VERSIONS.items())
def test_default_of_the_vllm_at_hand(spec: Path, version: str, share: int) -> None:
    """Without a share, the default of the version beside VLLM_BIN is what the start wants."""
    program = install_vllm(spec.parents[3], version)
    settings = settings_of(spec, f"VLLM_MODEL=o/n\nVLLM_BIN={program}")
    assert command.wanted(command.build(settings, "m", ()), settings, SPARK, {}).holds[0].share == share


def test_program(spec: Path, home: Path) -> None:
    """VLLM_BIN is found by path or on PATH; missing, it is 127 with the setting to change, and so is docker for an image."""
    program = install_vllm(home, "0.32.0")
    text = "VLLM_MODEL=o/n\n"

    def find(more: str, **env: str) -> str:
        settings = settings_of(spec, text + more, **env)
        return command.program_of(command.build(settings, "m", ()), settings, env)

    assert find(f"VLLM_BIN={program}") == str(program)
    assert find("", PATH=f"/nowhere:{program.parent}") == str(program)
    program.chmod(0o644)
    for more, env, message in (
        (f"VLLM_BIN={program}", {}, f"{program} was not found (VLLM_BIN in {spec}, line 2)"),
        (f"VLLM_BIN={program.parent}", {}, f"{program.parent} was not found"),
        ("VLLM_BIN=", {}, " was not found (VLLM_BIN in"),
        ("", {"PATH": str(program.parent)}, "vllm was not found (VLLM_BIN in default)"),
        ("VLLM_IMAGE=i", {"PATH": "/nowhere"}, "docker was not found (VLLM_DOCKER_BIN in default)"),
    ):
        with pytest.raises(SparkguardError) as caught:
            find(more, **env)
        assert caught.value.message.startswith(message)
        assert caught.value.status == NOT_FOUND
        key = "VLLM_DOCKER_BIN" if "docker" in message else "VLLM_BIN"
        assert caught.value.hint == f"set {key} in {os.path.join(home, '.config', 'spark', 'spark.conf')}"
