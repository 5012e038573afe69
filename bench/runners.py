"""The runners beside llama-server itself and its router mode, in one run and one table.

    python bench/runners.py [--engine LLAMA_SERVER] [--model FILE.gguf ...] [--rounds 1000] [--small]

Contenders take turns within each row, so that a slow moment of the machine hits all of them. A tiny model, whose token takes
0.1 ms, shows what a front costs; a real one (by default the one of scripts/quickstart.sh, where that has run) what of it is
felt. Prints medians and ratios; asserts nothing on times. --small: a few of each, to see that it works.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import library
from contenders import Client, Contender, Failed, alone, link_models, make_model, router, sparkguard, start_by_hand

CACHE = Path(os.environ.get("SPARKGUARD_TEST_CACHE", "/var/cache/sparkguard-tests"))
QUICKSTART = Path(__file__).resolve().parents[1] / ".quickstart"
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1})
TOKENIZE = ("/tokenize", {"content": "hello"})
# To the end and always the same text: a model that stops where it likes would make it a lottery of lengths.
STREAM = ("/v1/completions", {"prompt": "hi", "max_tokens": 200, "stream": True, "ignore_eos": True, "temperature": 0})
Asked = tuple[str, dict[str, object]]
Cells = tuple[float | str | None, ...]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=Path, default=CACHE / "llama" / "engine" / "llama-server")
    parser.add_argument("--model", type=Path, action="append", help="a GGUF file to measure besides the tiny one")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    rounds = 2 if options.small else options.rounds
    print(f"# {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, Python {sys.version.split()[0]}, {rounds} rounds")
    heads = "".join(f"{name:>13}" for name in ("llama-server", "its router", "sparkguard"))
    print(f"{'ms unless said':48}{heads}{'- server':>10}{'/ server':>10}{'/ router':>10}")
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        tiny = make_model(home / "tiny.gguf")
        for model in (tiny, *(options.model or sorted(QUICKSTART.glob("*.gguf")))):
            work = home / model.stem
            work.mkdir()
            print(f"# {'a tiny model' if model is tiny else model.stem}")
            show(latency(options.engine, model, work, rounds, few=max(2, rounds // 50)))
        print("# under load, the tiny model")
        clients, names, requests = (8, 4, 40) if options.small else (200, 20, 10_000)
        show(crowd(options.engine, tiny, home, clients, names))
        show(growth(options.engine, tiny, home, requests))
        show(listing(home, 20 if options.small else 500))
    return 0


def latency(program: Path, model: Path, work: Path, rounds: int, few: int) -> Iterator[tuple[str, Cells]]:
    """A short answer, a stream, and a swap. few: of what takes long."""
    models = link_models(work / "models", model, ["a", "b"])
    with ExitStack() as stack:
        contenders = [
            stack.enter_context(alone(program, model)),
            stack.enter_context(router(program, models, 1)),
            stack.enter_context(sparkguard(program, models, 1, work)),
        ]
        workloads = (("tokenize", TOKENIZE, rounds), ("chat of 1 token", CHAT, rounds), ("stream of 200", STREAM, few))
        for name, asked, count in workloads:
            times = in_turn(contenders, asked, count)
            yield f"{name}, p50", tuple(percentile(each, 0.5) for each in times)
            if count >= 100:
                yield f"{name}, p99", tuple(percentile(each, 0.99) for each in times)
        swaps: list[list[float]] = [[], [], []]
        bare = []
        for turn in range(few):
            swaps[0].append(start_by_hand(program, model, *of(CHAT, "a")))
            for times_of, contender in zip(swaps[1:], contenders[1:], strict=True):
                times_of.append(contender.client.ask(*of(CHAT, "ba"[turn % 2])))
            bare.append(start_by_hand(program, model, *of(CHAT, "a"), GGML_DISABLE_VULKAN="1"))
        by_hand, other, ours = (percentile(each, 0.5) for each in swaps)
        yield "swap to first token; server: start by hand", (by_hand, other, ours)
        # As a runner starts it: with a build that has Vulkan, half of a tiny model's start are that one's drivers.
        yield "the same; server: by hand without Vulkan", (percentile(bare, 0.5), None, ours)


def in_turn(contenders: list[Contender], asked: Asked, count: int) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in contenders]
    for turn in range(count + 1):
        for times_of, contender in zip(times, contenders, strict=True):
            took = contender.client.ask(*of(asked, "a"))
            if turn:  # the first one may load the model
                times_of.append(took)
    return times


def crowd(program: Path, model: Path, home: Path, clients: int, names: int) -> Iterator[tuple[str, Cells]]:
    """All clients at once, on more models than may be loaded."""
    all_names = [f"m{number}" for number in range(names)]
    models = link_models(home / "crowd", model, all_names)
    rows: dict[str, list[float | str | None]] = {"requests answered": [None], "longest wait, s": [None]}
    for contest in (router(program, models, 2), sparkguard(program, models, 2, home / "crowd-home")):
        with contest as contender:
            waits, failed = at_once(contender.port, clients, all_names)
            rows["requests answered"].append(f"{len(waits)}/{len(waits) + len(failed)}")
            rows["longest wait, s"].append(max(waits, default=0) / 1000)
    for name, cells in rows.items():
        yield f"{clients} clients, {names} models, 2 loaded: {name}", tuple(cells)


def at_once(port: int, clients: int, names: list[str]) -> tuple[list[float], list[str]]:
    """Milliseconds of those that were answered, and what became of the others."""
    waits: list[float] = []
    failed: list[str] = []
    ready = threading.Barrier(clients)

    def one(name: str) -> None:
        client = Client(port)
        ready.wait()
        try:
            waits.append(client.ask(*of(CHAT, name)))
        except (Failed, OSError) as error:
            failed.append(str(error))
        finally:
            client.close()

    threads = [threading.Thread(target=one, args=(names[number % len(names)],)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return waits, failed


def growth(program: Path, model: Path, home: Path, requests: int) -> Iterator[tuple[str, Cells]]:
    """Of the one process that stays, once it has seen a tenth of the requests."""
    models = link_models(home / "growth", model, ["a"])
    held: list[float | str | None] = [None]
    grown: list[float | str | None] = [None]
    for contest in (router(program, models, 1), sparkguard(program, models, 1, home / "growth-home")):
        with contest as contender:
            for _ in range(requests // 10):
                contender.client.ask(*of(TOKENIZE, "a"))
            before = contender.resident_mb()
            for number in range(requests):
                contender.client.ask(*of(CHAT if number % 10 == 0 else TOKENIZE, "a"))
            held.append(contender.resident_mb())
            grown.append(contender.resident_mb() - before)
    yield f"memory after {requests} requests, MB", tuple(held)
    yield f"its growth over {requests} requests, MB", tuple(grown)


def listing(home: Path, count: int) -> Iterator[tuple[str, Cells]]:
    """The router lists names alone; sparkguard lists what each model needs."""
    for name, took, known in library.measure(home / "library", count, turns=3):
        yield f"{count} models, {name}: ms", (None, None, took)
        yield f"{count} models, {name}: with needs", (None, None, str(known))


def of(asked: Asked, model: str) -> Asked:
    path, body = asked
    return path, {"model": model, **body}


def percentile(times: list[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(len(times) * share))]


def show(rows: Iterator[tuple[str, Cells]]) -> None:
    for name, cells in rows:
        server, other, ours = cells
        columns = cell(server), cell(other), cell(ours), more(ours, server), ratio(ours, server), ratio(ours, other)
        print(f"{name:48}{''.join(columns)}".rstrip(), flush=True)


def cell(value: float | str | None) -> str:
    return f"{value:>13}" if isinstance(value, str) else " " * 13 if value is None else f"{value:>13.2f}"


def more(one: float | str | None, other: float | str | None) -> str:
    return f"{one - other:>10.2f}" if isinstance(one, float) and isinstance(other, float) else " " * 10


def ratio(one: float | str | None, other: float | str | None) -> str:
    return f"{one / other:>10.2f}" if isinstance(one, float) and isinstance(other, float) and other > 0 else " " * 10


if __name__ == "__main__":
    sys.exit(main())
