"""What is announced: only what is ready, only of the newest generation, and nothing of a node that is being drained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from sparkguard.cluster.transition import discovery, state
from sparkguard.cluster.transition.discovery import Endpoint, Worker
from sparkguard.cluster.transition.state import Controller, Placed
from sparkguard.errors import TEMPFAIL, SparkguardError

MANIFEST = "a" * 64
ONE, TWO = Worker("w-1", "http://a:8011", "g1", MANIFEST, "head"), Worker("w-2", "http://b:8011", "g1", MANIFEST, "worker")
# The contract with Artist Twin.
YUE_SCHEMA = {
    "type": "object",
    "required": ["version", "mode", "generation", "workers"],
    "additionalProperties": False,
    "properties": {
        "version": {"const": 1},
        "mode": {"enum": ["yue", "unavailable"]},
        "generation": {"type": "string"},
        "workers": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["id", "url", "generation", "runtime_manifest"],
                "additionalProperties": False,
                "properties": {"id": {}, "url": {}, "generation": {}, "runtime_manifest": {"pattern": "^[0-9a-f]{64}$"}},
            },
        },
    },
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    placed = Placed(generation="g1")
    state.save(tmp_path, Controller((("head", placed), ("worker", placed))))
    return tmp_path


def yue(folder: Path) -> Any:
    value = json.loads((folder / discovery.YUE_FILE).read_text())
    jsonschema.validate(value, YUE_SCHEMA)
    return value


def test_workers_are_published_by_their_own_ids(folder: Path) -> None:
    """yue-workers.json has exactly the keys of its contract."""
    discovery.publish_workers(folder, (ONE, TWO))
    assert yue(folder)["mode"] == "yue"
    assert yue(folder)["generation"] == "g1"
    assert yue(folder)["workers"][0] == {"id": "w-1", "url": "http://a:8011", "generation": "g1", "runtime_manifest": MANIFEST}


def test_a_revoked_file_has_no_workers(folder: Path) -> None:
    """Revoking both nodes leaves mode unavailable and an empty list."""
    discovery.publish_workers(folder, (ONE, TWO))
    discovery.revoke(folder, ("head", "worker"))
    assert yue(folder) == {"version": 1, "mode": "unavailable", "generation": "", "workers": []}


def test_a_solo_change_leaves_the_other_worker_announced(folder: Path) -> None:
    """Revoking one node keeps what the other one serves."""
    discovery.publish_workers(folder, (ONE, TWO))
    discovery.publish_endpoint(folder, Endpoint("a", "a", "http://a:8000", ("head",), "g1"))
    discovery.revoke(folder, ("head",))
    assert [worker["id"] for worker in yue(folder)["workers"]] == ["w-2"]
    assert discovery.served(folder) == []


def test_a_stale_generation_publishes_nothing(folder: Path) -> None:
    """A transition that a newer one has overtaken is refused (75), and the file stays as it is."""
    discovery.publish_workers(folder, (ONE,))
    before = (folder / discovery.YUE_FILE).read_bytes()
    with pytest.raises(SparkguardError, match="belongs to a newer transition") as caught:
        discovery.publish_workers(folder, (TWO.replace(generation="g0"),))
    assert caught.value.status == TEMPFAIL
    with pytest.raises(SparkguardError, match="belongs to a newer transition"):
        discovery.publish_endpoint(folder, Endpoint("a", "a", "http://a:8000", ("head",), "g0"))
    assert (folder / discovery.YUE_FILE).read_bytes() == before


def test_a_new_endpoint_replaces_those_on_its_nodes(folder: Path) -> None:
    """A distributed model takes the place of both nodes' own."""
    for name, node in (("a", "head"), ("b", "worker")):
        discovery.publish_endpoint(folder, Endpoint(name, name, f"http://{name}:8000", (node,), "g1"))
    assert [endpoint.model for endpoint in discovery.served(folder)] == ["a", "b"]
    discovery.publish_endpoint(folder, Endpoint("ds4", "ds4", "http://a:8000", ("head", "worker"), "g1"))
    assert [endpoint.model for endpoint in discovery.served(folder)] == ["ds4"]


def test_a_damaged_file_announces_nothing(folder: Path) -> None:
    """Whatever stands in the files, revoking makes them whole again."""
    (folder / discovery.YUE_FILE).write_text('{"workers": [1, {"id"')
    (folder / discovery.ENDPOINT_FILE).write_text('{"endpoints": [{"model": "x"}]}')
    discovery.revoke(folder, ("head",))
    assert yue(folder)["workers"] == []
    assert discovery.served(folder) == []
