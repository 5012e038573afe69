"""Reads the command line of a container client (docker run ..., podman exec ...): what it runs inside, under which name.

The client and the process in the container are one server: probe/claims.py pairs them.
"""

from __future__ import annotations

from sparkguard.core.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

CLIENTS = ("docker", "podman", "nerdctl")

# Options of `run` and `exec` that take no value (docker 28, podman 5); every other one without '=' takes the next word.
_FLAGS = frozenset(
    "--detach --disable-content-trust --help --init --interactive --no-healthcheck --no-hosts --no-hostname --oom-kill-disable "
    "--privileged --publish-all --quiet --read-only --read-only-tmpfs --replace --rm --rmi --rootfs --sig-proxy --tls-verify --tty "
    "--unsetenv-all --use-api-socket --http-proxy --env-host -d -i -t -P -q".split()
)
# Global options before the verb that point the client at another machine.
_ELSEWHERE = ("-H", "--host", "-c", "--context", "--connection", "--url", "--remote", "-r")
_GLOBAL_VALUES = (
    "--config",
    "-l",
    "--log-level",
    "--tlscacert",
    "--tlscert",
    "--tlskey",
    "--root",
    "--runroot",
    "--storage-driver",
)


class Container(Record):
    """What a client started: image is None for `exec`; devices is --gpus' device list as written."""

    image: str | None
    command: tuple[str, ...]
    name: str | None = None
    entrypoint: str | None = None
    devices: str | None = None


def read_client(argv: Sequence[str]) -> Container | None:
    """None when this is no foreground or background start of a container on this machine."""
    if argv[0].rpartition("/")[2] not in CLIENTS:
        return None
    words = list(argv[1:])
    while words and words[0].startswith("-"):
        option, equals, _ = words.pop(0).partition("=")
        if option in _ELSEWHERE:
            return None
        if option in _GLOBAL_VALUES and not equals:
            words[:1] = []
    if words[:1] == ["container"]:
        words.pop(0)
    if words[:1] not in (["run"], ["exec"]):
        return None
    verb = words.pop(0)
    name = entrypoint = devices = None
    while words and words[0].startswith("-"):
        option, equals, value = words.pop(0).partition("=")
        if option == "--":
            break
        bundled = len(option) > 2 and option[1] != "-"  # -it, -itd, -e1=2
        if option in _FLAGS or (bundled and all("-" + letter in _FLAGS for letter in option[1:])):
            continue
        if not equals and not (bundled and "-" + option[1] not in _FLAGS):
            value = words.pop(0) if words else ""
        if option == "--name":
            name = value
        elif option == "--entrypoint":
            entrypoint = value
        elif option in ("--gpus", "--device") and "device=" in value:
            devices = value.strip("\"'").partition("device=")[2].partition('"')[0]
    if not words:
        return None
    target = words.pop(0)
    if verb == "exec":
        return Container(None, tuple(words), target)
    return Container(target, tuple(words), name, entrypoint, devices)
