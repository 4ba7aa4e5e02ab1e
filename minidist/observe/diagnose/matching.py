"""Calls and messages of all ranks, matched by group and sequence number. In a ring that has
overwritten records, the remaining records are matched.

A record's place in its ring is never used as a number: a rank with ten times as many calls in other
groups keeps fewer records of this group, but with the same sequence numbers.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from minidist.comm.flight.slots import CALL, MESSAGE, Entry
from minidist.comm.signature import Signature
from minidist.observe.diagnose.flights import RankFlight


@dataclass(frozen=True)
class GroupCalls:
    """The collective calls of one group.

    Attributes: ranks    world ranks of its members
                calls    {world rank: {sequence: entry}} of each rank with a recorder
                last     {world rank: sequence of its last call}; 0: it has made none; None: not
                         known
    """

    group: int
    axis: str
    ranks: list[int]
    calls: dict[int, dict[int, Entry]]
    last: dict[int, int | None]

    def behind(self, sequence: int) -> list[int]:
        """Return the ranks that have not made this call yet; if none is known, the ranks whose
        rings no longer have their calls of this group."""
        known = [
            rank
            for rank in self.ranks
            if (last := self.last.get(rank)) is not None and last < sequence
        ]
        return known or [rank for rank, last in self.last.items() if last is None]


def group_calls(flights: Sequence[RankFlight]) -> list[GroupCalls]:
    """Return all groups of the job, each by the description of the first rank that has it."""
    groups: dict[int, tuple[str, list[int]]] = {}
    calls: defaultdict[int, dict[int, dict[int, Entry]]] = defaultdict(dict)
    for flight in flights:
        for group, about in flight.groups.items():
            groups.setdefault(group, about)
        for entry in flight.of_kind(CALL):
            calls[entry["group"]].setdefault(flight.rank, {})[entry["sequence"]] = entry
    result = []
    for group, (axis, ranks) in groups.items():
        mine = calls[group]
        last = {
            flight.rank: max(mine[flight.rank])
            if flight.rank in mine
            else (0 if flight.whole else None)
            for flight in flights
            if flight.rank in ranks
        }
        result.append(GroupCalls(group, axis, ranks, mine, last))
    return result


def messages_made(flights: Sequence[RankFlight]) -> dict[tuple[int, int, int, str], int]:
    """Return {(group, from, to, "send" or "recv"): sequence of the last message}; from and to are
    world ranks."""
    made: dict[tuple[int, int, int, str], int] = {}
    for flight in flights:
        for entry in flight.of_kind(MESSAGE):
            if entry["group"] in flight.groups:
                key = message_key(flight, entry)
                made[key] = max(made.get(key, 0), entry["sequence"])
    return made


def message_key(flight: RankFlight, entry: Entry) -> tuple[int, int, int, str]:
    """Return (group, sender, receiver, "send" or "recv": the end that this rank is) of a
    message."""
    ranks = flight.groups[entry["group"]][1]
    if entry["dst"] is None:
        return entry["group"], ranks[entry["src"]], flight.rank, "recv"
    return entry["group"], flight.rank, ranks[entry["dst"]], "send"


def signature(entry: Entry) -> Signature:
    """Return the signature of a recorded call."""
    shape = None if entry["shape"] is None else tuple(entry["shape"])
    return Signature(
        entry["group"],
        entry["sequence"],
        entry["verb"],
        entry["algorithm"] or None,
        entry["op"],
        entry["root"],
        entry["dtype"] or None,
        shape,
        entry["where"],
    )
