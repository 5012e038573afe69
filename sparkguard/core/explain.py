"""A verdict in words, and its twin for --json: the same facts."""

from __future__ import annotations

from sparkguard.core.share import brief_share, bytes_of, format_share
from sparkguard.core.types import DISCRETE, UNIFIED, Claim, MemoryPool, PoolSum, Verdict
from sparkguard.errors import CONFIG, OK, OSERR, TEMPFAIL, SparkguardError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SCHEMA_VERSION = 1
_STATUS = {"fits": OK, "never_fits": CONFIG, "unknown_pool": OSERR}


def status_of(verdict: Verdict) -> int:
    """0 admitted, 78 can never be admitted, 71 the pool cannot be read, 75 not now."""
    return _STATUS.get(verdict.reason, TEMPFAIL)


def show(share: int | None) -> str:
    """For people: exact up to four decimals, else two, rounded up."""
    if share is None:
        return "unknown"
    return format_share(share) if share % 100_000 == 0 else brief_share(share)


def gib(amount_bytes: int) -> str:
    """'121.7 GiB'; below one GiB in MB, which is 2^20 bytes everywhere here."""
    return f"{amount_bytes / (1 << 30):.1f} GiB" if amount_bytes >= 1 << 30 else f"{-(-amount_bytes >> 20)} MB"


def describe(verdict: Verdict) -> str:
    """The text for stderr: one line when admitted, the FATAL text when refused."""
    return _admitted(verdict) if verdict.admitted else _fatal(verdict)


def summary(verdict: Verdict) -> str:
    """One line, for a unit's status."""
    if verdict.admitted:
        return "admitted: " + _admitted(verdict).partition(": ")[2]
    return "refused: " + " ".join(_opening(verdict, deciding(verdict)).removeprefix("FATAL: ").split())


def hint(verdict: Verdict) -> str | None:
    """What would help, as one sentence a line; None when admitted."""
    return None if verdict.admitted else "\n".join(_help(verdict, deciding(verdict)))


def deciding(verdict: Verdict) -> PoolSum:
    """The pool that the text speaks of."""
    return next((total for total in verdict.sums if total.pool.id == verdict.pool), verdict.sums[0])


def _admitted(verdict: Verdict) -> str:
    sums = ", ".join(
        f"{show(total.claimed_share + total.wanted_share)} of the {show(verdict.budget.share)} budget of {_pool_name(total.pool)}"
        for total in verdict.sums
        if total.wanted_share is not None
    )
    return f"{verdict.wanted.name} is admitted at {_amount(verdict, verdict.sums[0])}: {sums or 'share unknown'}"


def _amount(verdict: Verdict, total: PoolSum) -> str:
    size = f" ({gib(total.wanted_bytes)})" if total.wanted_bytes is not None else ""
    default = ", vLLM's own default, because no share is set" if verdict.wanted.source == "default" else ""
    return f"{show(total.wanted_share)}{size}{default}"


def _fatal(verdict: Verdict) -> str:
    total = deciding(verdict)
    claims = [claim for claim in verdict.claims if any(hold.pool == total.pool.id for hold in claim.holds)]
    lines = [_opening(verdict, total), ""]
    lines += ["       " + line for line in _what_of(total.pool)]
    if claims:
        unknown = any(hold.share is None for claim in claims for hold in claim.holds if hold.pool == total.pool.id)
        lines[-1] += f" Already reserved ({show(total.claimed_share)}{' and unknown' if unknown else ''}):"
        lines += [_holder(claim, total.pool) for claim in claims]
    else:
        lines[-1] += " Nothing is reserved yet."
    if verdict.wanted.note:
        lines.append(f"       ({verdict.wanted.name}: {verdict.wanted.note})")
    lines += ["", "       What would help:"]
    lines += ["         " + line for line in _help(verdict, total)]
    return "\n".join(lines)


def _opening(verdict: Verdict, total: PoolSum) -> str:
    name, flag, share = verdict.wanted.name, verdict.wanted.flag, show(total.wanted_share)
    if verdict.wanted.source == "default":
        share += " (vLLM's own default: no share is set)"
    if verdict.reason == "memory_taken":
        available, wanted = total.pool.available_bytes or 0, total.wanted_bytes or 0
        loading = (
            f",\n       and servers that still load will take {gib(total.outstanding_bytes)}" if total.outstanding_bytes else ""
        )
        return (
            f"FATAL: {name} wants {flag} {share}, {gib(wanted)},\n"
            f"       but only {gib(available)} of {_pool_name(total.pool)} is available, "
            f"of which {gib(total.reserve_bytes)} stays free{loading}."
        )
    if verdict.reason in ("orphan", "unknown_holder"):
        one = verdict.culprits[0]
        what = "an engine whose server is gone" if one.orphan else "a server whose size nobody knows"
        return f"FATAL: {name} wants {flag} {share}, but beside it runs {what}:\n       {one.engine} pid {one.pid}{_remark(one)}."
    if verdict.reason == "port_taken":
        who = _owner(verdict)
        return f"FATAL: {name} would fit at {share}, but its port {verdict.wanted.port} is taken by {who}."
    if verdict.reason == "unknown_pool":
        return f"FATAL: {name} wants {flag} {share}, but the memory of {_pool_name(total.pool)} cannot be read."
    reached = show(total.claimed_share + (total.wanted_share or 0))
    if verdict.reason == "never_fits" and not _over_budget_alone(verdict, total):
        return (
            f"FATAL: {name} wants {flag} {share}, {gib(total.wanted_bytes or 0)}, which with the {gib(total.reserve_bytes)}\n"
            f"       that stay free is more than {_pool_name(total.pool)} has ({gib(total.pool.total_bytes or 0)})."
        )
    return (
        f"FATAL: {name} wants {flag} {share}, which would\n"
        f"       take the GPU-memory total to {reached}, over the {show(verdict.budget.share)} budget."
    )


def _owner(verdict: Verdict) -> str:
    if not verdict.culprits:
        return "a program that is no inference server"
    one = verdict.culprits[0]
    return f"pid {one.pid} ({printable(one.unit or one.engine)})"


def _over_budget_alone(verdict: Verdict, total: PoolSum) -> bool:
    return (total.wanted_share or 0) > verdict.budget.share


def _pool_name(pool: MemoryPool) -> str:
    if pool.kind == UNIFIED:
        return "system RAM (unified memory)"
    return f"{pool.id} ({pool.name})" if pool.id != "ram" and pool.name else "system RAM" if pool.id == "ram" else pool.id


def _what_of(pool: MemoryPool) -> list[str]:
    if pool.kind == UNIFIED:
        return ["Each fraction is a share of TOTAL SYSTEM RAM (unified memory),", "not free headroom."]
    size = f", {gib(pool.total_bytes)}" if pool.total_bytes is not None else ""
    if pool.kind == DISCRETE:
        return [f"Each fraction is a share of the TOTAL VRAM of {pool.id} ({pool.name or 'GPU'}{size}),", "not free headroom."]
    if pool.id == "ram":
        return [f"Each fraction is a share of TOTAL SYSTEM RAM (no GPU is used{size}),", "not free headroom."]
    return [f"Each fraction is a share of the memory of {pool.id}{size},", "not free headroom."]


def _holder(claim: Claim, pool: MemoryPool) -> str:
    share = next((hold.share for hold in claim.holds if hold.pool == pool.id), None)
    port = f" port {claim.port}" if claim.port is not None else ""
    who = f" {printable(claim.unit)}" if claim.unit else ""
    engine = "" if claim.engine == "vllm" else f" {claim.engine}"
    start = " starting" if claim.source == "reservation" and claim.engine == "vllm" else ""
    return f"  pid {claim.pid}{port} at {show(share)}{who}{engine}{start}{_remark(claim)}"


def _remark(claim: Claim) -> str:
    return f" ({printable(claim.note)})" if claim.note else ""


def printable(text: str) -> str:
    """A note may hold another program's argument, a unit's name an escape: what a terminal would obey is '?'."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _end(claim: Claim) -> str:
    if claim.is_runners:  # its pid is the supervisor's, and that need not end
        return "sparkguard unload MODEL; with VLLM_MEM_ASK_RUNNERS=1 a start has idle ones unloaded"
    service = claim.service or claim.unit
    if not service or claim.orphan or claim.manager is None:
        return f"kill {claim.pid}"
    return f"systemctl --user stop '{service}'" if claim.manager == "user" else f"sudo systemctl stop '{service}'"


def _who(claim: Claim) -> str:
    return "models of the runners" if claim.is_runners else printable(claim.unit or f"pid {claim.pid}")


def _help(verdict: Verdict, total: PoolSum) -> list[str]:
    if verdict.reason in ("orphan", "unknown_holder"):
        # An engine that is still loading was seen to ignore SIGTERM for more than 30 s.
        lines = [
            f"end it: {_end(claim)}" + (f" (kill -9 {claim.pid} if it is still there a minute later)" if claim.orphan else "")
            for claim in verdict.culprits
        ]
        return [*lines, "or count it as nothing: VLLM_MEM_ALLOW_UNKNOWN=1 (the live check still holds)"]
    if verdict.reason == "unknown_pool":
        return [
            "see `sparkguard doctor`; SPARK_MEMORY_POOL=ram|unified|discrete says it by hand",
            "or VLLM_MEM_ALLOW_UNKNOWN=1: the shares alone then decide",
        ]
    if verdict.reason == "port_taken":
        port = verdict.wanted.port
        lines = [f"stop {_who(claim)}: {_end(claim)}" for claim in verdict.culprits]
        return [*(lines or [f"see who it is: ss -ltnp 'sport = :{port}'"]), "or choose another port: VLLM_PORT="]
    room = min(other.room_share for other in verdict.sums)
    size = f" ({gib(bytes_of(room, total.pool.total_bytes))})" if total.pool.total_bytes else ""
    lines = [f"the largest share that fits now is {show(room)}{size}: VLLM_GPU_MEM_UTIL={show(room)}"] if room > 0 else []
    stop = [f"{_who(claim)}: {_end(claim)}" for claim in verdict.culprits]
    if len(stop) > 1:
        lines += [("or " if lines else "") + "stop all of these:", *("  " + line for line in stop)]
    elif stop:
        lines.append(("or " if lines else "") + "stop " + stop[0])
    if verdict.reason == "never_fits":
        setting = "raise VLLM_MEM_BUDGET" if _over_budget_alone(verdict, total) else "lower SPARK_MEMORY_RESERVE_MB"
        lines.append(f"at {show(total.wanted_share)} it can never be admitted, unless you {setting} and the machine has the room")
    if verdict.reason == "memory_taken":
        lines.append("programs outside the budget hold the rest: close some, or see `sparkguard status`")
    return lines or ["wait until one of the above has ended"]


def as_json(verdict: Verdict) -> dict[str, Any]:
    """The object that --json prints; docs/reference.md describes every key."""
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": "admitted" if verdict.admitted else "refused",
        "reason": verdict.reason,
        "name": verdict.wanted.name,
        "wanted": {
            "share": _text(_largest(total.wanted_share for total in verdict.sums)),
            "bytes": _largest(total.wanted_bytes for total in verdict.sums),
            "devices": [total.pool.id for total in verdict.sums],
            "source": verdict.wanted.source,
        },
        "budget": {"share": _text(verdict.budget.share), "reserve_bytes": deciding(verdict).reserve_bytes},
        "pools": [pool_json(total.pool, total.claimed_share) for total in verdict.sums],
        "claims": [claim_json(claim) for claim in verdict.claims],
        "allow_unknown": verdict.budget.allow_unknown,
        "overridden": [claim.pid for claim in verdict.overridden],
        "hint": hint(verdict),
    }


def error_json(name: str, error: SparkguardError) -> dict[str, Any]:
    """The same object where there is no verdict, because the configuration or the machine cannot be read."""
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": "refused",
        "reason": "error",
        "name": name,
        "wanted": {"share": None, "bytes": None, "devices": [], "source": None},
        "budget": {"share": None, "reserve_bytes": None},
        "pools": [],
        "claims": [],
        "allow_unknown": False,
        "overridden": [],
        "hint": f"{error.message}\n{error.hint}" if error.hint else error.message,
    }


def pool_json(pool: MemoryPool, claimed_share: int) -> dict[str, Any]:
    return {
        "id": pool.id,
        "kind": pool.kind,
        "name": pool.name,
        "total_bytes": pool.total_bytes,
        "available_bytes": pool.available_bytes,
        "claimed_share": _text(claimed_share),
    }


def claim_json(claim: Claim) -> dict[str, Any]:
    """share is of each device; bytes are of all its devices together."""
    amounts = [hold.bytes for hold in claim.holds]
    return {
        "pid": claim.pid,
        "unit": claim.unit,
        "engine": claim.engine,
        "port": claim.port,
        "share": _text(_largest(hold.share for hold in claim.holds)),
        "bytes": None if None in amounts or not amounts else sum(amount or 0 for amount in amounts),
        "devices": [hold.pool for hold in claim.holds],
        "source": claim.source,
        "orphan": claim.orphan,
        "note": claim.note,
    }


def _largest(values: Any) -> int | None:
    found = list(values)
    return None if not found or None in found else max(found)


def _text(share: int | None) -> str | None:
    return None if share is None else format_share(share)
