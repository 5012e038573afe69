"""spark-serve use: this machine's clients and the head's Hermes, over real ssh; nothing but the setting is touched."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path

import jsonschema
import pytest
import yaml
from cluster_laptop import MODELS, Laptop
from cluster_rig import Rig

CONFIG = "model:\n  default: old  # mine\n  context_length: 99\nproviders:\n  x: {api_key: sk-secret}\n"
WITH_PROVIDERS = MODELS.replace('label = "Small"', 'label = "Small"\nhermes_provider = "spark"\nhermes_context_length = 4096')
SECRET = "sk-secret"


@pytest.fixture
def laptop(rig: Rig, tmp_path: Path) -> Laptop:
    return Laptop(rig, tmp_path / "laptop", WITH_PROVIDERS)


def hermes(home: Path, text: str = CONFIG, mode: int = 0o600) -> Path:
    path = home / ".hermes" / "config.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def expected(url: str, provider: str) -> dict[str, object]:
    limits = {"context_length": 4096, "supports_vision": False}
    return {
        "model": {"default": "small", "provider": provider},
        "providers": {"x": {"api_key": SECRET}, provider: {"base_url": f"{url}/v1", "models": {"small": limits}}},
    }


def test_this_machines_hermes(rig: Rig, laptop: Laptop) -> None:
    """Default, provider, address and limits are set; mode, comments and keys stay; twice is once."""
    path = hermes(laptop.folder, mode=0o640)
    url = rig.nodes()[1].lan_url
    done = laptop.run("use", "small", "--node", "worker")
    assert done.returncode == 0, done.stderr
    assert "Hermes uses small at" in done.stdout
    assert "small is not ready" in done.stderr
    assert yaml.safe_load(path.read_text()) == expected(url, "spark-worker")
    assert "# mine" in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    before = path.stat()
    assert "already uses" in laptop.run("use", "small", "--node", "worker", "--hermes-target", "mac").stdout
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert [entry.name for entry in path.parent.iterdir()] == ["config.yaml"]


def test_the_heads_hermes(rig: Rig, laptop: Laptop) -> None:
    """Over ssh, whichever node serves; this machine's stays."""
    mine = hermes(laptop.folder)
    path = hermes(rig.node("head").folder / "home")
    done = laptop.run("use", "small", "--node", "worker", "--hermes-target", "spark")
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(path.read_text()) == expected(rig.nodes()[1].lan_url, "spark-worker")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert mine.read_text() == CONFIG
    assert SECRET not in done.stdout + done.stderr


@pytest.mark.parametrize("target", ["local", "spark"])
@pytest.mark.parametrize("text", [None, "key: sk-secret: x\n", "a: &x {b: sk-secret}\nmodel: *x\n", "", "\udcff"])
def test_a_file_that_is_missing_or_malformed_is_left_alone(rig: Rig, laptop: Laptop, target: str, text: str | None) -> None:
    """With a message that says which, and shows nothing of what is in it."""
    home = laptop.folder if target == "local" else rig.node("head").folder / "home"
    path = hermes(home)
    if text is None:
        path.unlink()
    else:
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
    done = laptop.run("use", "small", "--node", "head", "--hermes-target", target)
    assert done.returncode == 78, done.stderr
    assert "config.yaml" in done.stderr
    assert SECRET not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    if text is None:
        assert not path.exists()
    else:
        assert path.read_bytes() == text.encode("utf-8", "surrogateescape")


def test_what_runs_now(rig: Rig, laptop: Laptop) -> None:
    """Without a name the model that is placed on the nodes; with none, that is said."""
    hermes(laptop.folder)
    done = laptop.run("use")
    assert (done.returncode, "no model is placed" in done.stderr) == (2, True)
    (event,) = laptop.events("use", status=2)
    assert (event["event"], event["ok"]) == ("hermes", False)
    laptop.events("up", "small", "--node", "worker", "--no-hermes")
    done = laptop.run("use")
    assert (done.returncode, done.stderr.count("not ready")) == (0, 0), done.stderr
    assert "spark-worker" in (laptop.folder / ".hermes/config.yaml").read_text()
    (event,) = laptop.events("use", "--hermes-target", "mac", "--node", "worker")
    jsonschema.validate(event, json.loads((Path(__file__).parents[2] / "docs/schemas/events.json").read_text()))
    assert event["ok"] is True


def test_up_points_hermes_at_it(rig: Rig, laptop: Laptop) -> None:
    """After it is ready; a client that is not there is a warning, and the model is ready all the same."""
    events = [json.loads(line) for line in laptop.run("up", "small", "--node", "head", "--json").stdout.splitlines()]
    told = next(event for event in events if event["event"] == "hermes")
    assert told["ok"] is False
    assert events[-1]["event"] == "ready"
    path = hermes(laptop.folder)
    events = laptop.events("up", "small", "--node", "worker")
    assert next(event for event in events if event["event"] == "hermes")["ok"] is True
    assert yaml.safe_load(path.read_text())["model"]["default"] == "small"


def test_the_catalogs_clients(rig: Rig, laptop: Laptop) -> None:
    """Two kinds at once; one that fails does not keep the other, and is told."""
    with open(laptop.catalog, "a") as file:
        file.write('\n[clients.tools]\nkind = "env"\npath = "~/tools/.env"\n[clients.h]\nkind = "hermes"\n')
    (laptop.folder / "tools").mkdir()
    done = laptop.run("use", "small", "--node", "head")
    assert done.returncode == 78
    assert "Hermes was left as it is" in done.stderr
    env = laptop.folder / "tools/.env"
    assert env.read_text() == f"OPENAI_BASE_URL={rig.nodes()[0].lan_url}/v1\nOPENAI_MODEL=small\n"
    assert stat.S_IMODE(env.stat().st_mode) == 0o600
    hermes(laptop.folder)
    assert laptop.run("use", "small", "--node", "head").returncode == 0


def test_a_link_stays_a_link(rig: Rig, laptop: Laptop) -> None:
    """Who keeps settings in a repository of their own still does."""
    real = laptop.folder / "dotfiles.yaml"
    real.write_text(CONFIG)
    link = laptop.folder / ".hermes/config.yaml"
    link.parent.mkdir()
    link.symlink_to(real)
    assert laptop.run("use", "small", "--node", "head").returncode == 0
    assert link.is_symlink()
    assert "default: small" in real.read_text()


def test_readers_never_see_half_a_file(rig: Rig, laptop: Laptop) -> None:
    """While it is written again and again, every reader finds the old one or the new one."""
    path = hermes(laptop.folder, CONFIG + "".join(f"k{i}: {'x' * 500}\n" for i in range(200)))
    ended = threading.Event()
    seen: set[str] = set()

    def read() -> None:
        while not ended.is_set():
            seen.add(os.fspath(yaml.safe_load(path.read_text().split("k0:")[0])["model"]["default"]))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for node in ("head", "worker"):
            assert laptop.run("use", "small", "--node", node).returncode == 0
    finally:
        ended.set()
        reader.join()
    assert seen <= {"old", "small"}


def test_a_model_without_a_name_for_clients(laptop: Laptop) -> None:
    """The catalog's key for it is named."""
    done = laptop.run("use", "other", "--node", "head")
    assert done.returncode == 78
    assert "hermes_provider" in done.stderr
