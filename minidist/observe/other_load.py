"""The number of cores that other programs keep busy while this process works.

    busy seconds of the cores that this process may use  -  seconds that it computed itself
    ---------------------------------------------------------------------------------------
                            seconds between the two readings

Threads that share one matrix product wait for each other. If another program takes the core of one
thread, all threads wait: two threads of BLAS on two busy cores took 4.7 times as long as one
thread, and 3.6 times the processor time (`minidist train --steps 30` on 2 cores, load average 9).
"""

import time

import psutil

from minidist.device import cores

BUSY = ("user", "nice", "system", "irq", "softirq", "steal")


class OtherLoad:
    """A measurement of the cores that other programs keep busy, from its creation on."""

    def __init__(self) -> None:
        self._before = self._look()

    def _look(self) -> tuple[float, float, float]:
        """Return seconds: of the clock, busy seconds of the cores, processor time of this
        process."""
        each = psutil.cpu_times(percpu=True)
        chosen = [
            times for core, times in enumerate(each) if core in (cores.usable() or range(len(each)))
        ] or each
        busy = sum(getattr(times, name, 0.0) for times in chosen for name in BUSY)
        return time.perf_counter(), busy, time.process_time()

    def seconds(self) -> float:
        """Return the seconds since this object was made."""
        return time.perf_counter() - self._before[0]

    def cores(self) -> float:
        """Return the mean number of cores that others kept busy since this object was made; 0.0 if
        the system does not report busy time."""
        passed, busy, own = (
            now - before for now, before in zip(self._look(), self._before, strict=True)
        )
        return max(0.0, busy - own) / passed if busy else 0.0


def advice(threads: int, others: float) -> str | None:
    """Return a line for a process whose BLAS has `threads` threads while other programs keep
    `others` cores busy; None if enough cores are free."""
    there = cores.of_all_ranks()
    if threads < 2 or others < there - threads + 0.5:
        return None
    fewer = max(1, min(threads - 1, int(there - others)))
    return (
        f"other programs keep {others:.1f} of {there} cores busy, so BLAS's {threads} threads "
        f"wait for each other; --threads {fewer} may be several times as fast"
    )
