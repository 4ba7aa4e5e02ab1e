"""Chapter 25 · The energy of a run: joules a step, a token and by rank.

    meter = Meter("cpu")                            # on every rank, before the first step
    meter.read()                                    # at the end of each step: cheap, and no
                                                    wrap-around is missed
    records = gather_records(world, meter.record())
    energy = energy_of_run(records, steps=500, tokens=500 * 2048)       # on rank 0

    source              joules                                      of what
    nvml                the GPU's counter                           this GPU, all programs on it
    rapl                counters of packages and memory modules     this host, all programs on it
    estimate            busy seconds × watts                        this rank; no counter was read

Ranks that read the same counter share its joules: the counter counts once, and each rank gets a
part in proportion to its busy seconds. Busy seconds are the processor time of all threads of the
rank's process, or of one thread if the rank is a thread. The estimate of a rank on a GPU takes all
seconds as busy. The watts are those of one busy core or of the GPU; without --watts they are
assumed.

notes: N2 §12.3
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minidist.observe.energy_counters import POWERCAP, open_counters

ASSUMED_WATTS = {"cpu": 10.0, "cuda": 400.0}
"""Watts of one busy core with its part of the package, and of one busy GPU. An order of magnitude,
not a measurement: a Xeon Platinum 8280 is specified at 205 W for 28 cores, GPUs of
simulate/clusters.toml at 300 to 1000 W."""

HOW = {
    "rapl": "counters of packages and memory count all programs on a host",
    "nvml": "a GPU's counter counts all programs on it",
    "estimate": "busy seconds × watts; no energy counter was read",
}
SHARED = "ranks that share a counter share its joules by busy seconds"


class Meter:
    """A meter of one rank's energy, from its creation on.

    Args:    device: "cpu" or "cuda"; gpu: its bus id; watts: for the estimate (None:
             ASSUMED_WATTS);
             is_thread: the rank is one of several threads of its process, and makes all calls;
             powercap: the tree of RAPL's zones.
    Attributes: problem: one line on why existing counters cannot be read; None if they can, or if
                there are none.
    """

    def __init__(
        self,
        device: str = "cpu",
        *,
        gpu: str | None = None,
        watts: float | None = None,
        is_thread: bool = False,
        powercap: Path = POWERCAP,
    ) -> None:
        self._clock = (
            time.perf_counter
            if device == "cuda"
            else time.thread_time
            if is_thread
            else time.process_time
        )
        self._counters = open_counters(device, gpu=gpu, powercap=powercap)
        self.source = self._counters.source
        self.problem = self._counters.problem
        self.watts = watts or ASSUMED_WATTS[device]
        self.assumed = watts is None
        self._start, self._busy, self._read = self._clock(), 0.0, self._counters.read()
        self._stopped = False

    def read(self) -> float:
        """Return the joules so far: of all counters that this rank reads, or its estimate.

        Cost:    a system call per counter.
        """
        if not self._stopped:
            self._busy, self._read = self._clock() - self._start, self._counters.read()
        return sum(self._read.values()) / 1e6 if self._read else self._busy * self.watts

    def stop(self) -> None:
        """Read for the last time and close the counters; later calls return this reading. A second
        call changes nothing."""
        self.read()
        self._stopped = True
        self._counters.close()

    def record(self) -> dict[str, Any]:
        """Return this rank's record for energy_of_run."""
        self.read()
        return {
            "source": self.source,
            "busy_seconds": self._busy,
            "microjoules": self._read,
            "watts": None if self._read else self.watts,
            "assumed": self.assumed,
        }


def energy_of_run(records: Sequence[dict[str, Any]], *, steps: int, tokens: int) -> dict[str, Any]:
    """Return the energy of all ranks: "energy" of metrics.json.

    Args:    records: of every rank, in rank order; tokens: of all steps.
    Returns: source, joules, joules_a_step and joules_a_token (None without a step), by_rank,
             busy_seconds by rank, counters {name: {joules, ranks}}, estimate: whether any rank's
             joules are an estimate, watts and watts_assumed of the estimate, how: one line that
             explains the numbers.
    """
    readers: defaultdict[str, list[int]] = defaultdict(list)
    by_rank = [0.0] * len(records)
    busy = [record["busy_seconds"] for record in records]
    for rank, record in enumerate(records):
        for name in record["microjoules"]:
            readers[name].append(rank)
        if record["watts"] is not None:
            by_rank[rank] = record["watts"] * busy[rank]
    joules = sum(by_rank)
    counters = {}
    for name, ranks in readers.items():
        counted = max(records[rank]["microjoules"][name] for rank in ranks) / 1e6
        counters[name] = {"joules": counted, "ranks": ranks}
        joules += counted
        together = sum(busy[rank] for rank in ranks)
        for rank in ranks:
            by_rank[rank] += counted * (busy[rank] / together if together else 1 / len(ranks))
    sources = sorted({source for record in records for source in record["source"].split(" + ")})
    watts = [record["watts"] for record in records if record["watts"] is not None]
    shared = [SHARED] if any(len(ranks) > 1 for ranks in readers.values()) else []
    return {
        "source": " + ".join(sources),
        "joules": joules,
        "joules_a_step": joules / steps if steps else None,
        "joules_a_token": joules / tokens if tokens else None,
        "by_rank": by_rank,
        "busy_seconds": busy,
        "counters": counters,
        "estimate": bool(watts),
        "watts": watts[0] if watts else None,
        "watts_assumed": bool(watts) and any(record["assumed"] for record in records),
        "how": "; ".join([*(HOW[source] for source in sources), *shared]),
    }


def energy_in_words(energy: dict[str, Any]) -> str:
    """Return one line for the terminal; it names an estimate as such."""
    title = "energy, an estimate" if energy["estimate"] else "energy"
    parts = [f"{_short(energy['joules'])} J in all"]
    if energy["joules_a_step"] is not None:
        parts = [
            f"{_short(energy['joules_a_step'])} J a step",
            f"{_short(energy['joules_a_token'])} J a token",
            *parts,
        ]
    ranks = [_short(joules) for joules in energy["by_rank"]]
    if len(ranks) > 1:
        parts.append(f"by rank {', '.join(ranks[:8])}{', …' if len(ranks) > 8 else ''}")
    how = energy["how"]
    if energy["estimate"]:
        how += f"; {energy['watts']:g} W" + (
            ", assumed: --watts W gives yours" if energy["watts_assumed"] else ""
        )
    return f"{title}: {', '.join(parts)} ({how})"


def _short(number: float) -> str:
    """Return a number as text: with thousands separators from 100 on, else with three digits."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"
