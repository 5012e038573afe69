"""The example catalog's recipes before vLLM's own parser."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from guest import REPOSITORY

from sparkguard.cluster.catalog import read as catalog
from sparkguard.cluster.catalog import recipes
from sparkguard.core.cluster import Rank

EXAMPLE = catalog.load(REPOSITORY / "models.example.toml", example=True)
RANKS = [
    (model.name, rank)
    for model in EXAMPLE.models
    if model.wrapper in ("vllm", "dsv4")
    for rank in recipes.allocation(EXAMPLE, model, EXAMPLE.nodes).ranks
]


def arguments(rank: Rank) -> list[str]:
    """What `vllm serve` gets; the dsv4 image's entrypoint takes the word serve itself."""
    words = list(rank.create[rank.create.index(rank.image) + 1 :])
    return words[1:] if words[0] == "serve" else words


@pytest.fixture(scope="module")
def answers(vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """All ranks in one process: importing vLLM takes 10 s."""
    corpus = tmp_path_factory.mktemp("recipes") / "corpus.json"
    corpus.write_text(json.dumps([{"args": arguments(rank)} for _, rank in RANKS]))
    command = [str(vllm / "bin" / "python"), str(REPOSITORY / "tests" / "tools" / "vllm_parse.py"), str(corpus)]
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", '"'))][1:]


@pytest.mark.parametrize("number", range(len(RANKS)), ids=[f"{name}-{rank.rank}" for name, rank in RANKS])
def test_a_rank_is_what_vllm_understands(answers: list[Any], number: int) -> None:
    """vLLM's parser takes every flag of every rank, and reads the share, the port, the size and the rank's role that were meant.

    Values that only the recipe's own build knows (a parser's or a quantisation's name) are texts to this vLLM.
    """
    name, rank = RANKS[number]
    answer = answers[number]
    assert isinstance(answer, dict), answer
    told = {key: answer[key] for key in ("port", "tp", "nodes", "headless")}
    assert told == {"port": 8000, "tp": 2, "nodes": 2, "headless": rank.rank == 1}
    assert round(answer["share"] * 10**9) == rank.holds[0].share
    assert answer["model"] == (EXAMPLE.model(name).serve_path or EXAMPLE.model(name).hf_id)
