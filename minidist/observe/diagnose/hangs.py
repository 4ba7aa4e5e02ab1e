"""Rules about waiting ranks: which rank is behind, and which calls do not end although all ranks
have entered them.

A rank in a call, or in a wait for a message, waits for the ranks that have not made their part of
it. The ranks at the end of this chain wait for no rank: they are the cause. If 30 of 32 ranks have
made call 640 and two ranks are in call 641, the 30 are behind, because the two wait for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from minidist.comm.flight.slots import CALL, MESSAGE, WAIT, Entry
from minidist.observe.diagnose.fault import (
    CERTAIN,
    LIKELY,
    POSSIBLE,
    Fault,
    call_text,
    ranks_text,
    span,
)
from minidist.observe.diagnose.flights import DUMPED, GONE, RUNS, STOPPED, RankFlight
from minidist.observe.diagnose.lost_ranks import last_words
from minidist.observe.diagnose.matching import (
    GroupCalls,
    group_calls,
    message_key,
    messages_made,
)

STUCK = 10.0  # seconds: a call of a job that runs is a hang from this age on
OPEN = ("begun", "failed")


@dataclass(frozen=True)
class Waiter:
    """A rank that waits in a call or message.

    Attributes: absent   the ranks that have not made their part of it
                members  the ranks of the group that are in the call
                peers    the ranks whose messages it waits for, by its own record
    """

    rank: int
    entry: Entry
    absent: tuple[int, ...]
    members: tuple[int, ...]
    peers: tuple[int, ...]
    seconds: float


def hangs(flights: Sequence[RankFlight], stuck: float = STUCK) -> list[Fault]:
    """Return the cause of a hang: some rank has waited for `stuck` seconds, or was in a call when
    its job ended."""
    waiters = [waiter for waiter in _waiters(flights) if waiter.seconds >= stuck or _over(flights)]
    if not waiters:
        return []
    edges = {
        rank: {absent for waiter in waiters if waiter.rank == rank for absent in waiter.absent}
        for rank in {waiter.rank for waiter in waiters}
    }
    if roots := {
        absent for absents in edges.values() for absent in absents if not edges.get(absent)
    }:
        return [_behind(flights, waiters, sorted(roots))]
    if circle := _circle(edges):
        return [_deadlock(waiters, circle)]
    return [_stuck(waiters)]


def _over(flights: Sequence[RankFlight]) -> bool:
    return not any(flight.process in (RUNS, STOPPED, DUMPED) for flight in flights)


def _waiters(flights: Sequence[RankFlight]) -> list[Waiter]:
    groups = {calls.group: calls for calls in group_calls(flights)}
    made = messages_made(flights)
    found = []
    for flight in flights:
        waits = [entry for entry in flight.of_kind(WAIT) if entry["state"] == "begun"]
        peers = tuple(sorted({rank for wait in waits for rank in wait["ranks"]}))
        for entry in _open_calls(flight):
            calls = groups[entry["group"]]
            absent = [rank for rank in calls.behind(entry["sequence"]) if rank != flight.rank]
            found.append(
                Waiter(
                    flight.rank,
                    entry,
                    tuple(absent),
                    _members(calls, entry["sequence"]),
                    peers,
                    flight.seen - entry["begun"],
                )
            )
        for entry in flight.of_kind(MESSAGE):
            if entry["state"] == "failed" or (
                entry["state"] == "begun" and peers and entry["group"] in flight.groups
            ):
                waiter = _of_message(flight, entry, made, peers, {other.rank for other in flights})
                if waiter is not None:
                    found.append(waiter)
    return found


def _open_calls(flight: RankFlight) -> list[Entry]:
    """Return the first call of each group that has begun and not ended; a group runs its calls in
    order."""
    first: dict[int, Entry] = {}
    for entry in flight.of_kind(CALL):
        if entry["state"] in OPEN:
            first.setdefault(entry["group"], entry)
    return list(first.values())


def _members(calls: GroupCalls, sequence: int) -> tuple[int, ...]:
    return tuple(
        rank
        for rank, mine in calls.calls.items()
        if sequence in mine and mine[sequence]["state"] in OPEN
    )


def _of_message(
    flight: RankFlight,
    entry: Entry,
    made: dict[tuple[int, int, int, str], int],
    peers: tuple[int, ...],
    known: set[int],
) -> Waiter | None:
    """Return the wait for a message or for its receiver.

    None if the other rank has no recorder, or is not one that this rank waits for.
    """
    group, src, dst, end = message_key(flight, entry)
    other = src if end == "recv" else dst
    if other not in known or (entry["state"] == "begun" and other not in peers):
        return None
    done = made.get((group, src, dst, "send" if end == "recv" else "recv"), 0) >= entry["sequence"]
    return Waiter(
        flight.rank,
        entry,
        () if done else (other,),
        (flight.rank, other),
        (other,),
        flight.seen - entry["begun"],
    )


def _behind(flights: Sequence[RankFlight], waiters: Sequence[Waiter], roots: list[int]) -> Fault:
    """Return the finding about the ranks at the end of the chain, which wait for no rank."""
    direct = [waiter for waiter in waiters if set(waiter.absent) & set(roots)]
    longest = max(direct, key=lambda waiter: waiter.seconds)
    by_rank = {flight.rank: flight for flight in flights}
    told = [by_rank[root] for root in roots if root in by_rank]
    evidence = [
        f"{ranks_text({waiter.rank for waiter in direct if _same(waiter, longest)})} "
        f"{'has' if len({w.rank for w in direct}) == 1 else 'have'} been in "
        f"{call_text(longest.entry)} for {span(longest.seconds)}"
    ]
    evidence += [last_words(flight) for flight in told[:3]]
    if len(told) > 3:
        evidence.append(f"and so on for {ranks_text(flight.rank for flight in told[3:])}")
    others = {waiter.rank for waiter in waiters} - {waiter.rank for waiter in direct} - set(roots)
    if others:
        evidence.append(f"{ranks_text(others)} {'waits' if len(others) == 1 else 'wait'} for those")
    place = _place(told[0]) if told else ""
    kind = "call" if longest.entry["kind"] == CALL else "message"
    has = "has" if len(roots) == 1 else "have"
    gone = [flight.rank for flight in told if flight.process == GONE]
    return Fault(
        "behind",
        tuple(roots),
        place,
        f"{ranks_text(roots)} {has} not made {kind} {longest.entry['sequence']} "
        f"({longest.entry['verb']}), for which {ranks_text({waiter.rank for waiter in direct})} "
        f"wait{'s' if len({waiter.rank for waiter in direct}) == 1 else ''}",
        tuple(evidence),
        CERTAIN if all(flight.whole for flight in told) and told else LIKELY,
        f"look at what {ranks_text(roots)} {'does' if len(roots) == 1 else 'do'} after {place}"
        + (
            ""
            if gone
            else ": a long computation, a branch without the call, or a wait outside minidist"
        ),
    )


def _same(one: Waiter, other: Waiter) -> bool:
    return (one.entry["kind"], one.entry["group"], one.entry["sequence"]) == (
        other.entry["kind"],
        other.entry["group"],
        other.entry["sequence"],
    )


def _circle(edges: dict[int, set[int]]) -> list[int]:
    """Return ranks that wait for each other in a circle; [] if there is no circle."""
    for start in sorted(edges):
        path = [start]
        here = start
        while edges.get(here):
            here = min(edges[here])
            if here in path:
                return path[path.index(here) :]
            path.append(here)
    return []


def _deadlock(waiters: Sequence[Waiter], circle: list[int]) -> Fault:
    """Return the finding about ranks that wait for each other: none of their waits can end."""
    lines = [
        f"rank {waiter.rank} waits for {ranks_text(waiter.absent)} in {call_text(waiter.entry)}"
        for rank in circle
        for waiter in waiters
        if waiter.rank == rank and waiter.absent
    ]
    first = next(waiter for waiter in waiters if waiter.rank == circle[0])
    return Fault(
        "deadlock",
        tuple(circle),
        str(first.entry["where"]),
        f"{ranks_text(circle)} wait for each other in a circle",
        tuple(lines[:6]),
        CERTAIN,
        "let every rank make its calls in one order; for messages use exchange, or start one of "
        "the two",
    )


def _stuck(waiters: Sequence[Waiter]) -> Fault:
    """Return the finding about a call that all its ranks have entered and that does not end: the
    cause is the link, or a rank that sends nothing inside the call."""
    longest = max(waiters, key=lambda waiter: waiter.seconds)
    inside = {waiter.rank for waiter in waiters if _same(waiter, longest)} | set(longest.members)
    waited_for = {peer for waiter in waiters if _same(waiter, longest) for peer in waiter.peers}
    silent = sorted(
        rank
        for rank in waited_for & inside
        if not any(waiter.peers for waiter in waiters if waiter.rank == rank)
    )
    evidence = [
        f"{ranks_text(inside)} are in {call_text(longest.entry)} for up to "
        f"{span(longest.seconds)}; no rank is behind"
    ]
    evidence += [
        f"rank {waiter.rank} waits for {ranks_text(waiter.peers)}"
        for waiter in waiters
        if waiter.peers
    ][:4]
    return Fault(
        "stuck",
        tuple(silent),
        str(longest.entry["where"]),
        f"all ranks have made {longest.entry['verb']} {longest.entry['sequence']}, and it does "
        "not end",
        tuple(evidence),
        LIKELY if silent else POSSIBLE,
        "look at the network or the device between these ranks; `py-spy dump --pid` shows where "
        "each stands",
    )


def _place(flight: RankFlight) -> str:
    calls = flight.of_kind(CALL, MESSAGE)
    return str(calls[-1]["where"]) if calls else "its start"
