"""`spark-serve bench` beside llama-benchy and `vllm bench serve`, on one server in one run.

    python bench/cluster_bench_peers.py --benchy VENV/bin/llama-benchy [--vllm VENV/bin/vllm] [--engine LLAMA_SERVER] [--rounds 3]

The three take turns. A machine that others use too is slower in one turn than in the next, so every number is also held to what
the server itself took for that very request (llama-server prints it): the ratios are of those, and the machine is not in them.
Needs the development environment, for the model. Prints a table; exits 1 where a ratio is more than 3 % off.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[1]
CACHE = Path(os.environ.get("SPARKGUARD_TEST_CACHE", "/var/cache/sparkguard-tests"))
MODEL = "bench"
PROMPT, OUTPUT = 1000, 64
LIMIT = 0.03
_TIMING = re.compile(r"task (\d+) \| +(prompt eval|eval) time = +([\d.]+) ms / +(\d+) tokens")


class Said(NamedTuple):
    """What a tool says of one request: seconds, and tokens per second."""

    ttft: float
    decode: float
    prefill: float


class Took(NamedTuple):
    """What the server says of it."""

    prompt_seconds: float
    prompt_tokens: int
    decode_seconds: float
    decoded: int


class Server:
    """A llama-server, and the timings that it prints."""

    def __init__(self, url: str, lines: Iterator[str]) -> None:
        self.url = url
        self._lines = lines
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._seen: dict[int, dict[str, tuple[float, int]]] = {}
        self._reader.start()

    def _read(self) -> None:
        for line in self._lines:
            if found := _TIMING.search(line):
                task, what, ms, tokens = found.groups()
                self._seen.setdefault(int(task), {})[what] = (float(ms) / 1000, int(tokens))

    def took(self) -> list[Took]:
        """Of the requests that were whole, in their order."""
        whole = [seen for _, seen in sorted(self._seen.items()) if len(seen) == 2]
        return [Took(*seen["prompt eval"], *seen["eval"]) for seen in whole]


@contextmanager
def served(engine: Path, folder: Path) -> Iterator[tuple[Server, Path]]:
    """The server with its model, and a folder with the model's tokenizer as the peers read one."""
    sys.path[0] = str(REPOSITORY / "tests")  # instead of this folder, whose gguf.py would hide the package of that name
    import mkgguf

    model = mkgguf.make(folder / "model.gguf", layers=8, width=512, heads=8, kv_heads=4, hidden=2048, context=8192)
    words = tokenizer(model, folder / "tokenizer")
    options = ["-t", "1", "-c", "8192", "-np", "1", "--cache-ram", "0", "--metrics", "--alias", MODEL, "--port", "0"]
    command = [engine, "-m", model, "--host", "127.0.0.1", *options]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stderr is not None
        try:
            heard = next((line for line in process.stderr if "listening on" in line), None)
            if heard is None:
                raise SystemExit(f"{engine} did not start")
            yield Server(heard.split("listening on", 1)[1].split()[0], iter(process.stderr)), words
        finally:
            process.kill()


def tokenizer(model: Path, folder: Path) -> Path:
    """The GGUF's vocabulary in the format of the hub."""
    import gguf

    fields = gguf.GGUFReader(model).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [pair.split(" ") for pair in fields["tokenizer.ggml.merges"].contents()]
    kinds = fields["tokenizer.ggml.token_type"].contents()
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    made = {
        "version": "1.0",
        "added_tokens": [{"id": at, "content": word, **flags} for at, word in enumerate(tokens) if kinds[at] != 1],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {word: at for at, word in enumerate(tokens)}, "merges": merges},
    }
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(made))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"})
    )
    return folder


@contextmanager
def book() -> Iterator[str]:
    """llama-benchy cuts its prompts from a book that it downloads; this one is ours, so that the run needs no network."""
    from sparkguard.cluster.bench.prompts import Prompts

    text = Prompts(1, "book").prefill(0, 400_000).encode()

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/book.txt"
        server.shutdown()


def call(command: list[str | Path], folder: Path, **env: str) -> str:
    environment = {**os.environ, "HOME": str(folder), "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", **env}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=folder, timeout=900)
    if done.returncode:
        raise SystemExit(f"{command[0]} ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    return done.stdout


def ours(url: str, folder: Path, count: int) -> list[Said]:
    command: list[str | Path] = [sys.executable, "-m", "sparkguard.cli.cluster", "bench", "run", "--json", "--url", url]
    options = ["--requests", str(count), "--max-tokens", str(OUTPUT), "--prompt-tokens", str(PROMPT)]
    record = json.loads(call([*command, *options], folder, SPARK_SERVE_STATE_DIR=str(folder / "state")).splitlines()[-1])
    requests = record["levels"][0]["requests"]
    return [Said(one["ttft_s"], one["decode_tokens_per_s"], one["prefill_client_tokens_per_s"]) for one in requests]


def benchy(program: Path, page: str, words: Path) -> Callable[[str, Path, int], list[Said]]:
    def run(url: str, folder: Path, count: int) -> list[Said]:
        out = folder / "benchy.json"
        command: list[str | Path] = [
            program,
            "--base-url",
            f"{url}/v1",
            "--model",
            MODEL,
            "--tokenizer",
            words,
            "--book-url",
            page,
        ]
        options = ["--pp", str(PROMPT), "--tg", str(OUTPUT), "--exact-tg", "--no-cache", "--runs", str(count), "--skip-coherence"]
        call([*command, *options, "--save-result", out, "--format", "json"], folder)
        made = json.loads(out.read_text())["benchmarks"][0]
        columns = (made[name]["values"] for name in ("e2e_ttft", "tg_throughput", "pp_throughput"))
        return [Said(ttft / 1000, decode, prefill) for ttft, decode, prefill in zip(*columns)]

    return run


def vllm_bench(program: Path, words: Path) -> Callable[[str, Path, int], list[Said]]:
    def run(url: str, folder: Path, count: int) -> list[Said]:
        out = folder / "vllm.json"
        command: list[str | Path] = [program, "bench", "serve", "--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]
        options = ["--dataset-name", "random", "--random-input-len", str(PROMPT - 20), "--random-output-len", str(OUTPUT)]
        limits = [
            "--num-prompts",
            str(count),
            "--max-concurrency",
            "1",
            "--ignore-eos",
            "--disable-tqdm",
            "--seed",
            str(os.getpid()),
        ]
        saved = ["--save-result", "--save-detailed", "--result-filename", out]
        call([*command, "--base-url", url, "--model", MODEL, "--tokenizer", words, *options, *limits, *saved], folder)
        made = json.loads(out.read_text())
        rows = zip(made["ttfts"], made["itls"], made["output_lens"], made["input_lens"])
        # Its time per output token, turned over; it has no rate of the prefill, so the prompt by its time to first token.
        return [Said(ttft, (output - 1) / sum(gaps), prompt / ttft) for ttft, gaps, output, prompt in rows if gaps]

    return run


class Held(NamedTuple):
    """A tool's numbers by the server's: 1 is what the server says."""

    ttft: float
    decode: float
    prefill: float


def held(said: Said, took: Took) -> Held:
    """The server counts its decoding from the first token on: one token fewer than it prints."""
    return Held(
        said.ttft / took.prompt_seconds,
        said.decode * took.decode_seconds / (took.decoded - 1),
        said.prefill * took.prompt_seconds / took.prompt_tokens,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=Path, default=CACHE / "llama" / "engine" / "llama-server")
    parser.add_argument("--benchy", type=Path, help="llama-benchy")
    parser.add_argument("--vllm", type=Path, default=CACHE / "vllm" / "bin" / "vllm")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=8, help="of each tool in each round")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, book() as page, served(options.engine, Path(name)) as (server, words):
        tools: dict[str, Callable[[str, Path, int], list[Said]]] = {"spark-serve bench": ours}
        if options.benchy:
            tools["llama-benchy"] = benchy(options.benchy, page, words)
        if options.vllm.exists():
            tools["vllm bench serve"] = vllm_bench(options.vllm, words)
        plain: dict[str, list[Said]] = {tool: [] for tool in tools}
        ratios: dict[str, list[Held]] = {tool: [] for tool in tools}
        for turn in range(options.rounds):
            names = list(tools)
            for tool in names[turn % len(names) :] + names[: turn % len(names)]:
                found = tools[tool](server.url, Path(name), options.requests)
                took = [one for one in server.took() if one.decoded == OUTPUT][-len(found) :]
                plain[tool] += found
                ratios[tool] += [held(*pair) for pair in zip(found, took)]
                # llama-server closes each connection that carried a stream and says that it keeps it: a client that takes its
                # word loses the next request, and the peers sometimes do.
                print(f"round {turn + 1}, {tool}: {len(found)} of {options.requests} requests", file=sys.stderr)
    off = report(plain, ratios)
    sys.exit(1 if off else 0)


def report(plain: dict[str, list[Said]], ratios: dict[str, list[Held]]) -> list[str]:
    """Medians; then each tool by the server, and ours by each peer. Returns what is more than LIMIT off."""
    columns = f"{'TTFT ms':>10}{'decode t/s':>12}{'prefill t/s':>13}   by the server:{'TTFT':>8}{'decode':>9}{'prefill':>9}"
    print(f"{'median':20}{columns}{'n':>5}")
    middle: dict[str, Held] = {}
    for tool, rows in plain.items():
        said = [statistics.median(column) for column in zip(*rows)]
        middle[tool] = Held(*(statistics.median(column) for column in zip(*ratios[tool])))
        print(
            f"{tool:20}{said[0] * 1000:10.1f}{said[1]:12.2f}{said[2]:13.1f}{'':17}"
            f"{middle[tool].ttft:9.4f}{middle[tool].decode:9.4f}{middle[tool].prefill:9.4f}{len(rows):5}"
        )
    us, *peers = middle
    off = []
    for peer in peers:
        parts = []
        for what in Held._fields:
            ratio = getattr(middle[us], what) / getattr(middle[peer], what)
            parts.append(f"{what} {ratio:.4f}")
            if abs(ratio - 1) > LIMIT:
                off.append(f"{peer}: {what}")
        print(f"{us} by {peer}: {', '.join(parts)}")
    return off


if __name__ == "__main__":
    main()
