"""A verdict in words, to the letter, and its twin in JSON."""

from __future__ import annotations

import json
import textwrap

import pytest

from sparkguard.core import explain
from sparkguard.core.admission import admit
from sparkguard.core.share import WHOLE, bytes_of, parse_share
from sparkguard.core.types import DISCRETE, RAM, UNIFIED, UNKNOWN, Budget, Claim, Hold, MemoryPool, Verdict, Wanted
from sparkguard.errors import SparkguardError

GIB = 1 << 30
# What a DGX Spark says of itself: MemTotal and, idle, MemAvailable.
SPARK = MemoryPool("ram", UNIFIED, 127600748 << 10, 118566368 << 10, "NVIDIA GB10")
CARD = MemoryPool("gpu0", DISCRETE, 24 * GIB, 23 * GIB, "NVIDIA RTX 4090")
PLAIN = MemoryPool("ram", RAM, 23 * GIB, 20 * GIB)
MUTE = MemoryPool("gpu0", UNKNOWN, None)
BUDGET = Budget(parse_share("0.80"))


def hold(share: str | None, pool: MemoryPool = SPARK, taken: bool = True) -> Hold:
    if share is None or pool.total_bytes is None:
        return Hold(pool.id, share and parse_share(share), None)
    amount = bytes_of(parse_share(share), pool.total_bytes)
    return Hold(pool.id, parse_share(share), amount, amount if taken else 0)


def start(name: str, share: str, pool: MemoryPool = SPARK, source: str = "argument") -> Wanted:
    return Wanted(name, (hold(share, pool, False),), source)


EMBEDDINGS = Claim(8123, "vllm", (hold("0.10"),), "argument", None, 8001)
IN_UNIT = EMBEDDINGS.replace(unit="vllm-embeddings.service")
OLLAMA = Claim(412, "ollama", (hold(None, PLAIN),), "unknown", None, 11434, grows=False, note="loads models on demand")
STARTING = Claim(31, "vllm", (hold("0.30", PLAIN),), "reservation", "vllm-model@x.service", 8000, note="start of x under way")
BY_HAND = Claim(32, "vllm", (hold("0.20", PLAIN),), "argument")
ORPHAN = Claim(77, "vllm", (hold(None),), "unknown", orphan=True, note="its server is gone")
SGLANG = Claim(78, "sglang", (hold(None),), "unknown", "chat.service", 30000, note="no --mem-fraction-static")

MISSION = """\
FATAL: longcontext wants --gpu-memory-utilization 0.95, which would
       take the GPU-memory total to 1.05, over the 0.80 budget.

       Each fraction is a share of TOTAL SYSTEM RAM (unified memory),
       not free headroom. Already reserved (0.10):
  pid 8123 port 8001 at 0.10
"""


def test_the_text_that_was_asked_for() -> None:
    """The refusal of longcontext 0.95 beside 0.10 begins with the customer's words, line breaks included."""
    verdict = admit(BUDGET, (SPARK,), (EMBEDDINGS,), start("longcontext", "0.95"))
    assert explain.describe(verdict).startswith(MISSION)


TEXTS: dict[str, tuple[Verdict, str]] = {
    "never_fits": (
        admit(BUDGET, (SPARK,), (EMBEDDINGS,), start("longcontext", "0.95")),
        MISSION
        + """
       What would help:
         the largest share that fits now is 0.70 (85.2 GiB): VLLM_GPU_MEM_UTIL=0.70
         at 0.95 it can never be admitted, unless you raise VLLM_MEM_BUDGET and the machine has the room""",
    ),
    "over_budget": (
        admit(BUDGET, (SPARK,), (IN_UNIT,), start("vision-agent", "0.75")),
        """\
        FATAL: vision-agent wants --gpu-memory-utilization 0.75, which would
               take the GPU-memory total to 0.85, over the 0.80 budget.

               Each fraction is a share of TOTAL SYSTEM RAM (unified memory),
               not free headroom. Already reserved (0.10):
          pid 8123 port 8001 at 0.10 vllm-embeddings.service

               What would help:
                 the largest share that fits now is 0.70 (85.2 GiB): VLLM_GPU_MEM_UTIL=0.70
                 or stop vllm-embeddings.service: systemctl --user stop 'vllm-embeddings.service'""",
    ),
    "over_budget, several to stop, no GPU": (
        admit(BUDGET, (PLAIN,), (STARTING, BY_HAND, OLLAMA), start("big", "0.70", PLAIN)),
        """\
        FATAL: big wants --gpu-memory-utilization 0.70, which would
               take the GPU-memory total to 1.20, over the 0.80 budget.

               Each fraction is a share of TOTAL SYSTEM RAM (no GPU is used, 23.0 GiB),
               not free headroom. Already reserved (0.50 and unknown):
          pid 31 port 8000 at 0.30 vllm-model@x.service starting (start of x under way)
          pid 32 at 0.20
          pid 412 port 11434 at unknown ollama (loads models on demand)

               What would help:
                 the largest share that fits now is 0.30 (6.9 GiB): VLLM_GPU_MEM_UTIL=0.30
                 or stop all of these:
                   vllm-model@x.service: systemctl --user stop 'vllm-model@x.service'
                   pid 32: kill 32""",
    ),
    "over_budget, nothing left, one card": (
        admit(BUDGET, (CARD,), (Claim(5, "vllm", (hold("0.80", CARD),), "argument"),), start("second", "0.40", CARD)),
        """\
        FATAL: second wants --gpu-memory-utilization 0.40, which would
               take the GPU-memory total to 1.20, over the 0.80 budget.

               Each fraction is a share of the TOTAL VRAM of gpu0 (NVIDIA RTX 4090, 24.0 GiB),
               not free headroom. Already reserved (0.80):
          pid 5 at 0.80

               What would help:
                 stop pid 5: kill 5""",
    ),
    "never_fits, vLLM's own default": (
        admit(BUDGET, (SPARK,), (), start("bare", "0.92", source="default")),
        """\
        FATAL: bare wants --gpu-memory-utilization 0.92 (vLLM's own default: no share is set), which would
               take the GPU-memory total to 0.92, over the 0.80 budget.

               Each fraction is a share of TOTAL SYSTEM RAM (unified memory),
               not free headroom. Nothing is reserved yet.

               What would help:
                 the largest share that fits now is 0.80 (97.4 GiB): VLLM_GPU_MEM_UTIL=0.80
                 at 0.92 it can never be admitted, unless you raise VLLM_MEM_BUDGET and the machine has the room""",
    ),
    "never_fits, by its bytes": (
        admit(Budget(WHOLE), (SPARK,), (), start("all", "0.97")),
        """\
        FATAL: all wants --gpu-memory-utilization 0.97, 118.0 GiB, which with the 6.1 GiB
               that stay free is more than system RAM (unified memory) has (121.7 GiB).

               Each fraction is a share of TOTAL SYSTEM RAM (unified memory),
               not free headroom. Nothing is reserved yet.

               What would help:
                 the largest share that fits now is 0.87 (105.9 GiB): VLLM_GPU_MEM_UTIL=0.87
                 at 0.97 it can never be admitted, unless you lower SPARK_MEMORY_RESERVE_MB and the machine has the room""",
    ),
    "memory_taken": (
        admit(
            BUDGET,
            (SPARK.replace(available_bytes=20 * GIB),),
            (IN_UNIT.replace(holds=(hold("0.10", taken=False),)),),
            start("vision-agent", "0.40"),
        ),
        """\
        FATAL: vision-agent wants --gpu-memory-utilization 0.40, 48.7 GiB,
               but only 20.0 GiB of system RAM (unified memory) is available, of which 6.1 GiB stays free,
               and servers that still load will take 12.2 GiB.

               Each fraction is a share of TOTAL SYSTEM RAM (unified memory),
               not free headroom. Already reserved (0.10):
          pid 8123 port 8001 at 0.10 vllm-embeddings.service

               What would help:
                 the largest share that fits now is 0.01 (1.2 GiB): VLLM_GPU_MEM_UTIL=0.01
                 programs outside the budget hold the rest: close some, or see `sparkguard status`""",
    ),
    "memory_taken, and one to stop": (
        admit(BUDGET, (SPARK.replace(available_bytes=50 * GIB),), (IN_UNIT,), start("vision-agent", "0.40")),
        """\
        FATAL: vision-agent wants --gpu-memory-utilization 0.40, 48.7 GiB,
               but only 50.0 GiB of system RAM (unified memory) is available, of which 6.1 GiB stays free.

               Each fraction is a share of TOTAL SYSTEM RAM (unified memory),
               not free headroom. Already reserved (0.10):
          pid 8123 port 8001 at 0.10 vllm-embeddings.service

               What would help:
                 the largest share that fits now is 0.36 (43.8 GiB): VLLM_GPU_MEM_UTIL=0.36
                 or stop vllm-embeddings.service: systemctl --user stop 'vllm-embeddings.service'
                 programs outside the budget hold the rest: close some, or see `sparkguard status`""",
    ),
    "orphan": (
        admit(BUDGET, (SPARK,), (ORPHAN,), start("chat", "0.40")),
        """\
        FATAL: chat wants --gpu-memory-utilization 0.40, but beside it runs an engine whose server is gone:
               vllm pid 77 (its server is gone).

               Each fraction is a share of TOTAL SYSTEM RAM (unified memory),
               not free headroom. Already reserved (0.00 and unknown):
          pid 77 at unknown (its server is gone)

               What would help:
                 end it: kill 77 (kill -9 77 if it is still there a minute later)
                 or count it as nothing: VLLM_MEM_ALLOW_UNKNOWN=1 (the live check still holds)""",
    ),
    "unknown_holder": (
        admit(BUDGET, (SPARK,), (SGLANG,), start("chat", "0.40")),
        """\
        FATAL: chat wants --gpu-memory-utilization 0.40, but beside it runs a server whose size nobody knows:
               sglang pid 78 (no --mem-fraction-static).

               Each fraction is a share of TOTAL SYSTEM RAM (unified memory),
               not free headroom. Already reserved (0.00 and unknown):
          pid 78 port 30000 at unknown chat.service sglang (no --mem-fraction-static)

               What would help:
                 end it: systemctl --user stop 'chat.service'
                 or count it as nothing: VLLM_MEM_ALLOW_UNKNOWN=1 (the live check still holds)""",
    ),
    "unknown_pool": (
        admit(BUDGET, (MUTE,), (), start("chat", "0.40", MUTE)),
        """\
        FATAL: chat wants --gpu-memory-utilization 0.40, but the memory of gpu0 cannot be read.

               Each fraction is a share of the memory of gpu0,
               not free headroom. Nothing is reserved yet.

               What would help:
                 see `sparkguard doctor`; SPARK_MEMORY_POOL=ram|unified|discrete says it by hand
                 or VLLM_MEM_ALLOW_UNKNOWN=1: the shares alone then decide""",
    ),
    "fits": (
        admit(BUDGET, (SPARK,), (EMBEDDINGS,), start("longcontext", "0.70")),
        "longcontext is admitted at 0.70 (85.2 GiB): 0.80 of the 0.80 budget of system RAM (unified memory)",
    ),
    "fits on two cards": (
        admit(
            BUDGET,
            (CARD, CARD.replace(id="gpu1")),
            (),
            Wanted("wide", (hold("0.40", CARD, False), hold("0.40", CARD.replace(id="gpu1"), False))),
        ),
        "wide is admitted at 0.40 (9.6 GiB): 0.40 of the 0.80 budget of gpu0 (NVIDIA RTX 4090), "
        "0.40 of the 0.80 budget of gpu1 (NVIDIA RTX 4090)",
    ),
}


@pytest.mark.parametrize(("verdict", "text"), TEXTS.values(), ids=TEXTS)
def test_text(verdict: Verdict, text: str) -> None:
    """Each reason says what was wanted, the numbers, who holds the rest, and what would help."""
    assert explain.describe(verdict) == textwrap.dedent(text)


@pytest.mark.parametrize(("verdict", "text"), TEXTS.values(), ids=TEXTS)
def test_one_line_for_a_units_status(verdict: Verdict, text: str) -> None:
    """The summary is one line, says which way it went, and holds the first sentence of the text."""
    summary = explain.summary(verdict)
    assert summary.startswith("admitted: " if verdict.admitted else "refused: ")
    assert "\n" not in summary
    assert summary.partition(": ")[2].split()[-1] in text


STATUSES = {
    "fits": 0,
    "over_budget": 75,
    "memory_taken": 75,
    "orphan": 75,
    "unknown_holder": 75,
    "never_fits": 78,
    "unknown_pool": 71,
}


@pytest.mark.parametrize("verdict", [verdict for verdict, _ in TEXTS.values()], ids=TEXTS)
def test_status(verdict: Verdict) -> None:
    """0 admitted, 75 not now, 78 never, 71 when the machine does not tell."""
    assert explain.status_of(verdict) == STATUSES[verdict.reason]


def test_every_reason_has_a_text() -> None:
    """No reason of types.Verdict is left out of the table above."""
    assert {verdict.reason for verdict, _ in TEXTS.values()} == set(STATUSES)


def test_room_is_that_of_all_pools() -> None:
    """For a start on two cards the share that is offered fits on both."""
    other = CARD.replace(id="gpu1")
    claims = (Claim(1, "vllm", (hold("0.60", CARD),), "argument"), Claim(2, "vllm", (hold("0.70", other),), "argument"))
    wanted = Wanted("wide", (hold("0.40", CARD, False), hold("0.40", other, False)))
    assert "the largest share that fits now is 0.10 (2.4 GiB)" in explain.describe(admit(BUDGET, (CARD, other), claims, wanted))


def test_a_command_has_the_name_that_systemd_knows() -> None:
    """An escaped instance is shown plain, but the command that stops it has its escapes: my-model is another unit."""
    claim = IN_UNIT.replace(unit="vllm-model@my-model.service", service=r"vllm-model@my\x2dmodel.service")
    text = explain.describe(admit(BUDGET, (SPARK,), (claim,), start("vision-agent", "0.75")))
    assert "at 0.10 vllm-model@my-model.service\n" in text
    assert r"stop vllm-model@my-model.service: systemctl --user stop 'vllm-model@my\x2dmodel.service'" in text


MANAGERS = {
    "user": "systemctl --user stop 'ollama.service'",
    "system": "sudo systemctl stop 'ollama.service'",
    None: "kill 8123",
}


@pytest.mark.parametrize(("manager", "words"), MANAGERS.items(), ids=["ours", "the system's", "another user's"])
def test_whom_to_ask_for_its_end(manager: str | None, words: str) -> None:
    """A unit is stopped by the manager that runs it; another user's cannot be reached, its process may be by root."""
    claim = IN_UNIT.replace(pid=8123, unit="ollama.service", service="ollama.service", manager=manager)
    assert words in explain.describe(admit(BUDGET, (SPARK,), (claim,), start("vision-agent", "0.75")))


def test_the_supervisor_of_the_runners_need_not_end() -> None:
    """Its models are what holds the memory; with another server beside them, both are named."""
    runners = Claim(1186, "llama-server", (hold("0.20"),), "reservation", note="all models of sparkguard serve")
    text = explain.describe(admit(BUDGET, (SPARK,), (runners,), start("x", "0.70")))
    ask = "sparkguard unload MODEL; with VLLM_MEM_ASK_RUNNERS=1 a start has idle ones unloaded"
    assert f"or stop models of the runners: {ask}" in text
    assert "kill" not in text
    text = explain.describe(admit(BUDGET, (SPARK,), (runners, IN_UNIT), start("x", "0.80")))
    assert f"           models of the runners: {ask}\n" in text
    assert "           vllm-embeddings.service: systemctl --user stop 'vllm-embeddings.service'" in text


def test_a_note_cannot_command_the_terminal() -> None:
    """Another program's argument is shown without its control characters, line breaks and stray bytes."""
    note = ORPHAN.replace(note="a\x1b[2Jb\nc\udcff")
    text = explain.describe(admit(BUDGET, (SPARK,), (note,), start("chat", "0.40")))
    assert "(a?[2Jb?c?)" in text


# Of the agreed interface, at each level. MORE stands beside it: what a script needs to say why, and the override, which must be
# visible.
KEYS = {
    "": {"schema_version", "verdict", "reason", "name", "wanted", "budget", "pools", "claims", "hint"},
    "wanted": {"share", "bytes"},
    "budget": {"share", "reserve_bytes"},
    "pools": {"id", "kind", "total_bytes", "available_bytes", "claimed_share"},
    "claims": {"pid", "unit", "engine", "port", "share", "bytes", "devices", "source"},
}
MORE = {
    "": {"allow_unknown", "overridden"},
    "wanted": {"devices", "source"},
    "budget": set[str](),
    "pools": {"name"},
    "claims": {"orphan", "note"},
}


@pytest.mark.parametrize("verdict", [verdict for verdict, _ in TEXTS.values()], ids=TEXTS)
def test_keys(verdict: Verdict) -> None:
    """Admitted or refused, the object has the same keys, and it survives JSON."""
    entry = explain.as_json(verdict)
    assert json.loads(json.dumps(entry)) == entry
    for level in KEYS:
        values = entry[level] if level else entry
        for value in values if isinstance(values, list) else [values]:
            assert value.keys() == KEYS[level] | MORE[level]


def test_an_error_has_the_same_keys() -> None:
    """A script that reads the object finds every key of a verdict, the complaint in the hint, and unknown as null."""
    entry = explain.error_json("m", SparkguardError("VLLM_PORT is no port number", "it takes: 1 to 65535"))
    like = explain.as_json(admit(BUDGET, (SPARK,), (), start("m", "0.10")))
    assert list(entry) == list(like)
    assert all(entry[level].keys() == like[level].keys() for level in ("wanted", "budget"))
    assert (entry["verdict"], entry["reason"], entry["wanted"]["share"]) == ("refused", "error", None)
    assert entry["hint"] == "VLLM_PORT is no port number\nit takes: 1 to 65535"


def test_values() -> None:
    """Shares are decimal strings, bytes are whole numbers, and the facts are those of the text."""
    entry = explain.as_json(admit(BUDGET, (SPARK,), (IN_UNIT,), start("vision-agent", "0.75")))
    assert entry == {
        "schema_version": 1,
        "verdict": "refused",
        "reason": "over_budget",
        "name": "vision-agent",
        "wanted": {
            "share": "0.75",
            "bytes": bytes_of(parse_share("0.75"), SPARK.total_bytes or 0),
            "devices": ["ram"],
            "source": "argument",
        },
        "budget": {"share": "0.80", "reserve_bytes": bytes_of(parse_share("0.05"), SPARK.total_bytes or 0)},
        "pools": [
            {
                "id": "ram",
                "kind": "unified",
                "name": "NVIDIA GB10",
                "total_bytes": 127600748 << 10,
                "available_bytes": 118566368 << 10,
                "claimed_share": "0.10",
            }
        ],
        "claims": [
            {
                "pid": 8123,
                "unit": "vllm-embeddings.service",
                "engine": "vllm",
                "port": 8001,
                "share": "0.10",
                "bytes": bytes_of(parse_share("0.10"), SPARK.total_bytes or 0),
                "devices": ["ram"],
                "source": "argument",
                "orphan": False,
                "note": "",
            }
        ],
        "allow_unknown": False,
        "overridden": [],
        "hint": "the largest share that fits now is 0.70 (85.2 GiB): VLLM_GPU_MEM_UTIL=0.70\n"
        "or stop vllm-embeddings.service: systemctl --user stop 'vllm-embeddings.service'",
    }


def test_unknown_is_null() -> None:
    """What nobody knows is null, not 0: a holder's share and bytes, a port, a mute pool's sizes; admitted has no hint."""
    entry = explain.as_json(admit(BUDGET.replace(allow_unknown=True), (SPARK,), (ORPHAN,), start("chat", "0.40")))
    (claim,) = entry["claims"]
    assert (claim["share"], claim["bytes"], claim["port"], claim["unit"]) == (None, None, None, None)
    assert (entry["verdict"], entry["hint"], entry["overridden"]) == ("admitted", None, [77])
    (pool,) = explain.as_json(admit(BUDGET, (MUTE,), (), start("chat", "0.40", MUTE)))["pools"]
    assert (pool["total_bytes"], pool["available_bytes"]) == (None, None)


def test_a_claim_on_two_cards_is_one() -> None:
    """Its share is of each device, its bytes are of all of them; one unknown part makes the whole unknown."""
    other = CARD.replace(id="gpu1")
    claim = Claim(1, "vllm", (hold("0.50", CARD), hold("0.50", other)), "argument")
    entry = explain.claim_json(claim)
    assert (entry["share"], entry["bytes"], entry["devices"]) == ("0.50", 24 * GIB, ["gpu0", "gpu1"])
    entry = explain.claim_json(claim.replace(holds=(hold("0.50", CARD), hold(None, other))))
    assert (entry["share"], entry["bytes"]) == (None, None)
