"""Speed of the GGUF reader and of the estimate: `python bench/gguf.py`.

Headers are made as the tests make them. Files are read from the page cache, so this is the time of the code and not of a disk.
Prints a table; asserts nothing.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests")]

import gguf_shapes  # noqa: E402

from sparkguard.core.estimate import Ask, estimate  # noqa: E402
from sparkguard.probe.gguf import read_model  # noqa: E402

TURNS = 21
MODELS = 500


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        print(f"# median of {TURNS} turns, Python {sys.version.split()[0]}")
        headers = {
            "70B, 723 tensors, no vocabulary": gguf_shapes.SHAPES["llama-70b"](),
            "262,144 tokens with scores and types": vocabulary(scores=True),
            "262,144 tokens and 514,906 merges": vocabulary(merges=514_906),
        }
        for name, maker in headers.items():
            path = written(root, maker)
            size = path.stat().st_size - sum(tensor.bytes for tensor in read_model(str(path)).tensors)
            print(f"read    {name:40} {size / 2**20:6.1f} MB {milliseconds(lambda path=path: read_model(str(path))):8.2f} ms")
        for name in ("llama-8b", "qwen3moe-30b", "gemma3n-e4b", "deepseek3-671b"):
            model = read_model(str(written(root, gguf_shapes.SHAPES[name]())))
            print(f"needs   {name:40} {'':9} {milliseconds(lambda model=model: estimate(model, Ask())):8.2f} ms")
        paths = [written(root, gguf_shapes.SHAPES["llama-8b"](), f"{number}.gguf") for number in range(MODELS)]
        began = time.perf_counter()
        for path in paths:
            estimate(read_model(str(path)), Ask())
        print(f"library {MODELS} models, header and needs {'':25} {time.perf_counter() - began:8.2f} s")
    return 0


def vocabulary(scores: bool = False, merges: int = 0) -> gguf_shapes.Maker:
    """A small model with a large vocabulary, in the order in which converters write it."""
    maker = gguf_shapes.Maker("llama", 1, 256, 262_144, 8192)
    words = [f"▁word{number}"[: 4 + number % 9] for number in range(262_144)]
    maker.keys["tokenizer.ggml.tokens"] = words
    if scores:
        maker.keys["tokenizer.ggml.scores"] = [0.0] * len(words)
    maker.keys["tokenizer.ggml.token_type"] = [1] * len(words)
    if merges:
        maker.keys["tokenizer.ggml.merges"] = [f"{number % 997} {number % 991}" for number in range(merges)]
    maker.keys["tokenizer.ggml.bos_token_id"] = 1
    maker.ends()
    return maker


def written(root: Path, maker: gguf_shapes.Maker, name: str = "model.gguf") -> Path:
    path = root / name
    maker.write(path)
    return path


def milliseconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(TURNS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
