"""Chapter 21 in chapter 26: local steps when a rank is lost, perhaps in the middle of a meeting.

The idea. Between two meetings a rank needs no other. So a lost rank takes with it only the steps
that it made since the last meeting. The others keep their weights and go on; they must only agree
on which meetings were held:

    steps                  … 48   49   50: meeting 5           51
    rank 0                 step  step  sends, gets the sum, takes outer step 5
    rank 1                 step  step  sends, waits …          PeerLostError
    rank 2                 step  step  sends                   killed

A sum that has arrived on one rank is whole: the lost rank's outer gradient is in it. So meeting 5
counts if one rank that is left has its sum. The others take the common weights and the outer
momentum from that rank. If no rank that is left has it, the meeting is held again by the ranks that
are left: with their outer gradients, and their shares of the rows. Outer gradients travel in one
order on all ranks, so a number says which meetings count: the largest `met`.

`leave` brings a rank's state to a point between two meetings; `catch_up` does in the new group what
was broken off.
"""

from contextlib import suppress

from minidist.errors import MinidistError
from minidist.parallel.compress.local_steps import LocalSteps
from minidist.parallel.step.step import rows_of


def leave(strategy: LocalSteps) -> None:
    """A rank is lost: take the outer steps of the sums that are here; no other outer gradient has
    ever set out.

    Sends nothing.
    """
    count = len(strategy.fragments)
    with suppress(MinidistError):
        while (
            pending := strategy.fragments[strategy.met % count].pending
        ) is not None and pending.done():
            strategy._take_outer_step(strategy.fragments[strategy.met % count])
    for fragment in strategy.fragments:
        fragment.pending = fragment.room = None


def catch_up(strategy: LocalSteps) -> None:
    """In the new group: mix in what is due of the meetings that count, then hold those that were
    broken off.

    Every rank calls it, with equal `steps`, `met` and `rows`.
    Cost:    the all-reduces of the meetings that were broken off.
    """
    group = strategy.group
    count = len(strategy.fragments)
    sends, merges = strategy.due(strategy.steps)
    _mix_in(strategy, min(merges, strategy.met))
    share = rows_of(strategy.rows, size=group.size, rank=group.rank)[0] / max(strategy.rows, 1)
    for turn in range(strategy.met, sends):
        strategy._send(strategy.fragments[turn % count], share)
    _mix_in(strategy, merges)


def _mix_in(strategy: LocalSteps, merges: int) -> None:
    """Go on from the common weights, in the order of the meetings, until so many are mixed in."""
    while strategy.merged < merges:
        strategy._merge(strategy.fragments[strategy.merged % len(strategy.fragments)], strategy.mix)
