"""The image of a model: pulled by its digest, or derived from inputs that are whole by their hashes, and then told by its id.

Runs on a node: Linux, Python 3.8, the standard library. docker's own daemon does the work, at its own priority; a build has no
network and starts no container that uses a GPU.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import threading
import urllib.parse

from sparkguard.cluster.node import docker
from sparkguard.cluster.node.base import FAILED, UNAVAILABLE, Fault
from sparkguard.cluster.node.pull_base import Job
from sparkguard.cluster.node.pull_share import Share
from sparkguard.cluster.node.pull_web import Web

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MOST_INPUT = 64 << 20
_WATCH_SECONDS = 2.0


def prepare(job: Job, web: Web, share: Share | None) -> str | None:
    """The image's id; None: the order has none."""
    order = job.order.get("image")
    if not order:
        return None
    reference = order["reference"]
    found = docker.image_id(reference)
    # By digest it is the same wherever it comes from, and docker forgets the digest of what it loads.
    if found is None and job.order["mirror"] and "@" not in reference:
        found = _from_the_other(job, web, reference)
    if found is None and order.get("build"):
        _build(job, web, order)
    elif found is None:
        _pull(job, reference)
    found = docker.image_id(reference)
    if found is None:
        raise Fault("image", f"docker says it has made {reference}, and does not find it", FAILED)
    if share is not None:
        share.image = reference
    return found


def _pull(job: Job, reference: str) -> None:
    if reference.startswith("sha256:"):
        raise Fault("image", f"{reference} is an image's id, and nowhere to be pulled from", FAILED)
    job.tell("pull_image", reference=reference, text=f"docker pull {reference}")
    _docker(job, "pull", reference)


def _build(job: Job, web: Web, order: dict[str, Any]) -> None:
    build, reference = order["build"], order["reference"]
    if docker.image_id(build["base"]) is None:
        _pull(job, build["base"])
    context = os.path.join(job.folder, "build")
    shutil.rmtree(context, ignore_errors=True)
    os.makedirs(context)
    texts = {each["path"]: _input(job, web, each) for each in build["files"]}
    if build["dockerfile"]:
        _write(context, "Dockerfile", _input(job, web, build["dockerfile"]))
        for path, data in texts.items():
            _write(context, path, data)
    else:
        _write(context, "Dockerfile", build["text"].encode())
        _write(context, "files.tar", archive({**texts, build["start_path"]: build["start"].encode()}, build["start_path"]))
    job.tell("pull_image", reference=reference, text=f"docker build {reference} on {build['base']}")
    # A tag of its own until it is known to be right: nothing starts what was built wrong.
    trial = f"spark-serve/trial:{job.order['key'][:12]}"
    _docker(job, "build", "--network", "none", "--build-arg", "SOURCE_DATE_EPOCH=0", "--tag", trial, context)
    made = docker.image_id(trial)
    if reference.startswith("sha256:"):
        if made != reference:
            raise Fault("image", f"the build gave {made}, and {reference} is wanted", FAILED)
        return  # the trial's tag keeps it
    _docker(job, "tag", trial, reference)
    docker.docker("rmi", trial)  # the name; a failure leaves one too many, and no more
    shutil.rmtree(context, ignore_errors=True)


def _write(folder: str, path: str, data: bytes) -> None:
    target = os.path.join(folder, path)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with open(target, "wb") as file:
        file.write(data)
    os.utime(target, (0, 0))


def _input(job: Job, web: Web, each: dict[str, str]) -> bytes:
    def ask() -> bytes:
        with web.open(each["url"]) as response:
            data: bytes = response.read(_MOST_INPUT + 1)
            return data

    data = web.patiently(each["url"], ask)
    found = hashlib.sha256(data).hexdigest()
    if found != each["sha256"]:
        raise Fault("hash", f"{each['url']} has the SHA-256 {found}, and {each['sha256']} is wanted", FAILED)
    return data


def archive(files: dict[str, bytes], program: str) -> bytes:
    """A tar in which nothing depends on when, where or by whom it was packed: each folder and file once, in order, of 1970."""
    folders = set()
    for path in files:
        parts = path.strip("/").split("/")[:-1]
        folders |= {"/".join(parts[:length]) for length in range(1, len(parts) + 1)}
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for folder in sorted(folders):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for path in sorted(files):
            entry = tarfile.TarInfo(path.strip("/"))
            entry.size, entry.mode = len(files[path]), 0o755 if path == program else 0o644
            tar.addfile(entry, io.BytesIO(files[path]))
    return whole.getvalue()


def _docker(job: Job, *words: str) -> None:
    """docker with its last words told; it ends when the job is cancelled, or when its disk runs full."""
    root = docker.docker("info", "--format", "{{.DockerRootDir}}").out.strip() or "/"
    job.check_room(root)
    environment = {**os.environ, "DOCKER_BUILDKIT": "1", "SOURCE_DATE_EPOCH": "0", "BUILDKIT_PROGRESS": "plain"}
    try:
        child = subprocess.Popen(
            ["docker", *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
        )
    except OSError as error:
        raise Fault("missing", f"docker cannot be run: {error.strerror}", UNAVAILABLE) from None
    last: list[str] = []
    reader = threading.Thread(target=_read_lines, args=(job, child, last), daemon=True)
    reader.start()
    try:
        while child.poll() is None:
            try:
                child.wait(_WATCH_SECONDS)
            except subprocess.TimeoutExpired:
                job.check_room(root)
            job.check()
    except BaseException:
        child.terminate()
        child.wait()
        raise
    reader.join(5)
    if child.returncode:
        said = " / ".join(last[-3:]) or f"status {child.returncode}"
        raise Fault("image", f"docker {words[0]}: {said}", FAILED)


def _read_lines(job: Job, child: Any, last: list[str]) -> None:
    for line in child.stdout:
        text = line.decode("utf-8", "replace").strip()
        if text:
            last.append(text[:500])
            del last[:-20]
            job.tell("pull_image", text=text[:500])


def _from_the_other(job: Job, web: Web, reference: str) -> str | None:
    """The image that the head has made, byte for byte: the same id for certain. None: it cannot be had."""
    path = f"image/{urllib.parse.quote(reference, safe='')}"
    try:
        response = web.patiently("the other node's image", lambda: web.open_mirror(path))
    except Fault as fault:
        job.tell("pull_image", reference=reference, text=f"not from the other node: {fault.message}")
        return None
    job.tell("pull_image", reference=reference, text="docker load, from the other node")
    child = subprocess.Popen(["docker", "load"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert child.stdin is not None and child.stderr is not None
    try:
        with response:
            shutil.copyfileobj(response, child.stdin, 1 << 20)
        child.stdin.close()
        said = child.stderr.read().decode("utf-8", "replace").strip()
    except OSError as error:
        said = str(error)
        child.kill()
    if child.wait():
        job.tell("pull_image", reference=reference, text=f"docker load: {said[-500:]}")
    return docker.image_id(reference)
