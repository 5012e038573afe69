"""Preparing a model on a node: the programs that run there, against a publisher whose connections break."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hub import COMMIT, Hub

from sparkguard.cluster import pull as pulling
from sparkguard.cluster.catalog.read import Catalog, parse
from sparkguard.cluster.node import pull_image
from sparkguard.cluster.program import BOOT, MARKER, payload

REPOSITORY = Path(__file__).parents[2]
REPO = "org/model"
BIG = bytes(range(256)) * 12_000  # 3 MiB
FAKE_DOCKER = REPOSITORY / "tests" / "cluster_rig"


SAVES_AND_LOADS = """\
#!/usr/bin/python3 -IS
import json, os, sys
here = os.path.dirname(os.path.realpath(__file__))
images = here + "/../docker/images.json"
if sys.argv[1] == "save":
    print(json.dumps([sys.argv[2], json.load(open(images))[sys.argv[2]]]))
elif sys.argv[1] == "load":
    name, image = json.load(sys.stdin)
    json.dump({**json.load(open(images)), name: image}, open(images, "w"))
else:
    os.execv(here + "/fake", ["docker", *sys.argv[1:]])
"""


class Place:
    """One node: its home, its docker, and the programs that the laptop would send to it."""

    def __init__(self, folder: Path, hub: Hub) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        self.state = folder / "state"
        self.hub = hub
        (folder / "docker").mkdir(parents=True)
        (folder / "bin").mkdir()
        # The rig's docker keeps its state beside the folder in which it lies; save and load are all that it lacks.
        shutil.copy(FAKE_DOCKER / "bin" / "docker", folder / "bin" / "fake")
        (folder / "bin" / "docker").write_text(SAVES_AND_LOADS)
        (folder / "bin" / "docker").chmod(0o755)
        (folder / "docker" / "images.json").write_text(json.dumps({"image:1": {"id": "sha256:" + "1" * 64}}))

    def start_program(self, request: dict[str, Any], secret: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        env = {
            "PATH": f"{self.folder}/bin:/usr/bin:/bin",
            "HOME": str(self.folder),
            "SPARK_SERVE_STATE_DIR": str(self.state),
        }
        child = subprocess.Popen(["/bin/sh", "-c", BOOT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        assert child.stdin is not None
        child.stdin.write(payload("pull", request, None, None, json.dumps(secret or {}).encode()))
        child.stdin.flush()
        return child

    def ask(self, request: dict[str, Any], secret: dict[str, str] | None = None) -> list[dict[str, Any]]:
        """All replies, or the error as the last one."""
        with self.start_program(request, secret) as child:
            assert child.stdout is not None
            lines = [json.loads(line) for line in child.stdout.read().split(MARKER, 1)[1].splitlines()]
        return [line.get("reply") or line["error"] for line in lines if "end" not in line]

    def order(self, catalog: Catalog | None = None, **changes: Any) -> dict[str, Any]:
        found = catalog or catalog_of(self.cache)
        env = {"HF_ENDPOINT": self.hub.url}
        order = pulling.order(found, found.model("x"), found.head, env)
        return {**order, "retry_seconds": 0.01, "reserve_bytes": 0, "ngc_endpoint": self.hub.url, **changes}

    def start(self, secret: dict[str, str] | None = None, **changes: Any) -> dict[str, Any]:
        return self.ask({"do": "start", "job": self.order(**changes)}, secret)[-1]

    def follow(self, since: int = 0) -> list[dict[str, Any]]:
        return self.ask({"do": "follow", "since": since, "id": None})

    def pull(self, secret: dict[str, str] | None = None, **changes: Any) -> list[dict[str, Any]]:
        started = self.start(secret, **changes)
        assert started.get("state") == "started", started
        return self.follow()

    def file(self, name: str) -> Path:
        return self.cache / "models" / "x" / name

    def job(self) -> dict[str, Any]:
        return json.loads((self.state / "pull" / "job.json").read_text())

    def ended(self) -> bool:
        return not self.ask({"do": "status"})[-1]["running"]


def catalog_of(cache: Path, more: str = "") -> Catalog:
    text = f"""
[cluster]
head = "a"
worker = "b"
master_addr = "10.9.0.1"
worker_addr = "10.9.0.2"
lan_url = "http://10.0.0.1:8000"
worker_lan_url = "http://10.0.0.2:8000"
hf_cache_host = "{cache}"
[models.x]
image = "image:1"
hf_id = "{REPO}"
hf_mount = "/cache"
serve_path = "/cache/models/x"
nnodes = 2
[[models.x.checkpoints]]
repo = "{REPO}"
revision = "{COMMIT}"
folder = "models/x"
{more}
"""
    return parse(text, "models.toml")


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        hub.files[REPO] = {"config.json": b'{"a": 1}', "model-1.safetensors": BIG, "sub/tokenizer.json": b"{}" * 100}
        yield hub


@pytest.fixture
def place(tmp_path: Path, hub: Hub) -> Iterator[Place]:
    place = Place(tmp_path / "node", hub)
    yield place
    hub.go.set()
    place.ask({"do": "cancel"})


def until(true: Callable[[], Any], seconds: float = 20) -> None:
    """Asks until it is so: what happens in another process cannot be waited for otherwise."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen"


def events(told: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in told if event.get("event") == kind]


def test_a_model_is_prepared(place: Place) -> None:
    """Each file lies in its place with the publisher's hash, and the marker that `up` looks for is written last."""
    told = place.pull()
    assert told[0]["event"] == "pull_start" and told[-1]["event"] == "pull_done"
    assert told[-1]["image"] == "sha256:" + "1" * 64
    assert place.file("model-1.safetensors").read_bytes() == BIG
    assert place.file("sub/tokenizer.json").read_bytes() == b"{}" * 100
    marker = place.cache / place.order()["checkpoints"][0]["marker"]
    assert json.loads(marker.read_text())["files"] == 3
    assert events(told, "pull_plan")[0]["missing_bytes"] == len(BIG) + 208
    assert [event["seq"] for event in told] == list(range(1, len(told) + 1))


def test_a_second_pull_reads_nothing_again(place: Place, hub: Hub) -> None:
    """What was verified and has not changed is not read, and the publisher is not asked: a pinned listing cannot change."""
    place.pull()
    hub.log.clear()
    told = place.pull()
    assert told[-1]["event"] == "pull_done" and hub.log == []


def test_a_file_that_was_changed_is_fetched_anew(place: Place, hub: Hub) -> None:
    """A file of the right size with another content is found by its hash and replaced."""
    place.pull()
    place.file("model-1.safetensors").write_bytes(b"x" * len(BIG))
    told = place.pull()
    assert events(told, "pull_wrong") and place.file("model-1.safetensors").read_bytes() == BIG


def test_connections_that_break_are_resumed(place: Place, hub: Hub) -> None:
    """A download goes on at the byte at which it broke, as often as it breaks, while each attempt brings something."""
    hub.cuts["model-1.safetensors"] = [100_000] * 12
    told = place.pull()
    assert told[-1]["event"] == "pull_done" and place.file("model-1.safetensors").read_bytes() == BIG
    ranges = hub.fetched("model-1.safetensors")
    assert ranges[0] == "" and len(ranges) == 13
    assert [int(span[6:-1]) for span in ranges[1:]] == sorted({int(span[6:-1]) for span in ranges[1:]})


def test_a_server_without_ranges_begins_again(place: Place, hub: Hub) -> None:
    """Where a server sends the whole in answer to a range, nothing is appended twice."""
    hub.ranges = False
    hub.cuts["model-1.safetensors"] = [100_000]
    assert place.pull()[-1]["event"] == "pull_done"
    assert place.file("model-1.safetensors").read_bytes() == BIG


def test_a_wrong_file_is_never_put_in_place(place: Place, hub: Hub) -> None:
    """Bytes with another hash are fetched once more, and then the pull fails: no file, no marker."""
    hub.served["model-1.safetensors"] = b"y" * len(BIG)
    told = place.pull()
    assert (told[-1]["event"], told[-1]["code"]) == ("pull_failed", "hash")
    assert len(hub.fetched("model-1.safetensors")) == 2
    assert not place.file("model-1.safetensors").exists() and not (place.cache / "spark-serve" / "verified").exists()


def test_a_wrong_small_file_is_found_by_gits_hash(place: Place, hub: Hub) -> None:
    """The Hub gives no SHA-256 of small files; git's hash of them is checked."""
    hub.served["config.json"] = b'{"a": 2}'
    assert place.pull()[-1]["code"] == "hash"


def test_a_publisher_that_stays_silent_ends_the_pull(place: Place, hub: Hub) -> None:
    """After several attempts in a row that brought nothing the pull fails, and says what the server said."""
    hub.statuses[f"/{REPO}/resolve/{COMMIT}/config.json"] = [503] * 20
    told = place.pull()
    assert (told[-1]["event"], told[-1]["code"], told[-1]["status"]) == ("pull_failed", "network", 69)
    assert "status 503" in told[-1]["message"] and len(events(told, "pull_retry")) == 7


def test_a_refusal_is_not_asked_again(place: Place, hub: Hub) -> None:
    """A gated model fails at once and names what to set."""
    hub.statuses[f"/api/models/{REPO}/tree/{COMMIT}"] = [403]
    told = place.pull()
    assert told[-1]["code"] == "denied" and "HF_TOKEN" in told[-1]["message"]
    assert len(hub.log) == 1


def test_a_token_goes_to_the_publisher_alone(place: Place, hub: Hub) -> None:
    """The token is sent to the Hub and not to where the Hub redirects; it stands in no file of the node."""
    with Hub("127.0.0.1") as other:
        other.files = hub.files
        hub.elsewhere = other
        assert place.pull({"HF_TOKEN": "hf_secret"})[-1]["event"] == "pull_done"
        assert {header for _, _, header in hub.log} == {"Bearer hf_secret"}
        assert {header for _, _, header in other.log} == {""} and len(other.log) == 3
    kept = [path.read_bytes() for path in place.state.rglob("*") if path.is_file()]
    assert kept and not any(b"hf_secret" in data for data in kept)


def test_a_listing_of_many_pages(place: Place, hub: Hub) -> None:
    """All pages of a listing count."""
    hub.page = 1
    assert place.pull()[-1]["event"] == "pull_done"
    assert place.file("sub/tokenizer.json").exists()


@pytest.mark.parametrize("path", ["../evil", "/etc/evil", "a/../../evil", "a\\b", "x.incomplete"])
def test_a_publishers_path_stays_below_the_folder(place: Place, hub: Hub, path: str) -> None:
    """A listing that names a path outside is refused before anything is fetched."""
    hub.files[REPO] = {path: b"x"}
    told = place.pull()
    assert told[-1]["code"] == "source" and not any("/resolve/" in asked for asked, _, _ in hub.log)


def test_ngc_gives_the_hash_of_every_file(place: Place, hub: Hub) -> None:
    """A version on NGC is listed page by page, with SHA-256 in base64, and fetched without a key."""
    hub.page = 2
    more = catalog_of(place.cache)
    order = place.order(more)
    order["checkpoints"][0] |= {"source": "ngc", "revision": "v1", "repo": REPO, "key": "k"}
    assert place.ask({"do": "start", "job": {**order, "key": "other"}})[-1]["state"] == "started"
    assert place.follow()[-1]["event"] == "pull_done"
    assert place.file("model-1.safetensors").read_bytes() == BIG


def test_only_the_wanted_files_come_and_their_index_is_cut(place: Place, hub: Hub) -> None:
    """With patterns only those files come, and the weight index names only the tensors that are in them."""
    weights = {"layer.engram": "model-1.safetensors", "layer.other": "model-2.safetensors"}
    index = json.dumps({"metadata": {"total_size": 7}, "weight_map": weights}).encode()
    hub.files[REPO] |= {"model-2.safetensors": b"z" * 10, "model.safetensors.index.json": index}
    more = 'include = ["model-1.*", "*.index.json"]\nindex_suffixes = [".engram"]\nindex_metadata = { kind = "part" }\n'
    assert place.ask({"do": "start", "job": place.order(catalog_of(place.cache, more))})[-1]["state"] == "started"
    assert place.follow()[-1]["event"] == "pull_done"
    found = json.loads(place.file("model.safetensors.index.json").read_text())
    assert found == {"metadata": {"total_size": 7, "kind": "part"}, "weight_map": {"layer.engram": "model-1.safetensors"}}
    assert not place.file("model-2.safetensors").exists()
    assert place.pull(catalog=catalog_of(place.cache, more))[-1]["event"] == "pull_done"


def test_a_branch_is_resolved_as_the_hubs_library_wants_it(place: Place) -> None:
    """An entry without a pinned revision lies where the Hub's library looks, under the commit that the branch is now."""
    entry = catalog_of(place.cache).model("x")
    plain = entry.replace(serve_path="", checkpoints=(entry.checkpoints[0].replace(revision="main", folder=""),))
    found = catalog_of(place.cache).replace(models=(plain,))
    assert place.pull(catalog=found)[-1]["event"] == "pull_done"
    hub_folder = place.cache / "hub" / "models--org--model"
    assert (hub_folder / "refs" / "main").read_text() == COMMIT
    assert (hub_folder / "snapshots" / COMMIT / "model-1.safetensors").read_bytes() == BIG


def test_the_job_outlives_the_connection_that_began_it(place: Place, hub: Hub) -> None:
    """After kill -9 of what listened, the job goes on, and who comes back hears the rest from where the first one was."""
    hub.holds["model-1.safetensors"] = 1 << 20
    place.start()
    assert hub.holding.wait(20)
    with place.start_program({"do": "follow", "since": 0, "id": None}) as listener:
        assert listener.stdout is not None
        while b"pull_plan" not in listener.stdout.readline():
            pass
        listener.kill()
    assert place.start()["state"] == "attached"
    hub.go.set()
    rest = place.follow(since=2)
    assert rest[0]["seq"] == 3 and rest[-1]["event"] == "pull_done"


def test_one_preparation_at_a_time(place: Place, hub: Hub) -> None:
    """Another model is refused with the name of the one that is being prepared, and nothing of that one is touched."""
    hub.holds["model-1.safetensors"] = 1 << 20
    place.start()
    assert hub.holding.wait(20)
    refused = place.ask({"do": "start", "job": place.order(key="other", model="y")})[-1]
    assert (refused["code"], refused["status"]) == ("busy", 75) and "x is being prepared here" in refused["message"]
    hub.go.set()
    assert place.follow()[-1]["event"] == "pull_done"


def test_a_cancelled_preparation_keeps_what_came(place: Place, hub: Hub) -> None:
    """--cancel ends the job and all of its group; the next pull asks for the rest only."""
    hub.holds["model-1.safetensors"] = 1 << 20
    place.start()
    assert hub.holding.wait(20)
    until(lambda: place.file("model-1.safetensors.incomplete").stat().st_size >= 1 << 20)
    assert place.ask({"do": "cancel"})[-1] | {"id": None, "pid": None} == {
        "cancelled": True, "id": None, "model": "x", "pid": None, "share": None,
    }  # fmt: skip
    assert place.ended() and place.follow()[-1]["event"] == "pull_cancelled"
    hub.go.set()
    hub.log.clear()
    assert place.pull()[-1]["event"] == "pull_done"
    assert hub.fetched("model-1.safetensors") == [f"bytes={1 << 20}-"]


def test_a_killed_job_says_so_and_is_resumed(place: Place, hub: Hub) -> None:
    """After kill -9 of the job its follower is told, no lock is left, and the next pull goes on at the byte."""
    hub.holds["model-1.safetensors"] = 1 << 20
    place.start()
    assert hub.holding.wait(20)
    until(lambda: place.file("model-1.safetensors.incomplete").stat().st_size >= 1 << 20)
    os.killpg(place.job()["pid"], signal.SIGKILL)
    until(place.ended)
    assert place.follow()[-1]["code"] == "killed"
    hub.go.set()
    hub.log.clear()
    assert place.pull()[-1]["event"] == "pull_done"
    assert hub.fetched("model-1.safetensors") == [f"bytes={1 << 20}-"]
    assert place.file("model-1.safetensors").read_bytes() == BIG


@pytest.mark.parametrize("number", range(1, 7))
def test_a_job_may_die_anywhere(place: Place, hub: Hub, number: int) -> None:
    """Killed after whichever of its events, the next pull ends well, and leaves nothing half."""
    hub.cuts["model-1.safetensors"] = [1 << 20, 1 << 20]
    place.start()
    told = place.state / "pull" / "events.jsonl"
    until(lambda: len(told.read_bytes().splitlines()) >= number)
    try:
        os.killpg(place.job()["pid"], signal.SIGKILL)
    except ProcessLookupError:
        assert place.follow()[-1]["event"] == "pull_done"  # it was faster
    until(place.ended)
    assert place.pull()[-1]["event"] == "pull_done"
    assert place.file("model-1.safetensors").read_bytes() == BIG
    assert not list(place.cache.rglob("*.incomplete")) and not list(place.state.rglob("*.new"))


def test_two_laptops_at_the_same_moment_make_one_job(place: Place, hub: Hub) -> None:
    """Of many starts at once one begins the job, and the others join it."""
    hub.holds["model-1.safetensors"] = 1 << 20
    request = {"do": "start", "job": place.order()}
    children = [place.start_program(request) for _ in range(6)]
    states = []
    for child in children:
        with child:
            assert child.stdout is not None
            answer = json.loads(child.stdout.read().split(MARKER, 1)[1].splitlines()[0])
            states.append(answer["reply"]["state"] if "reply" in answer else answer)
    assert sorted(states) == ["attached"] * 5 + ["started"]
    hub.go.set()
    assert place.follow()[-1]["event"] == "pull_done"


def test_a_disk_that_is_too_small_is_told_before_the_first_byte(place: Place, hub: Hub) -> None:
    """The room that would be left is compared with the reserve before anything is fetched."""
    free = os.statvfs(place.folder).f_bavail * os.statvfs(place.folder).f_frsize
    told = place.pull(reserve_bytes=free)
    assert (told[-1]["event"], told[-1]["code"]) == ("pull_failed", "disk")
    assert "disk_reserve_gib" in told[-1]["message"]
    assert not any("/resolve/" in path for path, _, _ in hub.log)


@pytest.mark.skipif(os.getuid() != 0, reason="NOT RUN: a small disk of its own needs root")
def test_a_disk_that_fills_while_it_runs_ends_the_pull_and_keeps_the_floor(place: Place, hub: Hub) -> None:
    """When others fill the disk meanwhile, the pull ends before the last bytes are gone, and goes on when there is room."""
    libc = ctypes.CDLL(None, use_errno=True)
    place.cache.mkdir()
    assert libc.mount(b"tmpfs", str(place.cache).encode(), b"tmpfs", 0, b"size=8m") == 0
    try:
        hub.holds["model-1.safetensors"] = 1 << 20
        place.start(reserve_bytes=2 << 20)
        assert hub.holding.wait(20)
        until(lambda: place.file("model-1.safetensors.incomplete").stat().st_size >= 1 << 20)
        other = place.cache / "other"
        other.write_bytes(b"x" * (os.statvfs(place.cache).f_bavail * os.statvfs(place.cache).f_frsize - (3 << 20)))
        hub.go.set()
        last = place.follow()[-1]
        assert (last["event"], last["code"]) == ("pull_failed", "disk")
        assert os.statvfs(place.cache).f_bavail * os.statvfs(place.cache).f_frsize >= 2 << 20
        other.unlink()
        assert place.pull(reserve_bytes=2 << 20)[-1]["event"] == "pull_done"
        assert place.file("model-1.safetensors").read_bytes() == BIG
    finally:
        place.ask({"do": "cancel"})
        libc.umount2(str(place.cache).encode(), 2)


def test_the_job_gives_way(place: Place, hub: Hub) -> None:
    """The job has the lowest priority, idle I/O, and is the kernel's first choice when memory is short."""
    hub.holds["model-1.safetensors"] = 1 << 20
    place.start()
    assert hub.holding.wait(20)
    pid = place.job()["pid"]
    assert os.getpriority(os.PRIO_PROCESS, pid) == 19
    assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "1000"
    assert subprocess.run(["ionice", "-p", str(pid)], capture_output=True, text=True, check=True).stdout.strip() == "idle"
    assert os.getpgid(pid) == pid != os.getpgrp()


def test_a_second_node_copies_from_the_first(place: Place, hub: Hub, tmp_path: Path) -> None:
    """Over the fabric the worker gets each file that the head has verified; the publisher sends it once."""
    worker = Place(tmp_path / "worker", hub)
    share = {"address": "127.0.0.1", "others": ["worker"], "patience_seconds": 60}
    begun = place.start(share=share)
    order = {**worker.order(), "node": "worker", "mirror": begun["share"]}
    assert worker.ask({"do": "start", "job": order})[-1]["state"] == "started"
    assert worker.follow()[-1]["event"] == "pull_done"
    assert place.follow()[-1]["event"] == "pull_done"
    assert worker.file("model-1.safetensors").read_bytes() == BIG
    assert len(hub.fetched("model-1.safetensors")) == 1
    until(place.ended)  # the worker has said that it is through


def test_a_second_node_waits_for_the_first_as_long_as_it_takes(place: Place, hub: Hub, tmp_path: Path) -> None:
    """A file that the head has not verified yet is waited for: the publisher sends it once, however long it takes."""
    worker = Place(tmp_path / "worker", hub)
    hub.holds["model-1.safetensors"] = 1 << 20
    begun = place.start(share={"address": "127.0.0.1", "others": ["worker"], "patience_seconds": 60})
    order = {**worker.order(), "node": "worker", "mirror": begun["share"]}
    assert worker.ask({"do": "start", "job": order})[-1]["state"] == "started"
    until(lambda: worker.file("config.json").exists())
    retries = worker.state / "pull" / "events.jsonl"
    hub.go.set()
    assert worker.follow()[-1]["event"] == "pull_done"
    assert b"pull_retry" not in retries.read_bytes() and len(hub.fetched("model-1.safetensors")) == 1


def test_a_derived_image_is_copied_from_the_first(hub: Hub, tmp_path: Path) -> None:
    """The worker loads the image that the head has built, and builds none."""
    head, worker = Place(tmp_path / "head", hub), Place(tmp_path / "worker", hub)
    build = {
        "base": "image:1",
        "files": [],
        "text": "FROM image:1\n",
        "start": "#!/bin/sh\n",
        "start_path": "/x",
        "dockerfile": None,
    }
    image = {"reference": "spark-serve/x:1", "build": build}
    share = {"address": "127.0.0.1", "others": ["worker"], "patience_seconds": 60}
    begun = head.start(image=image, checkpoints=[], share=share)
    order = {**worker.order(image=image, checkpoints=[]), "node": "worker", "mirror": begun["share"]}
    assert worker.ask({"do": "start", "job": order})[-1]["state"] == "started"
    built, copied = head.follow()[-1], worker.follow()
    assert built["event"] == copied[-1]["event"] == "pull_done" and built["image"] == copied[-1]["image"]
    assert [event["text"] for event in events(copied, "pull_image")] == ["docker load, from the other node"]


def test_a_second_node_downloads_when_the_first_is_gone(hub: Hub, tmp_path: Path) -> None:
    """A head that gives nothing costs no more than a few attempts: the publisher has the files as well."""
    worker = Place(tmp_path / "worker", hub)
    order = {**worker.order(), "node": "worker", "mirror": "http://127.0.0.1:9/word"}
    assert worker.ask({"do": "start", "job": order})[-1]["state"] == "started"
    assert worker.follow()[-1]["event"] == "pull_done"
    assert worker.file("model-1.safetensors").read_bytes() == BIG


def test_what_is_shared_is_for_who_knows_the_word(place: Place, hub: Hub) -> None:
    """Without the word, or for a path that is none of this pull's, the share gives nothing."""
    import urllib.error
    import urllib.request

    hub.holds["config.json"] = 1
    begun = place.start(share={"address": "127.0.0.1", "others": ["worker"], "patience_seconds": 60})
    base, _, word = begun["share"].rpartition("/")
    told = place.state / "pull" / "events.jsonl"
    until(lambda: b'"file": "model-1.safetensors"' in told.read_bytes())
    for path, status in (
        ("wrong/checkpoint1/config.json", 404),
        (f"{word}/checkpoint1/../../x", 404),
        (f"{word}/checkpoint1/config.json", 503),
    ):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{base}/{path}", timeout=5)
        assert caught.value.code == status
        caught.value.close()
    with urllib.request.urlopen(f"{base}/{word}/checkpoint1/model-1.safetensors", timeout=5) as response:
        assert hashlib.sha256(response.read()).digest() == hashlib.sha256(BIG).digest()


def test_an_image_is_pulled_by_its_digest(place: Place) -> None:
    """An image that is not there is pulled; one that the registry does not have fails with docker's words."""
    reference = "image@sha256:" + "2" * 64
    (place.folder / "docker" / "registry.json").write_text(json.dumps({reference: {"id": "sha256:" + "3" * 64}}))
    order = place.order(image={"reference": reference, "build": None})
    assert place.ask({"do": "start", "job": order})[-1]["state"] == "started"
    told = place.follow()
    assert (told[-1]["event"], told[-1]["image"]) == ("pull_done", "sha256:" + "3" * 64)
    assert place.ask({"do": "start", "job": place.order(image={"reference": "none:1", "build": None})})[-1]["state"] == "started"
    last = place.follow()[-1]
    assert last["code"] == "image" and "manifest unknown" in last["message"]


def test_a_derived_image_is_the_same_wherever_it_is_built(hub: Hub, tmp_path: Path) -> None:
    """Two nodes build the same image from the same inputs, and an input with another hash ends the build."""
    hub.files[REPO]["patch.py"] = b"print('patched')\n"
    patch = {
        "url": f"{hub.url}/{REPO}/resolve/{COMMIT}/patch.py",
        "sha256": hashlib.sha256(b"print('patched')\n").hexdigest(),
        "path": "/opt/x/patch.py",
    }
    start = {"start": "#!/bin/sh\nexec serve\n", "start_path": "/opt/spark-serve/x/start", "dockerfile": None}
    build = {"base": "base@sha256:" + "4" * 64, "files": [patch], "text": "FROM base\nADD files.tar /\n", **start}
    ids = []
    for name in ("one", "two"):
        node = Place(tmp_path / name, hub)
        (node.folder / "docker" / "registry.json").write_text(json.dumps({build["base"]: {"id": "sha256:" + "5" * 64}}))
        order = node.order(image={"reference": "spark-serve/x:1", "build": build}, checkpoints=[])
        assert node.ask({"do": "start", "job": order})[-1]["state"] == "started"
        told = node.follow()
        assert told[-1]["event"] == "pull_done", told[-1]
        ids.append(told[-1]["image"])
    assert ids[0] == ids[1]
    node = Place(tmp_path / "three", hub)
    (node.folder / "docker" / "registry.json").write_text(json.dumps({build["base"]: {"id": "sha256:" + "5" * 64}}))
    wrong = {**build, "files": [{**patch, "sha256": "0" * 64}]}
    order = node.order(image={"reference": "spark-serve/x:1", "build": wrong}, checkpoints=[])
    assert node.ask({"do": "start", "job": order})[-1]["state"] == "started"
    assert node.follow()[-1]["code"] == "hash"


def test_an_archive_does_not_depend_on_when_it_was_packed() -> None:
    """The one layer of a derived image is the same bytes on each machine, and only the program is executable."""
    files = {"/opt/b/start": b"x", "/opt/a/file": b"y"}
    first = pull_image.archive(files, "/opt/b/start")
    assert first == pull_image.archive(dict(reversed(files.items())), "/opt/b/start")
    import io
    import tarfile

    with tarfile.open(fileobj=io.BytesIO(first)) as tar:
        members = [(member.name, member.mode, member.mtime, member.uid) for member in tar]
    assert [name for name, *_ in members] == ["opt", "opt/a", "opt/b", "opt/a/file", "opt/b/start"]
    assert [mode for _, mode, *_ in members] == [0o755, 0o755, 0o755, 0o644, 0o755]
    assert {(mtime, uid) for *_, mtime, uid in members} == {(0, 0)}
