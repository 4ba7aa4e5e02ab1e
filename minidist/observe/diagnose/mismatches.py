"""Rules about calls that do not match between ranks: different size, dtype, op, root or verb; calls
left out, made too often, or swapped."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from minidist.comm.flight.slots import Entry
from minidist.observe.diagnose.fault import (
    CERTAIN,
    LIKELY,
    POSSIBLE,
    Fault,
    call_text,
    ranks_text,
)
from minidist.observe.diagnose.flights import RankFlight
from minidist.observe.diagnose.matching import GroupCalls, group_calls, signature

FIELDS = ("verb", "op", "root", "dtype", "shape", "algorithm")
Calls = dict[int, Entry]


def mismatches(flights: Sequence[RankFlight]) -> list[Fault]:
    """Return the first disagreement of each group; the earliest first."""
    found = [
        (time, finding) for calls in group_calls(flights) for time, finding in _in_group(calls)
    ]
    return [finding for _, finding in sorted(found, key=lambda pair: pair[0])]


def _in_group(calls: GroupCalls) -> list[tuple[float, Fault]]:
    for sequence in sorted(set().union(*calls.calls.values())):
        there = {rank: mine[sequence] for rank, mine in calls.calls.items() if sequence in mine}
        camps = _camps(there)
        if len(camps) > 1:
            return [
                (min(entry["made"] for entry in there.values()), _finding(calls, sequence, camps))
            ]
    return []


def _camps(there: dict[int, Entry]) -> list[list[int]]:
    """Return the ranks in camps whose calls agree; the largest camp first."""
    camps: list[list[int]] = []
    for rank, entry in there.items():
        camp = next(
            (camp for camp in camps if signature(there[camp[0]]).agrees(signature(entry))), None
        )
        if camp is None:
            camps.append([rank])
        else:
            camp.append(rank)
    return sorted(camps, key=lambda camp: (-len(camp), camp))


def _finding(calls: GroupCalls, sequence: int, camps: list[list[int]]) -> Fault:
    """Return the finding about a disagreement.

    The smaller camp is the culprit; between equal camps, the camp whose call breaks the order of
    earlier calls.
    """
    right = camps[0]
    wrong = camps[1]
    tie = len(right) == len(wrong)
    cause = _shifted(calls.calls[right[0]], calls.calls[wrong[0]], sequence)
    if (
        tie
        and cause is None
        and (other := _shifted(calls.calls[wrong[0]], calls.calls[right[0]], sequence))
    ):
        right, wrong, cause = wrong, right, other
    one = calls.calls[right[0]][sequence]
    other_one = calls.calls[wrong[0]][sequence]
    different = next((field for field in FIELDS if _differ(one, other_one, field)), "shape")
    culprits = tuple(sorted(rank for camp in camps if camp is not right for rank in camp))
    what = {
        "left out": "left out a call that the others make",
        "made too often": "makes a call that the others do not",
        "wrong order": "makes two calls in the other order",
    }.get(cause or "", f"differs in {different}")
    sure = CERTAIN if not tie else LIKELY if cause else POSSIBLE
    evidence = tuple(
        f"{ranks_text(camp)}: {call_text(calls.calls[camp[0]][sequence])}" for camp in camps[:4]
    )
    return Fault(
        cause or f"wrong {different}",
        culprits,
        str(other_one["where"]),
        f"call {sequence} of group {calls.axis}: {ranks_text(culprits)} {what}",
        evidence,
        sure,
        f"compare {other_one['where']} with {one['where']}: every rank of a group makes the same "
        "calls in the same order"
        + ("; two camps are equally large, so either may be wrong" if tie else ""),
    )


def _differ(one: Entry, other: Entry, field: str) -> bool:
    """Return whether two calls differ in a field; an unknown dtype or shape differs from none."""
    values = one[field] or None, other[field] or None
    return values[0] != values[1] and not (field in ("dtype", "shape") and None in values)


def _key(entry: Entry | None) -> tuple[Any, ...] | None:
    return (
        None
        if entry is None
        else tuple(str(entry[field]) for field in ("verb", "op", "root", "dtype", "shape"))
    )


def _shifted(right: Calls, wrong: Calls, at: int) -> str | None:
    """Return how `wrong` lost the order of `right` at this call; None if the order is the same, and
    the call itself differs."""
    here = _key(right[at])
    after = _key(right.get(at + 1))
    its = _key(wrong[at])
    its_next = _key(wrong.get(at + 1))
    if here == its:
        return None
    if its == after and its_next == here:
        return "wrong order"
    if its == after:
        return "left out"
    if its_next == here:
        return "made too often"
    followers = Counter(
        _key(right.get(sequence + 1))
        for sequence in right
        if sequence + 1 < at and _key(right[sequence]) == here
    )
    return "left out" if followers and followers.most_common(1)[0][0] == its else None
