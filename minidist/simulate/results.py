"""Chapter 24 · What a simulated step amounts to: time, its parts, traffic, memory, energy and
money.

    found = md.simulate(plan, config, "h100:128x8", batch=1024)
    found.step_seconds, found.tokens_per_second, found.mfu
    found.parts                         # {"busy": {"forward": 3.1, …}, "exposed": {"tp": 0.4, …},
                                        "idle": {"pp": 0.6}}
    found.axes["tp"].nbytes             # what all ranks sent along tp in the step
    found.peak(rank)["total"], found.fits
    found.joules, found.dollars, found.for_tokens(15e12)
    found.sure.interval(found.step_seconds)     # what it is known to (sure.py)

The traces hold two steps. The first one, of few rows, makes what only a first step makes (the
optimizer's state). The second one is the step that is told, from the moment when the last rank
begins it to that when the last rank ends it. A call that is on its way meanwhile (ZeRO's weights,
for the next forward) belongs to the step that waits for it.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import fsum
from typing import Any, NamedTuple

from minidist.nn import GPTConfig
from minidist.observe.events import Memory
from minidist.observe.replay import Replayed
from minidist.observe.replay_path import PathPiece, RankTime, critical_path, time_of
from minidist.parallel.hybrid.plan import Plan
from minidist.simulate.cluster import Cluster
from minidist.simulate.model_flops import PRODUCT_DTYPES, flops_a_token
from minidist.simulate.placement import RankPlaces
from minidist.simulate.sure import PUBLISHED, Sureness
from minidist.simulate.trace import RankTrace

HOUR = 3600.0


class AxisUse(NamedTuple):
    """A step's use of an axis: bytes and messages of all ranks; mean seconds of a rank in which
    calls ran, and in which it stood still for their bytes."""

    nbytes: int
    messages: int
    seconds: float
    exposed: float


class Forecast(NamedTuple):
    """What a number of tokens takes. None: no source states the watts or the price."""

    tokens: float
    steps: float
    seconds: float
    joules: float | None
    dollars: float | None


@dataclass(frozen=True)
class Simulation:
    """A step of a plan on a cluster.

    Attributes: batch: sequences of the whole job. traces: one a role. replayed: both steps.
                replay_traces: replays other traces and roles in the same way. sure: what its
                figures are known to.
    """

    plan: Plan
    config: GPTConfig
    cluster: Cluster
    batch: int
    traces: Sequence[RankTrace]
    role_of: Sequence[int]
    placement: RankPlaces
    replayed: Replayed
    replay_traces: Callable[[Sequence[RankTrace], Sequence[int]], Replayed]
    sure: Sureness = PUBLISHED

    # ----------------------------------------------------------------------------------------- time

    @cached_property
    def begin(self) -> float:
        """Return when the last rank begins the last step, in seconds of the replay."""
        return max(self._begin(clock) for clock in range(len(self.replayed.ranks)))

    def _begin(self, clock: int) -> float:
        rank = self.replayed.ranks[clock]
        events = self.replayed.track(rank).at
        return self.replayed.stops[clock][
            bisect_right(events, self.traces[self.role_of[rank]].steps[-1] - 1)
        ]

    @cached_property
    def end(self) -> float:
        """Return when the last rank ends the last step."""
        return max(stops[-1] for stops in self.replayed.stops)

    @property
    def step_seconds(self) -> float:
        """Return the seconds of a step."""
        return self.end - self.begin

    @property
    def tokens(self) -> int:
        """Return the tokens of a step."""
        return self.batch * self.config.context

    @property
    def tokens_per_second(self) -> float:
        """Return tokens a second of the whole job."""
        return self.tokens / self.step_seconds

    @property
    def mfu(self) -> float:
        """Return the model FLOPs utilization: the model's FLOPs (model_flops.py), divided by what
        the devices could do meanwhile."""
        return self._use(self.tokens * flops_a_token(self.config))

    @property
    def hfu(self) -> float:
        """Return the hardware FLOPs utilization: of the FLOPs that really run, with recomputation,
        but no scores of later tokens."""
        return self._use(
            fsum(
                ranks * self.traces[role].flops(self.traces[role].steps[-1])
                for role, ranks in Counter(self.role_of).items()
            )
        )

    def _use(self, flops: float) -> float:
        peak = self.cluster.device.peak(PRODUCT_DTYPES[self.plan.precision])
        return flops / (self.step_seconds * len(self.role_of) * peak)

    @cached_property
    def times(self) -> list[RankTime]:
        """Return what each clock of the replay did in the step."""
        return [time_of(self.replayed, rank, self.begin, self.end) for rank in self.replayed.ranks]

    @cached_property
    def parts(self) -> dict[str, dict[str, float]]:
        """Return where the step goes, in seconds, mean of all ranks: busy by name, exposed and idle
        by axis. They add up."""
        ranks = Counter(self.replayed.clock_of)
        share = 1.0 / len(self.role_of)
        found: dict[str, dict[str, float]] = {
            "busy": defaultdict(float),
            "exposed": defaultdict(float),
            "idle": defaultdict(float),
        }
        for clock, times in enumerate(self.times):
            for kind, seconds in found.items():
                for name, spent in getattr(times, kind).items():
                    seconds[name] += spent * share * ranks[clock]
        return {
            kind: {name: spent for name, spent in seconds.items() if spent > 0}
            for kind, seconds in found.items()
        }

    @property
    def bubble(self) -> float:
        """Return the share of all ranks' time in which they wait for other ranks, in a pipeline or
        not, while none of their bytes move."""
        return fsum(self.parts["idle"].values()) / self.step_seconds

    @cached_property
    def path(self) -> list[PathPiece]:
        """Return the critical path of the step."""
        return critical_path(self.replayed, self.begin, calls=False)

    @property
    def path_parts(self) -> dict[str, float]:
        """Return seconds of the critical path by kind and name, the longest first. They add up to
        the step."""
        found: Counter[str] = Counter()
        for piece in self.path:
            found[f"{piece.kind} {piece.name}"] += piece.stop - piece.start  # type: ignore[assignment]
        return dict(found.most_common())

    # -------------------------------------------------------------------------------------- traffic

    @cached_property
    def axes(self) -> dict[str, AxisUse]:
        """Return what moves in a step along each axis: bytes and messages as the real job's
        algorithm sends them (the ledger), seconds as the priced calls take (on GPUs: the library's,
        algorithm native)."""
        roles = Counter(self.role_of)
        nbytes = Counter[str]()
        messages = Counter[str]()
        for role, trace in enumerate(self.traces):
            for row in trace.last_step:
                if row["phase"] == "step":
                    nbytes[row["axis"]] += roles[role] * row["nbytes"]
                    messages[row["axis"]] += roles[role] * row["messages"]
        seconds = defaultdict[str, float](float)
        ranks = Counter(self.replayed.clock_of)
        for clock, stations in enumerate(self.replayed.stations):
            track = self.replayed.track(self.replayed.ranks[clock])
            for slot, station in zip(track.slots, stations, strict=True):
                if slot.kind in ("collective", "send"):
                    ran = fsum(
                        max(0.0, min(end, self.end) - max(begin, self.begin))
                        for begin, end in zip(station.begins, station.ends, strict=True)
                    )
                    seconds[slot.axis] += ran * ranks[clock] / len(self.role_of)
        exposed = self.parts["exposed"]
        return {
            axis: AxisUse(nbytes[axis], messages[axis], seconds[axis], exposed.get(axis, 0.0))
            for axis in dict.fromkeys([*nbytes, *seconds])
        }

    # --------------------------------------------------------------------------------------- memory

    def peak(self, rank: int) -> Mapping[str, int]:
        """Return bytes by category, each at its highest, and of `total` the highest sum."""
        return self.traces[self.role_of[rank]].peak

    @cached_property
    def fullest(self) -> int:
        """Return the first rank with the highest peak."""
        return max(range(len(self.role_of)), key=lambda rank: self.peak(rank)["total"])

    @property
    def fits(self) -> bool:
        """Return True if every rank's peak fits into its device, or under the plan's limit."""
        return self.peak(self.fullest)["total"] <= self.memory_limit

    @property
    def memory_limit(self) -> int:
        """Return bytes that a rank may hold."""
        return min(
            self.cluster.device.memory_bytes,
            self.plan.device_memory or self.cluster.device.memory_bytes,
        )

    def memory(self, rank: int) -> list[tuple[float, dict[str, int]]]:
        """Return (seconds since the step began, bytes by category) at each change, from the step's
        beginning to its end."""
        trace = self.traces[self.role_of[rank]]
        times = self.replayed.times(rank)
        held = Counter[str]()
        found = list[tuple[float, dict[str, int]]]()
        ops = self.replayed.track(rank).at
        for place, event in enumerate(trace.events):
            if isinstance(event, Memory):
                held[event.category] += event.nbytes
                when = times[bisect_right(ops, place)] - self.begin
                if found and found[-1][0] >= max(0.0, when):
                    found.pop()
                found.append((max(0.0, when), dict(held)))
        return found

    # ----------------------------------------------------------------------------- energy and money

    @property
    def joules(self) -> float | None:
        """Return the joules of a step. A device takes its full watts while it is busy (waiting for
        its host included), idle watts while it waits, and the host's always.

        Source: Fan et al. 2007: power grows linearly with utilization. A device without idle watts
        counts as full.
        """
        device = self.cluster.device
        busy = fsum(self.parts["busy"].values())
        if device.watts is None:
            return None
        idle = device.watts if device.idle_watts is None else device.idle_watts
        host = self.cluster.host_watts or 0.0
        return len(self.role_of) * (
            device.watts * busy + idle * (self.step_seconds - busy) + host * self.step_seconds
        )

    @property
    def dollars(self) -> float | None:
        """Return the dollars of a step, at the price of a device and hour."""
        price = self.cluster.device.price_an_hour
        return None if price is None else len(self.role_of) * price * self.step_seconds / HOUR

    def for_tokens(self, tokens: float) -> Forecast:
        """Return what so many tokens take, without interruptions."""
        steps = tokens / self.tokens
        return Forecast(
            tokens,
            steps,
            steps * self.step_seconds,
            None if self.joules is None else steps * self.joules,
            None if self.dollars is None else steps * self.dollars,
        )

    def as_json(self, tokens: float | None = None) -> dict[str, Any]:
        """Return all figures, with the units that their names say."""
        return {
            "cluster": self.cluster.spec,
            "order": self.placement.order,
            "size": len(self.role_of),
            "plan": self.plan.as_dict(),
            "config": self.config.as_dict(),
            "batch": self.batch,
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "bubble": self.bubble,
            "known_to": self._known_to(),
            "parts": self.parts,
            "critical_path": self.path_parts,
            "axes": {axis: use._asdict() for axis, use in self.axes.items()},
            "memory": {
                "limit": self.memory_limit,
                "fits": self.fits,
                "fullest_rank": self.fullest,
                "peak": [dict(trace.peak) for trace in self.traces],
            },
            "roles": {
                "of_rank": list(self.role_of),
                "first_rank": [trace.rank for trace in self.traces],
            },
            "clocks": len(self.replayed.ranks),
            "joules": self.joules,
            "dollars": self.dollars,
            "tokens": None if tokens is None else self.for_tokens(tokens)._asdict(),
        }

    def _known_to(self) -> dict[str, tuple[float, float] | None]:
        """Return the intervals of the figures of as_json()."""
        figures = {
            name: getattr(self, name)
            for name in ("step_seconds", "tokens_per_second", "mfu", "hfu", "joules", "dollars")
        }
        found = {
            name: None if value is None else self.sure.interval(value)
            for name, value in figures.items()
        }
        return found | {"peak": self.sure.memory_interval(self.peak(self.fullest)["total"])}
