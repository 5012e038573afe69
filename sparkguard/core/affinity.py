"""Which cores a server may use, so that the desktop keeps the rest."""

from __future__ import annotations

from sparkguard.core.record import Record
from sparkguard.core.share import WHOLE


class Core(Record):
    """One logical CPU: which kind of core it is (its capacity, any equal numbers) and which CPU it shares a core with."""

    cpu: int
    capacity: int = 0
    first_sibling: int | None = None  # lowest CPU of the same physical core; None: itself


def cores_for(share: int, cores: tuple[Core, ...]) -> tuple[int, ...]:
    """floor(share x cores) CPUs, at least 1, taken evenly from every kind of core; share 1.0 is all.

    On mixed cores (GB10: ten A725 and ten X925) the first n by number would leave the desktop one kind only, so each
    kind gives its part (largest remainder first), and each keeps a core as long as there are enough to keep.
    Hyperthreads of one core go together: half a core is no room for a desktop.
    """
    count = max(1, share * len(cores) // WHOLE)
    kinds: dict[int, list[Core]] = {}
    for core in sorted(cores, key=lambda core: (core.first_sibling if core.first_sibling is not None else core.cpu, core.cpu)):
        kinds.setdefault(core.capacity, []).append(core)
    kept = len(cores) - count
    most = {kind: len(members) - (1 if kept >= len(kinds) else 0) for kind, members in kinds.items()}
    part = {kind: min(most[kind], count * len(members) // len(cores)) for kind, members in kinds.items()}
    # Slowest kind last in doubt: the server gets the odd fast core, the desktop the odd slow one.
    order = sorted(kinds, key=lambda kind: (-(count * len(kinds[kind]) % len(cores)), -kind))
    while (missing := count - sum(part.values())) > 0:
        for kind in [kind for kind in order if part[kind] < most[kind]][:missing]:
            part[kind] += 1
    return tuple(sorted(core.cpu for kind, members in kinds.items() for core in members[: part[kind]]))


def format_cpus(cpus: tuple[int, ...]) -> str:
    """'0-3,5-8': the kernel's list format."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def parse_cpus(text: str) -> tuple[int, ...]:
    """The inverse of format_cpus(). Raises ValueError."""
    cpus: list[int] = []
    for run in text.strip().split(","):
        first, dash, last = run.partition("-")
        if run:
            cpus.extend(range(int(first), int(last if dash else first) + 1))
    return tuple(cpus)
