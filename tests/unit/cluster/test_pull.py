"""What a node is asked to prepare, and how its events are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkguard.cluster import pull
from sparkguard.cluster.catalog import read as catalog
from sparkguard.cluster.catalog import recipes
from sparkguard.cluster.pull import Outcome

REPOSITORY = Path(__file__).parents[3]
EXAMPLE = catalog.load(REPOSITORY / "models.example.toml", example=True)
HEAD, WORKER = EXAMPLE.nodes


@pytest.mark.parametrize("model", EXAMPLE.models, ids=lambda model: model.name)
def test_what_up_asks_for_is_what_pull_brings(model: catalog.Model) -> None:
    """Each path that `up` wants on a node is a checkpoint's folder, its marker, a folder that is made, or the Hub's own."""
    order = pull.order(EXAMPLE, model, HEAD, {})
    brought = {f"{order['cache']}/{each['folder'] or each['hub_folder']}" for each in order["checkpoints"]}
    brought |= {f"{order['cache']}/{each['marker']}" for each in order["checkpoints"]} | set(order["folders"])
    rank = recipes.allocation(EXAMPLE, model, EXAMPLE.nodes).ranks[0]
    assert set(rank.paths) <= brought
    assert order["image"]["reference"] == rank.image


def test_a_gguf_is_a_file() -> None:
    """What a llama.cpp entry serves is a file below the cache: pull makes no folder of its name."""
    llama = EXAMPLE.model("ds4").replace(
        wrapper="llamacpp", nodes_needed=1, file="g/m.gguf", hf_id="", checkpoints=(), build=None, tensor_parallel=1
    )
    assert pull.order(EXAMPLE, llama, HEAD, {})["folders"] == [EXAMPLE.cache("head")]


def test_the_same_wish_has_the_same_key() -> None:
    """A second laptop finds the job of the first, with or without --verify or a share; another endpoint is another wish."""
    model = EXAMPLE.model("ds41")
    first = pull.order(EXAMPLE, model, HEAD, {"HF_TOKEN": "secret"})
    again = pull.order(EXAMPLE, model, HEAD, {}, verify=True, others=["worker"])
    assert first["key"] == again["key"] and again["share"]["address"] == HEAD.fabric_addr
    assert "secret" not in repr(first)
    assert pull.order(EXAMPLE, model, HEAD, {"HF_ENDPOINT": "https://mirror.example"})["key"] != first["key"]
    assert pull.order(EXAMPLE, model, WORKER, {})["key"] != first["key"]


def test_a_build_travels_whole() -> None:
    """A derived image's order has its Dockerfile and start program; a publisher's has only where his is."""
    own = pull.order(EXAMPLE, EXAMPLE.model("glm53-exl3"), HEAD, {})["image"]["build"]
    assert own["text"].startswith(f"FROM {own['base']}\n") and own["start"].endswith('exec vllm serve "$@"\n')
    assert own["start"].count("python3 /opt/glm53/patch_") == 24 and len(own["files"]) == 27
    theirs = pull.order(EXAMPLE, EXAMPLE.model("glm53"), HEAD, {})["image"]
    assert theirs["build"]["dockerfile"]["sha256"].startswith("561ff514") and not theirs["build"]["text"]
    assert theirs["reference"].startswith("sha256:16121446")


def test_different_images_are_found() -> None:
    """Nodes that ended well with different images are told by both ids; one that failed is another matter."""
    same = (Outcome("head", "pull_done", "sha256:1"), Outcome("worker", "pull_done", "sha256:1"))
    assert pull.different_images(same) is None
    assert pull.different_images((same[0], Outcome("worker", "pull_failed"))) is None
    assert pull.different_images((same[0], Outcome("worker", "pull_done", "sha256:2"))) == (
        "the nodes have different images: head sha256:1, worker sha256:2"
    )


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (
            {"event": "pull_plan", "files": 3, "total_bytes": 5 << 30, "missing_bytes": 1 << 20},
            "3 files, 5.0 GiB; 1.0 MiB to fetch",
        ),
        ({"event": "pull_plan", "files": 0, "total_bytes": 0, "missing_bytes": 0}, "no files to fetch"),
        (
            {"event": "pull_progress", "done_bytes": 1 << 30, "total_bytes": 4 << 30, "bytes_s": 100_000_000},
            "25 % of 4.0 GiB, 100 MB/s, 32 s left",
        ),
        ({"event": "pull_progress", "done_bytes": 1 << 30, "total_bytes": 4 << 30, "bytes_s": 0}, "25 % of 4.0 GiB, 0 MB/s"),
        (
            {"event": "pull_progress", "done_bytes": 0, "total_bytes": 385 << 30, "bytes_s": 50_000_000},
            "0 % of 385.0 GiB, 50 MB/s, 2 h 17 min left",
        ),
        ({"event": "pull_retry", "what": "a", "reason": "status 503", "in_s": 4.0}, "a: status 503; again in 4 s"),
        ({"event": "pull_failed", "message": "x is full"}, "x is full"),
        ({"event": "pull_start"}, "pull start"),
    ],
)
def test_an_event_in_words(event: dict[str, object], text: str) -> None:
    """People are told how much, how fast and how long."""
    assert pull.words(event) == text
