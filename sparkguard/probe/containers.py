"""Reads the command line of a container client (docker run ..., podman exec ...): what it runs inside, under which name.

The client and the process in the container are one server: probe/claims.py pairs them.
"""

from __future__ import annotations

from sparkguard.core.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

CLIENTS = ("docker", "podman", "nerdctl")

# Options of `run` and `exec` that take no value (docker 28, podman 5); every other one without '=' takes the next word.
_FLAGS = frozenset(
    "--detach --disable-content-trust --help --init --interactive --no-healthcheck --no-hosts --no-hostname --oom-kill-disable "
    "--passwd --privileged --publish-all --quiet --read-only --read-only-tmpfs --replace --rm --rmi --rootfs --sig-proxy "
    "--tls-verify --tty --unsetenv-all --use-api-socket --http-proxy --env-host --latest -d -i -t -P -q -l".split()
)
# Global options before the verb that take a value; those of the first group may point the client at another machine.
_HOST = ("-H", "--host", "--url")
_CONTEXT = ("-c", "--context", "--connection")
_REMOTE = ("--remote", "-r")
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
_CDI = "nvidia.com/gpu="


class Container(Record):
    """What a client started: image is None for `exec`; devices as NVIDIA_VISIBLE_DEVICES names them, None: not said."""

    image: str | None
    command: tuple[str, ...]
    name: str | None = None
    entrypoint: str | None = None
    devices: str | None = None
    environment: tuple[str, ...] = ()  # of --env: KEY=VALUE, or KEY for the client's own; later ones win
    env_files: tuple[str, ...] = ()
    detached: bool = False  # the client ends at once, and its container goes on
    published: tuple[tuple[int, int], ...] = ()  # (the container's port, the machine's)


def is_local(address: str) -> bool:
    """Whether a daemon's address (-H, DOCKER_HOST) is of this machine."""
    return not address or address.startswith(("unix:", "fd:", "/"))


def read_client(argv: Sequence[str]) -> Container | None:
    """None when this is no foreground or background start of a container on this machine."""
    if argv[0].rpartition("/")[2] not in CLIENTS:
        return None
    words = list(argv[1:])
    while words and words[0].startswith("-"):
        option, equals, value = words.pop(0).partition("=")
        if option[:2] == "-H" and len(option) > 2:
            option, value, equals = "-H", option[2:], "="
        if option in _HOST + _CONTEXT + _GLOBAL_VALUES and not equals:
            value = words.pop(0) if words else ""
        if (option in _HOST and not is_local(value)) or (option in _CONTEXT and value != "default") or option in _REMOTE:
            return None
    if words[:1] == ["container"]:
        words.pop(0)
    if words[:1] not in (["run"], ["exec"]):
        return None
    verb = words.pop(0)
    given: dict[str, str] = {}
    environment, files, published, cdi = [], [], [], []
    detached = False
    while words and words[0].startswith("-"):
        option, equals, value = words.pop(0).partition("=")
        if option == "--":
            break
        bundled = len(option) > 2 and option[1] != "-"  # -it, -itd, -e1=2
        if option in _FLAGS or (bundled and all("-" + letter in _FLAGS for letter in option[1:])):
            if option == "--detach" or (option[1] != "-" and "d" in option):
                detached = value != "false"
            continue
        if bundled and "-" + option[1] not in _FLAGS:
            option, value = option[:2], option[2:] + equals + value
        elif not equals:
            value = words.pop(0) if words else ""
        if option in ("--env", "-e"):
            environment.append(value)
        elif option == "--env-file":
            files.append(value)
        elif option in ("--publish", "-p"):
            published.append(value)
        elif option == "--device" and value.startswith(_CDI):
            cdi.append(value[len(_CDI) :])
        else:
            given[option] = value
    if not words:
        return None
    target = words.pop(0)
    if verb == "exec":
        return Container(None, tuple(words), target, environment=tuple(environment), env_files=tuple(files), detached=detached)
    return Container(
        target,
        tuple(words),
        given.get("--name"),
        given.get("--entrypoint"),
        ",".join(cdi) or _devices(given.get("--gpus", "")),
        tuple(environment),
        tuple(files),
        detached,
        tuple(pair for pair in map(_ports, published) if pair),
    )


def environment_of(
    container: Container, client: Mapping[str, str] | None, read_file: Callable[[str], str | None]
) -> dict[str, str] | None:
    """What the client, with this environment of its own, gives the container; None where that cannot be read."""
    entries: list[str] = []
    for path in container.env_files:
        text = read_file(path)
        if text is None:
            return None
        entries += [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    found = {}
    for entry in (*entries, *container.environment):
        name, given, value = entry.partition("=")
        if given:
            found[name] = value
        elif client is None:
            return None
        elif name in client:
            found[name] = client[name]
    return found


def _devices(gpus: str) -> str | None:
    """Of --gpus: 'all', '2' (the first two), 'device=0', '"device=0,1"', 'device=GPU-3a23'."""
    if "device=" in gpus:
        return gpus.strip("\"'").partition("device=")[2].partition('"')[0]
    count = gpus.removeprefix("count=")
    return ",".join(map(str, range(int(count)))) if count.isascii() and count.isdigit() and 0 < len(count) < 3 else None


def _ports(publish: str) -> tuple[int, int] | None:
    """Of --publish: '8001:8000', '127.0.0.1:8001:8000/tcp'. None: the machine's port is chosen by the daemon, or a range."""
    parts = publish.removesuffix("/tcp").split(":")
    if len(parts) < 2 or not all(part.isascii() and part.isdigit() and len(part) < 6 for part in parts[-2:]):
        return None
    return int(parts[-1]), int(parts[-2])
