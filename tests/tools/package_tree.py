"""Copies the files of installed Debian packages, and of all that they depend on, into a folder: package_tree.py DIR PACKAGE...

The small VM so runs the very programs of this machine, and nothing has to be downloaded for it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

INFO = "/var/lib/dpkg/info/"
LEFT_OUT = re.compile(r"^/usr/share/(doc|man|info|locale|lintian|zoneinfo|mime|icons|fonts)/|^/var/cache/")
# What no package lists: made by maintainer scripts, and the links of a merged /usr.
MADE = (
    "/bin /sbin /lib /lib64 /etc/nsswitch.conf /etc/ld.so.cache /etc/login.defs /etc/localtime /etc/profile /etc/bash.bashrc "
    "/etc/shells /etc/environment /etc/passwd /etc/group /etc/shadow"
).split()
MADE_FOLDERS = ("/etc/pam.d", "/etc/alternatives", "/etc/security", "/etc/ld.so.conf.d")


def read_status() -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """The installed packages' fields, and which of them provides a virtual name."""
    packages: dict[str, dict[str, str]] = {}
    providers: dict[str, str] = {}
    with open("/var/lib/dpkg/status", encoding="utf-8", errors="replace") as file:
        blocks = file.read().split("\n\n")
    for block in blocks:
        fields = dict(re.findall(r"^([A-Za-z-]+): ?(.*(?:\n .*)*)", block, re.M))
        if fields.get("Status", "").endswith(" installed"):
            packages[fields["Package"]] = fields
            for provided in fields.get("Provides", "").split(","):
                providers.setdefault(provided.strip().partition(" ")[0], fields["Package"])
    return packages, providers


def closure(roots: list[str]) -> set[str]:
    """The packages and all that they depend on; of alternatives, the first that is installed."""
    packages, providers = read_status()
    todo, seen = list(roots), set()
    while todo:
        name = todo.pop()
        package = name if name in packages else providers.get(name)
        if not package or package in seen:
            continue
        seen.add(package)
        for field in ("Pre-Depends", "Depends"):
            for group in packages[package].get(field, "").split(","):
                names = [re.split(r"[ :(]", choice.strip())[0] for choice in group.split("|")]
                todo.extend([name for name in names if name in packages or name in providers][:1])
    return {f"{name}{suffix}" for name in seen for suffix in ("", ":" + packages[name]["Architecture"])}


def files(names: set[str]) -> set[str]:
    paths = set(MADE)
    for name in names:
        if os.path.exists(f"{INFO}{name}.list"):
            with open(f"{INFO}{name}.list", encoding="utf-8", errors="surrogateescape") as file:
                listed = [line.rstrip("\n") for line in file]
            # A package may list /lib/x where /lib is a link to /usr/lib.
            paths |= {
                os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
                for path in listed
                if path != "/." and not LEFT_OUT.search(path)
            }
    for folder in MADE_FOLDERS:
        for root, folders, entries in os.walk(folder):
            paths.update(os.path.join(root, name) for name in entries + folders)
    for folder in ("/usr/bin", "/usr/sbin", "/usr/lib"):  # alternatives, /bin/sh
        with os.scandir(folder) as entries:
            paths |= {entry.path for entry in entries if entry.is_symlink() and os.path.realpath(entry.path) in paths}
    return {path for path in paths if os.path.lexists(path)}


def copy(paths: set[str], out: str) -> int:
    """tar keeps links, hard links, owners and modes."""
    pack = subprocess.Popen(
        ["tar", "-C", "/", "--no-recursion", "--null", "-T", "-", "-cf", "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert pack.stdin and pack.stdout
    unpack = subprocess.Popen(["tar", "-C", out, "-xpf", "-", "--numeric-owner"], stdin=pack.stdout)
    pack.stdout.close()
    with pack.stdin as names:
        names.write("\0".join(path.lstrip("/") for path in sorted(paths)).encode("utf-8", "surrogateescape"))
    return pack.wait() or unpack.wait()


if __name__ == "__main__":
    sys.exit(copy(files(closure(sys.argv[2:])), sys.argv[1]))
