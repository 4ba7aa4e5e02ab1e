"""Chapter 24 · Seconds of the work between two calls of a rank: on its device, at its host, and its
share of the cores where ranks share them.

    busy_times = BusyTimes(rates, alone, traces, role_of, stragglers)
    busy_times.seconds(rank, work)          # on its own cores; on shared ones: while the others wait
    busy_times.issue(rank, work)            # in which its host launches the kernels
    busy_times.core_share(rank, work)       # of all cores; used only where ranks share cores

On a cluster each rank has its own device: `alone` is None, and work takes as long as `rates` say.
On `here` ranks may share cores: `rates` hold while all ranks compute, `alone` while all others wait
(shared_cores.py).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from minidist.simulate.failure import FAILED, NEVER
from minidist.simulate.rates import Rates
from minidist.simulate.trace import RankTrace


class BusyTimes:
    """Seconds and core shares of all work in the traces of a job.

    Args:    rates: of kernels while all ranks compute. alone: while all others wait, or None where
             each rank has its own cores. traces: one a role. role_of: rank -> role.
             stragglers: {rank: how many times longer its computing takes}.
    """

    def __init__(
        self,
        rates: Rates,
        alone: Rates | None,
        traces: Sequence[RankTrace],
        role_of: Sequence[int],
        stragglers: Mapping[int, float],
    ) -> None:
        self._role_of = role_of
        self._stragglers = stragglers
        self._issue = [[rates.issue(segment) for segment in trace.segments] for trace in traces]
        self._seconds_of_all = _segment_seconds(rates, traces)
        self._seconds_alone = self._seconds_of_all
        if alone is not None:
            self._seconds_alone = _segment_seconds(alone, traces)

    def seconds(self, rank: int, work: Any) -> float:
        """Return the seconds that a rank's work takes while no other rank asks for the cores."""
        if work == FAILED:
            return NEVER
        seconds_alone: float = self._seconds_alone[self._role_of[rank]][work]
        return seconds_alone * self._stragglers.get(rank, 1.0)

    def issue(self, rank: int, work: Any) -> float:
        """Return the seconds in which a rank's host issues the work."""
        if work == FAILED:
            return 0.0
        seconds: float = self._issue[self._role_of[rank]][work]
        return seconds * self._stragglers.get(rank, 1.0)

    def core_share(self, rank: int, work: Any) -> float:
        """Return the share of all cores that a rank's work asks for.

        While all ranks ask for their shares, each is as slow as `rates` say.
        """
        if work == FAILED:
            return 0.0
        role = self._role_of[rank]
        seconds_alone = self._seconds_alone[role][work]
        if not seconds_alone:
            return 0.0
        slower: float = max(1.0, self._seconds_of_all[role][work] / seconds_alone)
        return slower / len(self._role_of)


def _segment_seconds(rates: Rates, traces: Sequence[RankTrace]) -> list[list[float]]:
    """Return the seconds of each segment of each trace."""
    return [[rates.segment(segment) for segment in trace.segments] for trace in traces]
