"""The files in config/ are the reference of the settings, and those in examples/ work as they stand."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from sparkguard import command
from sparkguard.core.admission import admit
from sparkguard.core.share import parse_share
from sparkguard.core.types import RAM, UNIFIED, Budget, Claim, Hold, Machine, MemoryPool
from sparkguard.errors import SparkguardError
from sparkguard.settings import MODEL, SETTINGS, SITE, Settings, load

REPOSITORY = Path(__file__).parents[2]
CONFIG = REPOSITORY / "config"
EXAMPLES = REPOSITORY / "examples"
SHIPPED = {"embeddings": ("8001", "0.10"), "longcontext": ("8000", "0.70"), "vision-agent": ("8000", "0.65")}
SYSCTLS = ("net.core.rmem_max", "net.core.wmem_max", "fs.inotify.max_user_watches", "fs.inotify.max_user_instances")


@pytest.fixture
def installed(home: Path) -> Path:
    """~/.config/spark as install.sh leaves it."""
    folder = home / ".config" / "spark"
    shutil.copytree(CONFIG, folder)
    return folder


def loaded(home: Path, name: str | None = None, **env: str) -> Settings:
    return load({"HOME": str(home), **env}, name)


def lines_with_values(path: Path) -> dict[str, str]:
    """KEY -> text after '=', of set and of commented lines alike."""
    return dict(re.findall(r"^#?([A-Z][A-Z0-9_]*)=(.*)$", path.read_text(), re.MULTILINE))


def environment_of(drop_in: Path) -> dict[str, str]:
    return dict(re.findall(r"^Environment=([A-Z_]+)=(.*)$", drop_in.read_text(), re.MULTILINE))


def test_every_site_setting_stands_in_spark_conf_and_nothing_else_does() -> None:
    """spark.conf is the reference: a setting that joins the table joins the file."""
    assert lines_with_values(CONFIG / "spark.conf").keys() == {key for key, setting in SETTINGS.items() if setting.scope == SITE}


def test_every_model_setting_stands_in_the_sample_spec() -> None:
    """The sample is the reference of specs; besides, it shows one variable of the server's own."""
    model_keys = {key for key, setting in SETTINGS.items() if setting.scope == MODEL}
    assert lines_with_values(CONFIG / "models" / "example.env.sample").keys() == model_keys | {"HF_HUB_OFFLINE"}


@pytest.mark.parametrize("file", ["spark.conf", "models/example.env.sample"])
def test_a_commented_line_shows_the_default(file: str) -> None:
    """Taking the # away changes nothing."""
    commented = dict(re.findall(r"^#([A-Z_]+)=(.*)$", (CONFIG / file).read_text(), re.MULTILINE))
    assert len(commented) >= 3
    assert {key: text.strip('"') for key, text in commented.items()} == {key: SETTINGS[key].default for key in commented}


def test_each_setting_is_explained_above_its_line() -> None:
    """No setting without its meaning; and the values it takes, where they are a closed list, are all named."""
    for file in ("spark.conf", "models/example.env.sample"):
        for paragraph in (CONFIG / file).read_text().split("\n\n")[1:]:
            lines = paragraph.strip().splitlines()
            keys = [match[1] for line in lines if (match := re.match(r"#?([A-Z_]+)=", line))]
            assert lines[0].startswith("# ") and len(keys) == 1, paragraph
            for choice in re.findall(
                r"\b(auto|unified|discrete|ram|stable|fast|docker|podman)\b", getattr(SETTINGS.get(keys[0]), "valid", "")
            ):
                assert choice in paragraph, (keys[0], choice)


def test_a_fresh_spark_conf_says_what_the_defaults_say(home: Path, installed: Path) -> None:
    """It loads, and apart from the venv's vLLM its values are the defaults."""
    settings = loaded(home)
    assert settings.text("MODELS_DIR") == f"{home}/models"
    assert settings.text("VLLM_BIN") == f"{home}/venv/bin/vllm"
    assert (settings.share("VLLM_MEM_BUDGET"), settings.share("VLLM_CPU_SHARE")) == (parse_share("0.80"), parse_share("0.80"))
    others = [key for key in SETTINGS if key not in ("MODELS_DIR", "VLLM_BIN")]
    assert {key: settings.text(key) for key in others} == {key: SETTINGS[key].default for key in others}
    assert settings.origin("VLLM_MEM_BUDGET").startswith(str(installed / "spark.conf"))


def test_spark_conf_loads_with_every_default_uncommented(home: Path, installed: Path) -> None:
    """What a person gets by taking each # away is valid."""
    conf = installed / "spark.conf"
    conf.write_text(re.sub(r"^#(?=[A-Z_]+=)", "", conf.read_text(), flags=re.MULTILINE))
    settings = loaded(home)
    assert settings.seconds("VLLM_MEM_WAIT") == 60
    assert not settings.flag("VLLM_MEM_ALLOW_UNKNOWN")
    assert settings.reserve_bytes() is None
    assert settings.origin("VLLM_DOCKER_BIN").startswith(str(conf))


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_spec_has_a_port_and_a_share_and_says_which_line_to_edit(name: str, home: Path, installed: Path) -> None:
    """A fresh install names no model: the refusal points at the file."""
    settings = loaded(home, name)
    assert (settings.text("VLLM_PORT"), settings.text("VLLM_GPU_MEM_UTIL")) == SHIPPED[name]
    assert settings.passed_on == {}
    with pytest.raises(SparkguardError) as refused:
        command.build(settings, name, ())
    assert refused.value.status == 78
    assert str(installed / "models" / f"{name}.env") in (refused.value.hint or "")


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_spec_works_once_it_names_a_model(name: str, home: Path, installed: Path) -> None:
    """Its suggestions, uncommented, are arguments that vLLM's options can be read from."""
    spec = installed / "models" / f"{name}.env"
    text = re.sub(r"^#(?=[A-Z_]+=)", "", spec.read_text(), flags=re.MULTILINE)
    spec.write_text(text.replace("VLLM_MODEL=\n", "VLLM_MODEL=org/model\n"))
    start = command.build(loaded(home, name), name, ())
    assert (start.model, start.declared.port, start.declared.share) == (
        "org/model",
        int(SHIPPED[name][0]),
        parse_share(SHIPPED[name][1]),
    )


def test_the_sample_is_no_spec_until_it_is_copied(home: Path, installed: Path) -> None:
    """Only *.env is a spec; the copy starts a model, and its JSON arrives as one argument."""
    sample = installed / "models" / "example.env.sample"
    assert sample not in installed.glob("models/*.env")
    shutil.copy(sample, installed / "models" / "mine.env")
    settings = loaded(home, "mine")
    start = command.build(settings, "mine", ())
    assert start.declared.share == parse_share("0.40")
    assert start.serve_args[-1] == '{"method": "ngram", "num_speculative_tokens": 4}'
    assert start.image is None
    assert {key: value.text for key, value in settings.passed_on.items()} == {"HF_HUB_OFFLINE": "1"}


GB10 = MemoryPool("ram", UNIFIED, 127600748 << 10, 118566368 << 10)  # total and available of an idle one (nvitop PR 208)


def verdict(home: Path, name: str, *running: str, **env: str) -> bool:
    """Whether a shipped model is admitted on a GB10 beside running shares that have taken what they claim."""
    settings = loaded(home, name, **env)
    start = command.build(settings, name, ("org/model",))
    wanted = command.wanted(start, settings, Machine((GB10,)), env)
    claims = []
    available = GB10.available_bytes or 0
    for share in running:
        taken = parse_share(share) * (GB10.total_bytes or 0) // 10**9
        claims.append(Claim(4711, "vllm", (Hold("ram", parse_share(share), taken, taken),), "argument", port=8001))
        available -= taken
    pool = GB10.replace(available_bytes=available)
    return admit(Budget(settings.share("VLLM_MEM_BUDGET")), (pool,), tuple(claims), wanted).admitted


@pytest.mark.parametrize("name", ["longcontext", "vision-agent"])
def test_each_of_the_two_large_ones_fits_beside_embeddings(name: str, home: Path, installed: Path) -> None:
    """The default shares can live together under the default budget: 0.10 + 0.70 = 0.80 is admitted."""
    assert verdict(home, name, SHIPPED["embeddings"][1])


def test_the_retune_example_is_admitted_alone_and_refused_beside_embeddings(home: Path, installed: Path) -> None:
    """0.75 fits a budget of 0.80, 0.10 + 0.75 does not."""
    drop_in = environment_of(EXAMPLES / "retune-longcontext.conf")
    assert drop_in == {"VLLM_GPU_MEM_UTIL": "0.75"}
    assert loaded(home, "longcontext", **drop_in).origin("VLLM_GPU_MEM_UTIL") == "the environment"
    assert verdict(home, "longcontext", **drop_in)
    assert not verdict(home, "longcontext", SHIPPED["embeddings"][1], **drop_in)


def test_the_budget_example_refuses_what_the_default_admits(home: Path, installed: Path) -> None:
    """A test run lowers the ceiling by environment, whatever spark.conf says."""
    drop_in = environment_of(EXAMPLES / "budget-test.conf")
    assert loaded(home, **drop_in).seconds("VLLM_MEM_WAIT") == 0
    assert verdict(home, "vision-agent")
    assert not verdict(home, "vision-agent", **drop_in)


def test_the_container_example_is_a_spec_for_an_image(home: Path, installed: Path) -> None:
    """It is admitted by its share, and mounts the cache of this user's home."""
    shutil.copy(EXAMPLES / "container.env", installed / "models" / "mymodel.env")
    start = command.build(loaded(home, "mymodel"), "mymodel", ())
    assert start.image is not None and start.image.startswith("vllm/vllm-openai:v")
    assert (start.model, start.declared.share, start.declared.port) == ("Qwen/Qwen3-8B", parse_share("0.40"), 8000)
    assert " ".join(start.docker_args).startswith(SETTINGS["VLLM_DOCKER_ARGS"].default)
    assert f"{home}/.cache/huggingface:/root/.cache/huggingface" in start.docker_args


def test_the_sysctl_file_sets_four_keys_each_with_its_reason() -> None:
    """A number without a reason does not belong into somebody's kernel."""
    paragraphs = (REPOSITORY / "sysctl" / "99-spark.conf").read_text().split("\n\n")
    values: dict[str, int] = {}
    for paragraph in paragraphs[1:]:
        found = re.findall(r"^([a-z_.]+) = (\d+)$", paragraph, re.MULTILINE)
        assert found and paragraph.startswith("# ") and len(paragraph) > 150
        values |= {key: int(value) for key, value in found}
    assert tuple(values) == SYSCTLS
    # Above the kernel's own defaults (net/core/sock.c, fs/notify/inotify), which are 212992, at most 1048576, and 128.
    assert all(value >= least for value, least in zip(values.values(), (212993, 212993, 1048576, 129)))


def test_a_machine_without_an_accelerator_reads_the_same_specs(home: Path, installed: Path) -> None:
    """The shipped shares are of system RAM there, and the embeddings server asks for a tenth of it."""
    settings = loaded(home, "embeddings")
    start = command.build(settings, "embeddings", ("org/model",))
    wanted = command.wanted(start, settings, Machine((MemoryPool("ram", RAM, 64 << 30),)), {})
    assert [(hold.pool, hold.share) for hold in wanted.holds] == [("ram", parse_share("0.10"))]
