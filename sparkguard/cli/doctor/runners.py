"""Have the runners an engine, and can it use the GPUs that there are?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkguard import guard
from sparkguard.cli.doctor.check import Check, spoken
from sparkguard.errors import NOT_FOUND, SparkguardError
from sparkguard.probe import llama_server
from sparkguard.settings import load
from sparkguard.supervisor import devices, runner_settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_BUILD = (
    "git clone --depth 1 https://github.com/ggml-org/llama.cpp && cmake -S llama.cpp -B llama.cpp/build -DGGML_CUDA=ON && "
    "cmake --build llama.cpp/build --target llama-server   # then SPARK_LLAMA_SERVER is llama.cpp/build/bin/llama-server"
)


def examine(env: Mapping[str, str], roots: guard.Roots) -> Iterator[Check]:
    """All but the first are for who has an engine: vLLM alone needs none."""
    settings = load(env)
    site = runner_settings.read(settings)
    try:
        engine = llama_server.ask(llama_server.find(site.llama_server, env), env)
    except SparkguardError as error:
        is_wanted = bool(site.llama_server) or error.status != NOT_FOUND
        yield Check("engine", False if is_wanted else None, spoken(error), "./install.sh --engine")
        return
    yield Check("engine", True, f"{engine.path}, build {engine.build or 'unknown'}")
    machine = guard.look(settings, env, roots, ask_nvml=True).machine
    for device in devices.find(machine, engine, site, dict(engine.capabilities)):
        if device.kind == "cpu":
            continue
        id = f"runners:{device.id}"
        if device.usable:
            yield Check(id, True, f"{device.name} can be used by runners")
        else:
            remedy = None if devices.has_cuda(engine) else _BUILD
            yield Check(id, None, f"{device.name}: {device.reason}; models set to auto run elsewhere", remedy)
