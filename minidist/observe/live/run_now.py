"""RunNow, the state of a run at one moment, computed from its flight recorders.

state           the run
not begun       has made its folder, but no step
running         makes steps
stalled         runs, but has recorded nothing for STALL seconds and the time of several steps
stopped         has a stopped process (Ctrl-Z, SIGSTOP)
died            has ended because of an error, or was killed
ended           has ended before its last step without an error: it was asked to stop
finished        has written metrics.json
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from minidist.comm.flight.slots import STATE_OF_STEP
from minidist.device.account import CATEGORIES
from minidist.observe.diagnose.flights import RankFlight
from minidist.observe.live.slow_now import Records, SlowNow, slow_now, wrong_now
from minidist.observe.live.step_parts import StepParts, mean, step_parts

NOT_BEGUN, RUNNING, STALLED, STOPPED_RUN, DIED, ENDED, FINISHED = STATES = (
    "not begun",
    "running",
    "stalled",
    "stopped",
    "died",
    "ended",
    "finished",
)
OVER = (DIED, ENDED, FINISHED)
HANGS = (STALLED, STOPPED_RUN, DIED)  # `what` names the rank
WINDOW = 10  # steps whose mean is shown
BETWEEN_HOSTS = "between hosts"
UNKNOWN_LINK = "unknown"  # link of a group with a rank that left no recorder here


@dataclass(frozen=True)
class RankNow:
    """The state of one rank. step: its present step, from 1, or None; parts: its mean step, or None
    if no step has a known length yet.

    memory: bytes by category after a step; peak: largest bytes so far, with "total"; limit: of the
    total, or None; watts: joules per second by its `source`.
    """

    rank: int
    host: str
    process: str
    step: int | None
    parts: StepParts | None
    memory: dict[str, int]
    peak: dict[str, int]
    limit: int | None
    watts: float | None
    source: str


@dataclass(frozen=True)
class AxisNow:
    """The groups of one axis. ranks: number in a group; link: "shm", "tcp", …, BETWEEN_HOSTS or
    UNKNOWN_LINK; a_step: bytes per step of all ranks; a_second: bytes per second; exposed: seconds
    per step of the rank with the most."""

    name: str
    ranks: int
    link: str
    a_step: int
    a_second: float
    exposed: float


@dataclass(frozen=True)
class RunNow:
    """The state of a run at one moment.

    Attributes: what: one line about the state; losses: of the newest steps, None if not finite;
                slow: what slows the run; wrong: other faults, one sentence each; watts: of all
                ranks; estimate: whether a part of the watts is an estimate; at: the time of day.
    """

    run: str
    state: str
    what: str
    step: int
    steps: int | None
    losses: tuple[float | None, ...]
    tokens_per_second: float | None
    step_seconds: float | None
    ranks: tuple[RankNow, ...]
    axes: tuple[AxisNow, ...]
    slow: SlowNow | None
    wrong: tuple[str, ...]
    watts: float | None
    estimate: bool
    at: float


def with_ranks(
    now: RunNow, flights: Sequence[RankFlight], records: Records | None = None, *, link: str
) -> RunNow:
    """Return `now` with the values that the flight recorders give.

    Args:    records: of the newest steps of all ranks. link: the link class inside a host.
    """
    if not flights:
        return now
    newest = newest_parts(step_parts(flights))
    ranks = tuple(_rank(flight, newest[flight.rank]) for flight in flights)
    seconds = max((each.seconds for each in newest.values() if each is not None), default=None)
    watts, estimate = watts_of(ranks)
    return replace(
        now,
        ranks=ranks,
        axes=_axes(flights, newest, seconds, link),
        watts=watts,
        estimate=estimate,
        slow=None if now.state in HANGS else slow_now(flights, records),
        wrong=wrong_now(records or {}),
        step_seconds=now.step_seconds or seconds,
    )


def newest_parts(parts: dict[int, dict[int, StepParts]]) -> dict[int, StepParts | None]:
    """Return {rank: mean over the newest WINDOW steps that all ranks have ended}; without such
    steps over the rank's own."""
    common = set.intersection(*(set(mine) for mine in parts.values()))
    return {
        rank: mean(mine[step] for step in sorted(common or mine)[-WINDOW:])
        for rank, mine in parts.items()
    }


def _rank(flight: RankFlight, parts: StepParts | None) -> RankNow:
    steps = [entry["step"] for entry in flight.entries if entry["step"] is not None]
    states = flight.of_kind(STATE_OF_STEP)[-WINDOW - 1 :]
    memory = dict[str, int]()
    peak = dict[str, int]()
    limit = None
    watts = None
    source = ""
    if states:
        memory = dict(zip(CATEGORIES, states[-1]["memory"], strict=False))
        peak = dict(zip((*CATEGORIES, "total"), states[-1]["peak"], strict=False))
        limit = states[-1]["limit"]
        source = states[-1]["source"]
        passed = states[-1]["made"] - states[0]["made"]
        watts = (states[-1]["joules"] - states[0]["joules"]) / passed if passed > 0 else None
    return RankNow(
        flight.rank,
        flight.host,
        flight.process,
        max(steps) + 1 if steps else None,
        parts,
        memory,
        peak,
        limit,
        watts,
        source,
    )


def watts_of(ranks: Sequence[RankNow]) -> tuple[float | None, bool]:
    """Return the watts of all ranks, None if unknown, and whether any of them are an estimate.

    All ranks of a host that read its counters (rapl) read the same counters: these count once.
    """
    known = [rank for rank in ranks if rank.watts is not None]
    shared: dict[str, float] = {}
    for rank in known:
        if "rapl" in rank.source:
            shared[rank.host] = max(shared.get(rank.host, 0.0), rank.watts or 0.0)
    own = sum(rank.watts or 0.0 for rank in known if "rapl" not in rank.source)
    return (own + sum(shared.values()) if known else None), any(
        rank.source == "estimate" for rank in known
    )


def _axes(
    flights: Sequence[RankFlight],
    newest: dict[int, StepParts | None],
    seconds: float | None,
    inside: str,
) -> tuple[AxisNow, ...]:
    """Return the bytes sent along each axis; the axis with the most first."""
    hosts = {flight.rank: flight.host for flight in flights}
    found: dict[tuple[str, str], AxisNow] = {}
    for flight in flights:
        if (parts := newest[flight.rank]) is None:
            continue
        for group, nbytes in parts.sent.items():
            axis, ranks = flight.groups.get(group, ("?", []))
            link = _link({hosts.get(rank) for rank in ranks}, inside)
            before = found.get((axis, link), AxisNow(axis, len(ranks), link, 0, 0.0, 0.0))
            found[axis, link] = replace(
                before,
                a_step=before.a_step + nbytes,
                exposed=max(before.exposed, parts.stood.get(group, 0.0)),
            )
    rated = (
        replace(axis, a_second=axis.a_step / seconds if seconds else 0.0) for axis in found.values()
    )
    return tuple(sorted(rated, key=lambda axis: -axis.a_step))


def _link(hosts: set[str | None], inside: str) -> str:
    """Return the link between ranks on these hosts; None is the host of a rank without a
    recorder."""
    if len(hosts - {None}) > 1:
        return BETWEEN_HOSTS
    return UNKNOWN_LINK if None in hosts else inside
