"""Ranks that share cores: what the module's drawing says, and that waiting ranks leave their core
to the others."""

import pytest

from minidist.observe.events import Await, Busy, GroupCall, Start
from minidist.observe.replay import Replayed, replay
from minidist.observe.replay_path import critical_path, time_of

SECONDS = {"short": 2.0, "long": 3.0}
CALL = GroupCall("dp", "barrier", "shared", 0)


def played(traces, role_of, cores: int, call_seconds: float = 0.0) -> Replayed:
    return replay(
        traces,
        role_of,
        lambda axis, rank: range(len(role_of)),
        lambda rank, work: SECONDS[work],
        lambda call, group: (call_seconds, {}),
        core_share=(lambda rank, work: 1 / cores) if cores else None,
    )


@pytest.mark.parametrize(
    "cores, ends", [(0, [2, 2, 3]), (3, [2, 2, 3]), (2, [3, 3, 4]), (1, [6, 6, 7])]
)
def test_while_more_compute_all_slow_down(cores, ends):
    found = played([[Busy("short", "forward")], [Busy("long", "forward")]], [0, 0, 1], cores)
    assert [found.times(rank)[-1] for rank in range(3)] == pytest.approx(ends)


def test_who_waits_leaves_its_core():
    """Rank 0 computes 2 s, rank 1 3 s, on one core; then they meet, for 1 s, and rank 0 computes 2
    s alone."""
    meet = [Start(1, CALL), Await(1)]
    found = played(
        [
            [Busy("short", "forward"), *meet, Busy("short", "update")],
            [Busy("long", "forward"), *meet],
        ],
        [0, 1],
        1,
        call_seconds=1.0,
    )
    # both: until 4 s; rank 1's last second alone
    assert list(found.times(0)) == pytest.approx([0, 4, 6, 8])
    assert list(found.times(1)) == pytest.approx([0, 5, 6])
    spent = time_of(found, 0)
    assert (dict(spent.busy), dict(spent.exposed), dict(spent.idle)) == (
        {"forward": 4.0, "update": 2.0},
        {"dp": 1.0},
        {"dp": 1.0},
    )
    assert [(piece.kind, piece.rank, piece.stop) for piece in critical_path(found)] == [
        ("busy", 1, 5.0),
        ("call", 0, 6.0),
        ("busy", 0, 8.0),
    ]
