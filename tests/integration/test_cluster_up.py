"""spark-serve up against real sshd and real processes: what it starts, what it refuses, and what it leaves alone."""

from __future__ import annotations

import json
import threading
import urllib.request
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from cluster_laptop import IMAGE, MODELS, Laptop
from cluster_rig import Rig, RigNode

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"


@pytest.fixture
def laptop(rig: Rig, tmp_path: Path) -> Laptop:
    return Laptop(rig, tmp_path / "laptop")


def valid(schema: str, *values: Any) -> None:
    known = json.loads((SCHEMAS / f"{schema}.json").read_text())
    for value in values:
        jsonschema.validate(value, known)


def containers(node: RigNode) -> dict[str, str]:
    """Name -> id of all containers of a node, running or not."""
    ids = node.docker("ps", "--all", "--quiet", "--no-trunc").split()
    told = json.loads(node.docker("inspect", *ids)) if ids else []
    return {one["Name"].lstrip("/"): one["Id"] for one in told}


def foreign(node: RigNode, name: str, *words: str, port: int = 9000) -> str:
    """Somebody else's container on the GPU."""
    return node.docker("run", "--detach", "--name", name, "--gpus", "all", *words, IMAGE, "serve", "x", "--port", str(port))


def served(laptop: Laptop, url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
        return str(json.load(answer)["data"][0]["id"])


def test_up_and_stop(rig: Rig, laptop: Laptop) -> None:
    """A distributed model starts on both nodes, serves, is announced with its generation, and is gone after stop."""
    events = laptop.events("up", "ds4", "--no-hermes")
    valid("events", *events)
    names = [event["event"] for event in events]
    assert names.index("worker_start") < names.index("head_start") < names.index("ready")
    ready = events[-1]
    assert (ready["event"], ready["served"], ready["unchanged"], ready["slow_fabric"]) == ("ready", "ds4", False, False)
    assert served(laptop, ready["url"]) == "ds4"
    status = laptop.status()
    valid("status", status)
    assert [(node["state"], node["phase"], node["model"], node["served"], node["can_use"]) for node in status["nodes"]] == [
        ("running", "ready", "ds4", "ds4", True)
    ] * 2
    assert (status["mode"], status["phase"], status["active_node"], status["transition_error"]) == (
        "distributed",
        "ready",
        "head",
        None,
    )
    endpoint = json.loads((laptop.state / "endpoint.json").read_text())["endpoints"][0]
    assert (endpoint["served"], endpoint["generation"]) == ("ds4", status["nodes"][0]["generation"])

    events = laptop.events("stop")
    valid("events", *events)
    assert events[-1]["event"] == "stopped"
    assert [containers(node) for node in rig] == [{}, {}]
    status = laptop.status()
    valid("status", status)
    assert [(node["state"], node["phase"], node["can_use"]) for node in status["nodes"]] == [("gone", "stopped", False)] * 2
    assert json.loads((laptop.state / "endpoint.json").read_text())["endpoints"] == []


def test_a_dry_run_changes_nothing(rig: Rig, laptop: Laptop) -> None:
    """--dry-run prints the steps, takes no lock, and asks docker for nothing but what it has."""
    done = laptop.run("up", "ds4", "--dry-run")
    assert done.returncode == 0
    assert "worker: start vllm_ds4 (rank 1)" in done.stdout
    plan = laptop.events("up", "ds4", "--dry-run")
    valid("events", *plan)
    assert plan[-1]["steps"][-1]["kind"] == "state"
    asked = {call[0] for node in rig for call in node.calls()}
    assert asked <= {"ps", "inspect", "image"}
    assert not (laptop.state / "controller.json").exists()


def test_up_again_touches_nothing(rig: Rig, laptop: Laptop) -> None:
    """What runs as wanted keeps its containers, and a second laptop finds it so too."""
    laptop.events("up", "ds4", "--no-hermes")
    before = [containers(node) for node in rig]
    assert laptop.events("up", "ds4", "--no-hermes")[-1]["unchanged"] is True
    other = Laptop(rig, laptop.folder / "other")
    assert other.events("up", "ds4", "--no-hermes")[-1]["unchanged"] is True
    assert [containers(node) for node in rig] == before
    assert json.loads((other.state / "endpoint.json").read_text())["endpoints"][0]["served"] == "ds4"


def test_up_of_what_runs_and_is_stuck_stops_nothing(rig: Rig, laptop: Laptop) -> None:
    """A model that runs as wanted and gives no token is told as not ready (1) and announced no more; its containers stay."""
    laptop.catalog.write_text(laptop.catalog.read_text().replace("ready_timeout = 60", "ready_timeout = 10"))
    laptop.events("up", "small", "--node", "head", "--no-hermes")
    before = containers(rig.node("head"))
    rig.node("head").behave("vllm_small", error_body="EngineDeadError")
    failed = laptop.events("up", "small", "--node", "head", "--no-hermes", status=1)[-1]
    assert "EngineDeadError" in failed["text"]
    assert containers(rig.node("head")) == before
    assert json.loads((laptop.state / "endpoint.json").read_text())["endpoints"] == []
    rig.node("head").behave("vllm_small")
    assert laptop.events("up", "small", "--node", "head", "--no-hermes")[-1]["unchanged"] is True
    assert laptop.node("head")["phase"] == "ready"


def test_models_of_one_node_are_independent(rig: Rig, laptop: Laptop) -> None:
    """A swap on the head leaves what the worker serves alone, also when the worker cannot be reached at all."""
    laptop.events("up", "small", "--node", "head", "--no-hermes")
    laptop.events("up", "small", "--node", "worker", "--no-hermes")
    on_worker = containers(rig.node("worker"))
    laptop.events("up", "other", "--node", "head", "--no-hermes")
    assert list(containers(rig.node("head"))) == ["vllm_other"]
    rig.node("worker").power_off()
    laptop.events("up", "small", "--node", "head", "--no-hermes")
    assert list(containers(rig.node("head"))) == ["vllm_small"]
    served_by = {end["nodes"][0]: end["served"] for end in json.loads((laptop.state / "endpoint.json").read_text())["endpoints"]}
    assert served_by == {"head": "small", "worker": "small"}
    assert on_worker


def test_a_distributed_model_is_not_split(rig: Rig, laptop: Laptop) -> None:
    """Neither a solo start nor a stop of one node touches half of it (75)."""
    laptop.events("up", "ds4", "--no-hermes")
    before = [containers(node) for node in rig]
    for words in (("up", "small", "--node", "head"), ("stop", "--node", "worker")):
        refused = laptop.events(*words, status=75)[-1]
        assert (refused["event"], refused["code"]) == ("refused", "scope")
    assert [containers(node) for node in rig] == before
    assert laptop.node("head")["can_use"] is True


def unready(rig: Rig, what: str) -> None:
    worker = rig.node("worker")
    if what == "interface":
        worker.run("ip", "link", "set", "enp1s0f1np1", "down")
    elif what == "device":
        worker.set_hca("rocep1s0f1", "1: DOWN")
    elif what == "image":
        worker.set_images({})
    elif what == "other image":
        worker.set_images({IMAGE: "sha256:" + "9" * 64})
    elif what == "path":
        (worker.folder / "home/hub/models--org--ds4").rmdir()
    elif what == "memory":
        worker.set_meminfo(total_gib=121, available_gib=60)


PREFLIGHT = {
    "interface": (78, "preflight", "worker: the network interface enp1s0f1np1 is down"),
    "device": (78, "preflight", "worker: the RoCE device rocep1s0f1 is down"),
    "image": (78, "preflight", f"worker: the image {IMAGE} is not there"),
    "other image": (78, "image_differs", "worker: vllm/vllm-openai:v0.30.0 is sha256:9999"),
    "path": (78, "preflight", "worker: /root/hub/models--org--ds4 is not there"),
    "memory": (75, "memory", "worker: refused: ds4 on worker wants"),
}


def test_what_cannot_start_stops_nothing(rig: Rig, laptop: Laptop) -> None:
    """Faults 27, 29, 30: each is named with its node before any drain, and the model that serves goes on serving."""
    laptop.events("up", "small", "--node", "head", "--no-hermes")
    before = containers(rig.node("head"))
    for what, (status, code, words) in PREFLIGHT.items():
        unready(rig, what)
        refused = laptop.events("up", "ds4", "--no-hermes", status=status)
        valid("events", *refused)
        assert (refused[-1]["event"], refused[-1]["code"]) == ("refused", code), what
        assert words in refused[-1]["text"], what
        assert containers(rig.node("head")) == before
        rig.node("worker").run("ip", "link", "set", "enp1s0f1np1", "up")
        rig.node("worker").set_hca("rocep1s0f1", "4: ACTIVE")
        rig.node("worker").set_images({IMAGE: None})
        rig.node("worker").set_meminfo(total_gib=121, available_gib=110)
        (rig.node("worker").folder / "home/hub/models--org--ds4").mkdir(exist_ok=True)
    head = laptop.node("head")
    assert (head["can_use"], head["phase"], head["error"]) == (True, "ready", None)


def test_foreign_work_is_named_and_left_alone(rig: Rig, laptop: Laptop) -> None:
    """Faults 10 and 11: a foreign container on the GPU, on the port or under the name blocks with who it is, and lives on."""
    head = rig.node("head")
    identity = foreign(head, "comfy")
    refused = laptop.events("up", "ds4", status=75)[-1]
    assert refused["code"] == "foreign" and f"head: foreign container comfy ({identity[:12]})" in refused["text"]
    assert list(containers(head).values()) == [identity]
    head.docker("rm", "--force", identity)

    taken = head.docker("create", "--name", "vllm_ds4", IMAGE, "serve", "x")
    refused = laptop.events("up", "ds4", status=75)[-1]
    assert f"head: the name vllm_ds4 is taken by {taken[:12]} (created)" in refused["text"]
    assert list(containers(head).values()) == [taken]
    head.docker("rm", "--force", taken)

    listener = head.docker("run", "--detach", "--name", "web", IMAGE, "serve", "x", "--port", "8000")
    head.run("sh", "-c", "until ss -ltn | grep -q :8000; do :; done")
    refused = laptop.events("up", "ds4", status=75)[-1]
    assert "head: port 8000 is taken by python3, pid" in refused["text"]
    assert list(containers(head).values()) == [listener]


def test_a_foreign_process_on_the_gpu_is_named(rig: Rig, laptop: Laptop) -> None:
    """Fault 10: a host process that computes blocks with its pid; when nobody can tell who computes, that blocks too."""
    head = rig.node("head")
    head.write("gpu.json", [[1, "/usr/bin/blender", 900]])
    refused = laptop.events("up", "small", "--node", "head", status=75)[-1]
    assert refused["code"] == "foreign"
    assert "head: foreign process /usr/bin/blender, pid 1, computes on the GPU" in refused["text"]
    head.write("gpu.json", [["x", "?", "?"]])
    refused = laptop.events("up", "small", "--node", "head", status=69)[-1]
    assert refused["code"] == "unknown" and "head: its GPU cannot be asked" in refused["text"]
    assert containers(head) == {}


def test_kept_containers_stay_and_stop_names_go(rig: Rig, laptop: Laptop) -> None:
    """stop_names are stopped although no receipt names them; what keep_containers has stays, also when stop_names has it too."""
    head = rig.node("head")
    kept = foreign(head, "embeddings", port=9001)
    foreign(head, "old-vllm", port=9002)
    laptop.events("stop")
    assert containers(head) == {"embeddings": kept}


def test_running_requests_are_answered_before_the_stop(rig: Rig, laptop: Laptop) -> None:
    """A request that is under way when another model comes is answered whole: the engine's count is waited for."""
    laptop.events("up", "small", "--node", "head", "--no-hermes")
    url = laptop.node("head")["url"]
    rig.node("head").behave("vllm_small", token_seconds=0.1)
    answers: list[Any] = []
    body = json.dumps({"model": "small", "messages": [], "max_tokens": 20}).encode()

    def ask() -> None:
        request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            answers.append(json.load(answer)["usage"]["completion_tokens"])

    asking = threading.Thread(target=ask)
    asking.start()
    while "running{" not in metrics(url) or "num_requests_running" not in metrics(url) or not running(url):
        pass
    events = laptop.events("up", "other", "--node", "head", "--no-hermes")
    asking.join()
    assert answers == [20]
    assert any(event.get("requests") == 1 for event in events if event["event"] == "drain")


def metrics(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def running(url: str) -> bool:
    return any(line.startswith("vllm:num_requests_running") and line.endswith(" 1") for line in metrics(url).splitlines())


def test_sockets_in_place_of_rdma_are_told(rig: Rig, laptop: Laptop) -> None:
    """Fault 28: a start whose ranks chose NET/Socket succeeds, and says that it is slow."""
    for node in rig:
        node.behave("vllm_ds4", log="ds4:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0")
    ready = laptop.events("up", "ds4", "--no-hermes")[-1]
    assert (ready["fabric"], ready["slow_fabric"]) == ("socket", True)
    assert "sockets, not RDMA" in ready["text"]
    status = laptop.status()
    valid("status", status)
    assert [node["slow_fabric"] for node in status["nodes"]] == [True, True]
    assert "over sockets, which is slow" in laptop.run("status").stdout


def test_the_recipes_own_check_comes_before_the_drain(rig: Rig, tmp_path: Path) -> None:
    """A recipe whose check says no leaves what runs alone (78)."""
    models = (
        MODELS
        + f'[models.checked]\nlabel = "C"\nimage = "{IMAGE}"\nwrapper = "vllm"\nserved_name = "checked"\nhf_id = "org/small"\n'
    )
    models += 'nnodes = 1\ncontainer = "vllm_checked"\npreflight_args = ["/bin/sh", "-c", "echo no such kernel; exit 3"]\n'
    models += '[models.checked.vllm]\nargs = ["--gpu-memory-utilization", "0.5"]\n'
    laptop = Laptop(rig, tmp_path / "laptop", models)
    laptop.events("up", "small", "--node", "head", "--no-hermes")
    before = containers(rig.node("head"))
    refused = laptop.events("up", "checked", "--node", "head", "--no-hermes", status=78)[-1]
    assert "head: the recipe's own check says no" in refused["text"]
    assert containers(rig.node("head")) == before
    assert laptop.node("head")["can_use"] is True


def test_secrets_reach_the_container_and_nothing_else(rig: Rig, tmp_path: Path) -> None:
    """A value of the laptop's environment is passed by name; it stands in no command line, no state, no event and no plan."""
    secret = "nvapi-very-secret"
    models = MODELS.replace('container = "vllm_small"', 'container = "vllm_small"\nsecrets = ["NGC_API_KEY"]')
    laptop = Laptop(rig, tmp_path / "laptop", models)
    missing = laptop.events("up", "small", "--node", "head", status=78)[-1]
    assert "NGC_API_KEY" in missing["text"]
    laptop.env["NGC_API_KEY"] = secret
    events = laptop.events("up", "small", "--node", "head", "--no-hermes")
    told = json.dumps([events, rig.node("head").calls(), laptop.record(), laptop.run("up", "small", "--print-cmd").stdout])
    kept = [*laptop.state.rglob("*.json"), *rig.node("head").state_dir.rglob("*.json")]
    assert secret not in told + "".join(path.read_text() for path in kept)


def test_the_client_is_pointed_at_it_when_it_is_ready(rig: Rig, tmp_path: Path) -> None:
    """Hermes' file on this machine gets the endpoint; one that is not there is told (1), and the model is ready all the same."""
    models = MODELS.replace('served_name = "small"', 'served_name = "small"\nhermes_provider = "spark"')
    laptop = Laptop(rig, tmp_path / "laptop", models)
    events = laptop.events("up", "small", "--node", "head", status=1)
    valid("events", *events)
    assert [(event["event"], event.get("ok")) for event in events[-2:]] == [("hermes", False), ("ready", None)]
    assert laptop.node("head")["can_use"] is True
    config = laptop.folder / ".hermes/config.yaml"
    config.parent.mkdir()
    config.write_text("model:\n  default: other\n  provider: openai\n# mine\n")
    config.chmod(0o600)
    assert laptop.events("up", "small", "--node", "head")[-1]["unchanged"] is True
    text = config.read_text()
    assert "default: small" in text and f"{laptop.node('head')['url']}/v1" in text and "# mine" in text
    assert config.stat().st_mode & 0o777 == 0o600


def test_what_is_wrong_with_the_catalog_is_an_event_too(laptop: Laptop) -> None:
    """A program that reads only stdout learns why: an unknown model (2), a fault of the catalog (78)."""
    failed = laptop.events("up", "smal", status=2)
    valid("events", *failed)
    assert "no model 'smal'" in failed[-1]["text"] and "small" in failed[-1]["text"]
    laptop.catalog.write_text(laptop.catalog.read_text().replace("keep_containers", "keep_container"))
    failed = laptop.events("stop", status=78)
    valid("events", *failed)
    assert "keep_container" in failed[-1]["text"]


def test_without_waiting(rig: Rig, laptop: Laptop) -> None:
    """--no-wait ends with the start and announces nothing; wait ends when a token came, and announces."""
    for node in rig:
        node.behave("vllm_ds4", ready=False)
    assert laptop.events("up", "ds4", "--no-hermes", "--no-wait")[-1]["event"] == "launched"
    head = laptop.node("head")
    assert (head["phase"], head["can_use"], head["state"]) == ("starting", False, "running")
    late = laptop.events("wait", "--timeout", "1", status=1)[-1]
    assert "ds4 is not ready after 1 s" in late["text"]
    for node in rig:
        node.behave("vllm_ds4")
    events = laptop.events("wait")
    valid("events", *events)
    assert events[-1]["event"] == "ready"
    assert laptop.node("worker")["phase"] == "ready"
    assert json.loads((laptop.state / "endpoint.json").read_text())["endpoints"][0]["served"] == "ds4"
