"""What a single text of a catalog may be. Each check returns what is wrong, in words that follow the key, or None."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

_HOST = re.compile(r"(ssh://)?[A-Za-z0-9_][A-Za-z0-9_.@:%+\[\]-]*\Z")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
_CONTAINER = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]+\Z")
_IMAGE = re.compile(r"(sha256:[0-9a-f]{64}|[a-z0-9][A-Za-z0-9._/:-]*(@sha256:[0-9a-f]{64})?)\Z")
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)+\Z")
_SIZE = re.compile(r"[1-9][0-9]*[bkmgBKMG]?\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_UNIT = re.compile(r"[A-Za-z0-9:_.\\@-]+\.service\Z")
# Variables and arguments that carry a credential, and texts that look like one.
_SECRET_NAME = re.compile(r"(_KEY|_TOKEN|_PASSWORD|_PASSWD|_SECRET|_CREDENTIALS?)\Z|\A(PASSWORD|TOKEN|SECRET)\Z", re.I)
_SECRET_TEXT = re.compile(r"\b(hf_[A-Za-z0-9]{20,}|nvapi-[\w-]{20,}|sk-[\w-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16})\b")
# OpenSSH's options that start a program or load one, here or there, and those by which cluster/ssh.py itself works.
_SSH_RUNS = frozenset(
    "proxycommand localcommand permitlocalcommand knownhostscommand remotecommand include match pkcs11provider "
    "securitykeyprovider xauthlocation".split()
)
_SSH_OURS = frozenset(
    "controlmaster controlpath controlpersist sessiontype stdinnull forkafterauthentication requesttty batchmode".split()
)
_SSH_FLAGS = {"-o": True, "-p": True, "-i": True, "-J": True, "-l": True, "-c": True, "-4": False, "-6": False, "-C": False}


def host(value: str) -> str | None:
    if value.startswith("-"):
        return f"{value!r} begins with a dash: ssh would read it as an option"
    return None if _HOST.match(value) else f"{value!r} is no host or alias that ssh takes"


def name(value: str) -> str | None:
    return None if _NAME.match(value) else f"{value!r} may hold letters, digits, dots, dashes and underscores only"


def container(value: str) -> str | None:
    return None if _CONTAINER.match(value) else f"{value!r} is no name that docker takes for a container"


def image(value: str) -> str | None:
    return None if _IMAGE.match(value) else f"{value!r} is no image reference and no sha256 id"


def digest_image(value: str) -> str | None:
    return None if re.search(r"sha256:[0-9a-f]{64}\Z", value) and not image(value) else f"{value!r} is not pinned by @sha256:..."


def repo(value: str) -> str | None:
    return None if _REPO.match(value) else f"{value!r} is no OWNER/NAME"


def size(value: str) -> str | None:
    return None if _SIZE.match(value) else f"{value!r} is no size such as 16g"


def sha256(value: str) -> str | None:
    return None if _SHA256.match(value) else f"{value!r} is no SHA-256 of 64 hexadecimal digits"


def unit(value: str) -> str | None:
    return None if _UNIT.match(value) else f"{value!r} is no name of a systemd service"


def address(value: str) -> str | None:
    try:
        found = ipaddress.ip_address(value)
    except ValueError:
        return f"{value!r} is no IP address"
    if found.is_loopback or found.is_unspecified or found.is_multicast:
        return f"{value} cannot be reached from the other nodes"
    return None


def folder(value: str) -> str | None:
    """An absolute path that docker's --mount can carry."""
    if not value.startswith("/"):
        return f"{value!r} is no absolute path"
    return inside(value[1:]) if value.strip("/") else "/ is the whole machine"


def inside(value: str) -> str | None:
    """A path below some folder."""
    if value.startswith("/"):
        return f"{value!r} is meant below a folder, without a leading slash"
    if ".." in value.split("/"):
        return f"{value!r} has a .. in it"
    return (
        f"{value!r} has a comma, a colon or a quote in it, which docker's mounts cannot carry"
        if set(',:"') & set(value)
        else None
    )


def anywhere(value: str) -> str | None:
    return folder(value) if value.startswith("/") else inside(value)


def home_folder(value: str) -> str | None:
    return inside(value[2:]) if value.startswith("~/") else folder(value)


def origin(value: str) -> str | None:
    """http://host:port and nothing more."""
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError as error:
        return f"{value!r} is no URL: {error}"
    if parts.username or parts.password:
        return "has a user or a password in it: credentials never stand in a catalog"
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.hostname.startswith("-"):
        return f"{value!r} is no http:// URL with a host"
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        return f"{value!r} has more than scheme, host and port"
    return "has port 0" if port == 0 else None


def source_url(value: str) -> str | None:
    parts = urlsplit(value)
    if parts.username or parts.password or parts.query:
        return f"{parts.scheme}://{parts.hostname} has a user, a password or a query in it: credentials never stand in a catalog"
    return None if parts.scheme == "https" and parts.hostname else f"{value!r} is no https:// URL"


def url_port(value: str) -> int | None:
    try:
        parts = urlsplit(value)
        return parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return None


def credential(key: str, value: str) -> str | None:
    """Why a variable or an argument is a credential, which a catalog may not hold."""
    if value and _SECRET_NAME.search(key.lstrip("-").replace("-", "_")):
        return f"is a credential: set {key} in this shell's environment, and name it in secrets = [{key!r}]"
    if _SECRET_TEXT.search(value):
        return "holds what looks like a credential: it belongs into the environment, and its variable's name in secrets = [...]"
    return None


def ssh_options(options: tuple[str, ...]) -> list[str]:
    """What is wrong with ssh_opts: only options are taken that cannot start a program."""
    faults = []
    words = list(options)
    while words:
        word = words.pop(0)
        flag, rest = word[:2], word[2:]
        if flag not in _SSH_FLAGS or (rest and not _SSH_FLAGS[flag]):
            faults.append(f"{word!r} is not taken here: put it into ~/.ssh/config")
            continue
        value = rest or (words.pop(0) if _SSH_FLAGS[flag] and words else "")
        if _SSH_FLAGS[flag] and not value:
            faults.append(f"{flag} has no value")
        elif flag == "-o":
            option = re.split(r"[=\s]", value.strip(), maxsplit=1)[0].lower()
            if option in _SSH_RUNS:
                faults.append(f"{option} starts a program: put it into ~/.ssh/config")
            elif option in _SSH_OURS and value.replace(" ", "=").lower() != "batchmode=yes":
                faults.append(f"{option} is set by spark-serve itself")
        elif value.startswith("-"):
            faults.append(f"{flag} has the value {value!r}, which begins with a dash")
    return faults
