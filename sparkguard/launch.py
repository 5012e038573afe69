"""Starts the server: environment, CPU isolation, admission if nobody did it yet, then exec.

systemd's main process becomes the server itself. Also prints what it would set (--env, --cpus), for vllm_env.sh, and
ends a start's reservation (--release), for ExecStopPost=.
"""

from __future__ import annotations

import errno
import os

from sparkguard import command, guard, ledger, streams
from sparkguard.core.affinity import cores_for, format_cpus
from sparkguard.core.share import WHOLE, format_share
from sparkguard.errors import CONFIG, INTERRUPTED, NOT_FOUND, OK, USAGE, SparkguardError, report
from sparkguard.oom import OOM_SCORE, offer_to_the_oom_killer
from sparkguard.probe import cores, procfs, vllm_version
from sparkguard.settings import SETTINGS, Settings, check_name, load

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

USAGE_TEXT = """\
usage: vllm-serve.sh NAME [vllm arguments...]
       vllm-serve.sh --release NAME

Starts the model NAME behind the memory guard, on its share of the cores.
"""
# docs/guard.md says what each line costs and why it is there.
_FAST = {"MAX_JOBS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
_STABLE = {"CUDA_LAUNCH_BLOCKING": "1", **_FAST}
# vLLM warns of each VLLM_ variable that it does not know, and means something else by VLLM_PORT; the last two are systemd's
# and the guard's business, not the server's.
_NOT_HANDED_ON = (*SETTINGS, "NOTIFY_SOCKET", "SPARK_CPUS")
_REMOVE_SECONDS = 20.0  # less than TimeoutStopSec= of the units, which ExecStopPost= has to itself


def main(argv: Sequence[str], env: Mapping[str, str] | None = None, roots: guard.Roots | None = None) -> int:
    """Returns a status only when nothing was started."""
    streams.mend()
    env = os.environ if env is None else env
    roots = roots or guard.Roots()
    try:
        return _run(list(argv), env, roots)
    except SparkguardError as error:
        streams.say(report(error))
        return error.status
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception:
        return guard.bug()


def _run(words: list[str], env: Mapping[str, str], roots: guard.Roots) -> int:
    verb = words[0] if words else ""
    if verb in ("--help", "-h"):
        streams.put(USAGE_TEXT)
        return OK
    if verb == "--env":
        settings = load(env)
        lines = {
            **profile(settings, env, command.find_program(settings.text("VLLM_BIN"), env)),
            "SPARK_CPUS": format_cpus(_share_of_cores(settings, roots)[0]),
        }
        streams.put("".join(f"{key}={value}\n" for key, value in lines.items()))
        return OK
    if verb == "--cpus":
        settings = load(env)
        chosen, usable = _share_of_cores(settings, roots)
        share = format_share(settings.share("VLLM_CPU_SHARE"))
        streams.put(f"cpus={format_cpus(chosen)} of {format_cpus(usable)} share={share}\n")
        return OK
    if verb == "--release" and len(words) == 2:
        return release(check_name(words[1]), env)
    if not words or verb.startswith("-"):
        streams.say(USAGE_TEXT)
        return USAGE
    return serve(check_name(verb), words[1:], env, roots)


def serve(name: str, args: Sequence[str], env: Mapping[str, str], roots: guard.Roots) -> int:
    settings = load(env, name)
    start = command.build(settings, name, args)
    program = command.program_of(start, settings, env)
    chosen, usable = _share_of_cores(settings, roots)
    if not _admitted_already(start, env, roots):
        verdict = guard.decide(name, args, env, roots)
        status = guard.announce(verdict, env)
        if status:
            return status
    if chosen:
        os.sched_setaffinity(0, chosen)
        everything = " (all of them: VLLM_CPU_SHARE is 1)" if settings.share("VLLM_CPU_SHARE") == WHOLE else ""
        streams.say(f"sparkguard: {name} runs on CPUs {format_cpus(chosen)} of {format_cpus(usable)}{everything}\n")
    else:
        streams.say("sparkguard: this system cannot pin a process to CPUs\n")
    offer_to_the_oom_killer()
    server_env = child_environment(settings, env, program if start.image is None else None)
    if start.image is None:
        argv = [program, "serve", *start.serve_args]
    else:
        argv = docker_argv(program, start, settings, env, chosen, container_name(name, env, roots))
    try:
        os.execve(program, argv, server_env)
    except OSError as error:
        key = "VLLM_BIN" if start.image is None else "VLLM_DOCKER_BIN"
        message = f"{program} cannot be started: {error.strerror}"
        if error.errno == errno.E2BIG:
            hint = "one argument may have 128 KiB, and all of them with the environment about 2 MiB: shorten VLLM_EXTRA_ARGS"
            raise SparkguardError(message, hint, CONFIG) from None
        hint = f"set {key} to a program; a script needs a first line such as #!/bin/sh"
        raise SparkguardError(message, hint, NOT_FOUND) from None


def release(name: str, env: Mapping[str, str]) -> int:
    """After a unit's stop, whatever ended it: the reservation goes, and so does a container that outlived its client."""
    try:
        with ledger.Ledger(ledger.directory(env)) as held:
            held.release(env.get("INVOCATION_ID"))
        settings = load(env, name)
        if settings.text("VLLM_IMAGE"):
            _remove_container(command.build(settings, name, (), model_required=False), settings, env)
    except SparkguardError as error:
        streams.say(report(error))  # a stop must not fail because of it
    return OK


def _remove_container(start: command.Command, settings: Settings, env: Mapping[str, str]) -> None:
    from sparkguard.probe import bounded

    client = command.client_of(start)
    container = (client and client.name) or container_name(start.name, env, guard.Roots())
    docker = command.find_program(settings.text("VLLM_DOCKER_BIN"), env)
    if docker is not None:
        try:
            bounded.run([docker, "rm", "--force", container], _REMOVE_SECONDS, env)
        except OSError as error:
            raise SparkguardError(f"{docker} cannot be started: {error.strerror}") from None


def _admitted_already(start: command.Command, env: Mapping[str, str], roots: guard.Roots) -> bool:
    """Whether ExecStartPre= of this very start was admitted, and with this command: ExecStart= may have other arguments."""
    mine = guard.invocation(env, roots)
    if mine is None:
        return False
    with ledger.Ledger(ledger.directory(env), roots.proc) as held:
        asked = command.asked(start)
        return any(reservation.invocation == mine[1] and reservation.asked == asked for reservation in held.live())


def profile(settings: Settings, env: Mapping[str, str], program: str | None) -> dict[str, str]:
    """The environment defaults of VLLM_ENV_PROFILE; what is set already, by the user or the spec, stays."""
    stable = settings.choice("VLLM_ENV_PROFILE") == "stable"
    lines = dict(_STABLE if stable else _FAST)
    if stable and program is not None and vllm_version.knows_use_v1(vllm_version.version_beside(program)):
        lines["VLLM_USE_V1"] = "0"
    return {key: value for key, value in lines.items() if key not in env and key not in settings.passed_on}


def child_environment(settings: Settings, env: Mapping[str, str], program: str | None) -> dict[str, str]:
    """What the server sees: the environment beats the spec, the spec beats the profile; our own settings stay here."""
    return {
        **profile(settings, env, program),
        **{key: value.text for key, value in settings.passed_on.items()},
        **{key: value for key, value in env.items() if key not in _NOT_HANDED_ON},
    }


def docker_argv(
    program: str, start: command.Command, settings: Settings, env: Mapping[str, str], cpus: tuple[int, ...], container: str
) -> list[str]:
    """docker run in the foreground, so that a stop's SIGTERM reaches vLLM, which then drains.

    The daemon starts the container, not we: neither affinity nor OOM score nor environment is inherited. What --env names has
    its value in the client's environment, of child_environment().
    """
    argv = [program, "run", "--rm", f"--oom-score-adj={OOM_SCORE}"]
    client = command.client_of(start)
    if client is None or client.name is None:
        argv += ["--name", container]
    if cpus:
        argv.append(f"--cpuset-cpus={format_cpus(cpus)}")
    # By name alone: everybody on the machine can read a command line, and HF_TOKEN may be among them.
    for key in {**profile(settings, {}, None), **settings.passed_on}:
        argv += ["--env", key]
    if start.local_model:
        argv += ["--volume", f"{start.local_model}:{start.local_model}:ro"]
    return [*argv, *start.docker_args, "--entrypoint", "vllm", start.image or "", "serve", *start.serve_args]


def container_name(name: str, env: Mapping[str, str], roots: guard.Roots) -> str:
    """The unit's name where there is one ('vllm-model.mymodel'), else 'sparkguard-NAME'."""
    mine = guard.invocation(env, roots)
    unit = mine[0].removesuffix(".service") if mine else f"sparkguard-{name}"
    return "".join(c if c.isalnum() or c in "_.-" else "." for c in procfs.unescape_unit(unit))


def _share_of_cores(settings: Settings, roots: guard.Roots) -> tuple[tuple[int, ...], tuple[int, ...]]:
    usable = cores.usable(roots.sys)
    share = settings.share("VLLM_CPU_SHARE")
    return (cores_for(share, usable) if usable else ()), tuple(core.cpu for core in usable)
