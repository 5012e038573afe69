"""spark-runner: the process of one loaded model. Prepares itself and becomes the engine by exec, so it costs nothing later.

It dies with its parent, has a process group of its own, its share of the cores, and goes before the desktop does when memory
runs out. /proc/PID/exe is the engine; its first argument, and so its name in ps, is 'spark-runner: ID'.
"""

from __future__ import annotations

import os
import sys

from sparkguard.core.affinity import cores_for, parse_cpus
from sparkguard.errors import INTERRUPTED, NOT_FOUND, OK, OSERR, USAGE, SparkguardError, report
from sparkguard.oom import offer_to_the_oom_killer
from sparkguard.probe import cores

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

USAGE_TEXT = """\
usage: spark-runner --model FILE --device DEVICE --socket PATH [options] [-- engine arguments]

Serves one model on a private Unix socket until it is told to stop.

  --model FILE      the GGUF file
  --device DEVICE   cpu, cuda, or cuda:N with a number or a GPU's UUID
  --socket PATH     where the engine listens; must end in .sock
  --id ID           the name in ps: 'spark-runner: ID'; by default the file's stem
  --engine PATH     the llama-server to become; by default SPARK_LLAMA_SERVER
  --cpus LIST       the CPUs to run on, as 0-3,8; by default VLLM_CPU_SHARE of those there are
  --parent PID      end at once unless this process is the parent
  --cgroup PATH     a cgroup of version 2 to enter
  --port N          a port of 127.0.0.1 instead of --socket, for an engine that has no sockets
  --key KEY         what a request there has to say; only from stdin, for arguments are seen by everybody
  --mark TEXT       the engine's SPARK_RUNNER, by which the supervisor knows it and what it starts

spark-runner --standby [--parent PID] prepares itself and reads all this from its stdin, a zero byte between two arguments.
"""
TITLE = "spark-runner: "
_OPTIONS = ("model", "device", "socket", "id", "engine", "cpus", "parent", "cgroup", "mark", "port", "key")
MARK = "SPARK_RUNNER"
# sun_path of a Unix socket's address has 108 bytes, the last of them 0 (unix(7)).
MOST_SOCKET_BYTES = 107
_PR_SET_PDEATHSIG, _SIGKILL = 1, 9
# An engine takes LLAMA_ARG_* for arguments, and would then run otherwise than what the estimate counted; the rest is systemd's
# business with the supervisor.
_KEPT_BACK = ("LLAMA_ARG_", "LLAMA_API_KEY", "NOTIFY_", "WATCHDOG_", "LISTEN_")


def main(argv: Sequence[str] | None = None, env: Mapping[str, str] | None = None) -> int:
    """Returns a status only when nothing was started."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in (["--help"], ["-h"]):
        sys.stdout.write(USAGE_TEXT)
        return OK
    try:
        if words[:1] == ["--standby"]:
            words = _stand_by(words[2:] if words[1:2] == ["--parent"] else [])
            if not words:
                return OK
        return _become(words, os.environ if env is None else env)
    except SparkguardError as error:
        sys.stderr.write(report(error))
        return error.status
    except KeyboardInterrupt:
        return INTERRUPTED


def _stand_by(parent: list[str]) -> list[str]:
    """What the parent says, and nothing when it does not want us any more, or has died."""
    if not die_with_parent(parent[0] if parent else None):
        return []
    _leave_group()
    offer_to_the_oom_killer()
    import resource  # noqa: F401  all of this now, and not when somebody waits

    import sparkguard.settings  # noqa: F401

    words = b""
    while read := os.read(0, 1 << 16):
        words += read
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return os.fsdecode(words).split("\0") if words else []


def _become(words: list[str], env: Mapping[str, str]) -> int:
    options, engine_arguments = parse(words)
    if not die_with_parent(options.get("parent")):
        return OK
    engine = options.get("engine") or _engine(env)
    _leave_group()
    if "cgroup" in options:
        _enter(options["cgroup"])
    if chosen := _cpus(options.get("cpus"), env):
        os.sched_setaffinity(0, chosen)
    offer_to_the_oom_killer()
    _leave_no_core()
    command = engine_argv(options, engine_arguments)
    if "socket" in options:
        _unlink(options["socket"])
    sys.stderr.flush()
    try:
        os.execve(engine, command, child_environment(options["device"], env, options.get("mark"), options.get("key")))
    except OSError as error:
        hint = "set SPARK_LLAMA_SERVER to a llama-server"
        raise SparkguardError(f"{engine} cannot be started: {error.strerror}", hint, NOT_FOUND) from None


def parse(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The options, and what stands behind --."""
    options: dict[str, str] = {}
    at = 0
    while at < len(words) and words[at] != "--":
        key, equals, value = words[at].partition("=")
        at += 1
        if not equals and at < len(words):
            value = words[at]
            at += 1
        elif not equals:
            raise SparkguardError(f"{key} wants a value", "spark-runner --help shows the options", USAGE)
        if not key.startswith("--") or key[2:] not in _OPTIONS:
            raise SparkguardError(f"unknown option {key}", "spark-runner --help shows the options", USAGE)
        options[key[2:]] = value
    for key in ("model", "device", "socket" if "port" not in options else "port"):
        if not options.get(key):
            raise SparkguardError(f"--{key} is missing", "spark-runner --help shows the options", USAGE)
    socket = options.get("socket", ".sock")
    if not socket.endswith(".sock"):  # how llama-server tells a socket's path from a host's name
        raise SparkguardError(f"{socket!r} does not end in .sock", status=USAGE)
    if len(os.fsencode(socket)) > MOST_SOCKET_BYTES:
        raise SparkguardError(f"{socket!r} is too long for a socket", f"at most {MOST_SOCKET_BYTES} bytes", USAGE)
    device = options["device"]
    if device not in ("cpu", "cuda") and not (device.startswith("cuda:") and len(device) > 5):
        raise SparkguardError(f"{device!r} is no device", "cpu, cuda or cuda:N", USAGE)
    return options, list(words[at + 1 :])


def engine_argv(options: Mapping[str, str], engine_arguments: Sequence[str]) -> list[str]:
    name = options.get("id") or os.path.basename(options["model"]).removesuffix(".gguf")
    listens = ["--host", "127.0.0.1", "--port", options["port"]] if "port" in options else ["--host", options["socket"]]
    device = ["--device", "none"] if options["device"] == "cpu" else []
    return [TITLE + name, "--model", options["model"], *listens, *device, *engine_arguments]


def child_environment(device: str, env: Mapping[str, str], mark: str | None = None, key: str | None = None) -> dict[str, str]:
    """What the engine sees: one GPU, by the number that NVML gives it, or none, so that no CUDA context is made for nothing."""
    kept = {key: value for key, value in env.items() if not key.startswith(_KEPT_BACK)}
    if device == "cpu":
        kept["CUDA_VISIBLE_DEVICES"] = ""
    elif device != "cuda":
        kept["CUDA_VISIBLE_DEVICES"] = device.removeprefix("cuda:")
        kept["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # NVML's order; CUDA's own is by speed
    # A runner is on CUDA or on the CPU. A build with Vulkan would load that one's drivers all the same, which takes 20 ms of a
    # start and 40 MB of each runner.
    kept["GGML_DISABLE_VULKAN"] = "1"
    # An engine that aborts would start a debugger on itself, whose output then stands where its last words should.
    kept["GGML_NO_BACKTRACE"] = "1"
    if mark is not None:
        kept[MARK] = mark
    if key is not None:
        kept["LLAMA_API_KEY"] = key
    return kept


def die_with_parent(parent: str | None) -> bool:
    """Asks the kernel for SIGKILL when the parent dies. False: it died before it was asked.

    SIGKILL, because llama-server may sit on a SIGTERM for as long as a request runs.
    """
    if sys.platform != "linux":
        return True
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0):
        raise SparkguardError(f"prctl: {os.strerror(ctypes.get_errno())}", status=OSERR)
    return parent is None or parent == str(os.getppid())


def _leave_group() -> None:
    """A terminal's signals are for the supervisor alone, and all that an engine starts can be ended at once."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)


def _enter(cgroup: str) -> None:
    try:
        with open(f"{cgroup}/cgroup.procs", "w", encoding="ascii") as file:
            file.write("0")
    except OSError as error:
        raise SparkguardError(f"cgroup {cgroup} cannot be entered: {error.strerror}", status=OSERR) from None


def _cpus(given: str | None, env: Mapping[str, str]) -> tuple[int, ...]:
    if not hasattr(os, "sched_setaffinity"):
        return ()
    if given is not None:
        try:
            return parse_cpus(given)
        except ValueError:
            raise SparkguardError(f"{given!r} is no list of CPUs", "as in 0-3,8", USAGE) from None
    from sparkguard.settings import load

    return cores_for(load(env).share("VLLM_CPU_SHARE"), cores.usable())


def _engine(env: Mapping[str, str]) -> str:
    from sparkguard.probe.llama_server import find
    from sparkguard.settings import load

    return find(load(env).text("SPARK_LLAMA_SERVER"), env)


def _leave_no_core() -> None:
    """A core dump would be as large as the model, and would hold prompts."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _unlink(socket: str) -> None:
    """llama-server leaves its socket behind, and does not start on one that is there."""
    try:
        os.unlink(socket)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise SparkguardError(f"{socket} is in the way: {error.strerror}", status=OSERR) from None


if __name__ == "__main__":
    sys.exit(main())
