"""The replay of events: its clock, shared links, folding, the critical path, and ranks that wait
for ever."""

import time
from collections import defaultdict
from collections.abc import Hashable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from traces import Ids, Job, grid, node_cost

from minidist.errors import DeadlockError, MismatchError
from minidist.observe.events import Await, Busy, Event, GroupCall, Start, Sync, Transfer
from minidist.observe.replay import plain_replay, replay
from minidist.observe.replay_path import critical_path, time_of
from minidist.parallel.pipeline.schedule_checker import Times, clock_of
from minidist.parallel.pipeline.schedules import ORDERS, make_schedule

SECONDS = {"Forward": 1.0, "Backward": 2.0, "BackwardInput": 1.0, "BackwardWeights": 1.0}


def unit_seconds(rank: int, work: Hashable) -> float:
    return SECONDS[str(work)]


def real_seconds(rank: int, work: Hashable) -> float:
    return 1e-3 * SECONDS.get(str(work), 5.0)


def free(call: GroupCall, group: tuple[int, ...]) -> tuple[float, dict[Any, float]]:
    return 0.0, {}


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("message", [0.0, 0.25])
def test_the_bubble_is_the_checkers(name: str, message: float) -> None:
    for ranks in (1, 2, 3, 4, 7):
        for microbatches in (1, 2, 4, 5, 12):
            schedule = make_schedule(name, ranks, microbatches)
            job = grid(schedule)
            clock = clock_of(schedule, Times(message=message))
            replayed = replay(
                job.traces,
                job.role_of,
                job.members,
                unit_seconds,
                lambda call, group: (message, {}),
            )
            busy = sum(sum(time_of(replayed, rank).busy.values()) for rank in range(ranks))
            assert max(stops[-1] for stops in replayed.stops) == clock.length
            assert 1.0 - busy / (ranks * clock.length) == pytest.approx(clock.bubble, abs=1e-12)


# --------------------------------------------------------------------------------- the host's queue


def hosted(trace: list[Event], host: float, device: dict[str, float]) -> list[float]:
    """The ends of a rank's work; its host takes `host` seconds for each."""
    replayed = replay(
        [trace],
        [0],
        lambda axis, rank: (rank,),
        lambda rank, work: device[str(work)],
        free,
        issue_seconds=lambda rank, work: host,
    )
    return list(replayed.times(0))[1:]


def test_a_step_takes_as_long_as_the_longer_of_two_queues() -> None:
    trace: list[Event] = [Busy(name, "forward") for name in ("long", "short", "short", "short")]
    device = {"long": 3.0, "short": 0.5}
    # the host is ahead of the long kernel, and late for the last short one
    assert hosted(trace, 0.0, device) == [3.0, 3.5, 4.0, 4.5]
    assert hosted(trace, 1.0, device) == [3.0, 3.5, 4.0, 4.5]
    assert hosted(trace, 1.5, device) == [3.0, 3.5, 4.5, 6.0]


def test_a_host_that_reads_a_number_loses_what_it_was_ahead() -> None:
    device = {"long": 3.0, "short": 0.5}
    trace: list[Event] = [Busy("long", "forward"), Sync(), Busy("short", "forward")]
    assert hosted(trace, 1.0, device) == [3.0, 3.0, 4.0]


def test_a_host_runs_ahead_while_its_rank_waits_for_others() -> None:
    """Rank 1 comes to the call at 4 s; until then the host of rank 0 has issued what follows."""
    call: list[Event] = [Start(0, GroupCall("dp", "all_reduce", "ring", 1)), Await(0)]
    traces: list[list[Event]] = [
        [Busy("short", "a"), *call, Busy("short", "b")],
        [Busy("long", "a"), *call, Busy("short", "b")],
    ]
    replayed = replay(
        traces,
        [0, 1],
        lambda axis, rank: (0, 1),
        lambda rank, work: {"short": 0.5, "long": 4.0}[str(work)],
        free,
        issue_seconds=lambda rank, work: 1.0,
    )
    assert [replayed.times(rank)[-1] for rank in (0, 1)] == [4.5, 4.5]
    pieces = [(piece.name, piece.start, piece.stop) for piece in critical_path(replayed)]
    assert pieces[0] == ("a", 0.0, 4.0) and pieces[-1] == ("b", 4.0, 4.5)


# ---------------------------------------------------------------------------------- links and folds


def test_calls_on_one_link_slow_each_other_down() -> None:
    """The example of shared_links.py: two calls of 2 s alone, the second from 1 s on."""
    calls = [[Start(0, GroupCall(axis, "all_reduce", "ring", 1)), Await(0)] for axis in ("a", "b")]
    traces: list[list[Event]] = [calls[0], [Busy("wait", "wait"), *calls[1]]]
    replayed = replay(
        traces,
        [0, 1],
        lambda axis, rank: (rank,),
        lambda rank, work: 1.0,
        lambda call, group: (2.0, {"wire": 1.0}),
    )
    assert [replayed.times(rank)[-1] for rank in (0, 1)] == [3.0, 4.0]
    pieces = [
        (piece.kind, piece.name, piece.start, piece.stop) for piece in critical_path(replayed)
    ]
    assert pieces == [
        ("busy", "wait", 0.0, 1.0),
        ("call", "b", 1.0, 3.0),
        ("shared links", "b", 3.0, 4.0),
    ]


@given(
    st.integers(2, 4),
    st.integers(1, 6),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 5),
    st.integers(-1, 9),
    st.sampled_from([(), ("out", 1), ("up", 2)]),
    st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
    st.booleans(),
)
# all data groups of a node are alike, and share its network link
@example(2, 4, 4, 4, -1, (), "1f1b", True)
@settings(max_examples=12)
def test_folded_and_unfolded_agree(
    pp: int, microbatches: int, tp: int, dp: int, straggler: int, slow: Any, name: str, alike: bool
) -> None:
    job = grid(make_schedule(name, pp, microbatches), dp=dp, tp=tp, layers=2, alike=alike)

    def busy(rank: int, work: Hashable) -> float:
        return real_seconds(rank, work) * (1.5 if rank == straggler else 1.0)

    def cost(call: GroupCall, group: tuple[int, ...]) -> Any:
        return node_cost(call, group, slow=slow)

    folded, unfolded = (
        replay(job.traces, job.role_of, job.members, busy, cost, folded=fold)
        for fold in (True, False)
    )
    assert folded.seconds == pytest.approx(unfolded.seconds, rel=1e-12)
    for rank in range(len(job.role_of)):
        assert folded.times(rank) == pytest.approx(unfolded.times(rank), rel=1e-12)
    for replayed in (folded, unfolded):
        _accounts_add_up(replayed, len(job.role_of))


def _accounts_add_up(replayed: Any, ranks: int) -> None:
    for begin in (0.0, replayed.seconds / 3):
        pieces = critical_path(replayed, begin)
        assert pieces[0].start == begin and pieces[-1].stop == replayed.seconds
        assert [piece.start for piece in pieces[1:]] == pytest.approx(
            [piece.stop for piece in pieces[:-1]]
        )
        for rank in range(ranks):
            spent = time_of(replayed, rank, begin)
            total = sum(sum(part.values()) for part in (spent.busy, spent.exposed, spent.idle))
            assert total == pytest.approx(replayed.seconds - begin)


def test_data_ranks_share_a_clock_until_one_is_slow() -> None:
    job = grid(make_schedule("1f1b", 2, 4), dp=8, tp=2, layers=1)

    def clocks(slow: int | None) -> int:
        return len(
            replay(
                job.traces,
                job.role_of,
                job.members,
                lambda rank, work: real_seconds(rank, work) * (1 + (rank == slow)),
                node_cost,
            ).ranks
        )

    assert clocks(None) == 4  # stage × tensor rank
    assert 4 < clocks(5) <= 32


@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.sampled_from([1, 2]),
    st.integers(1, 3),
    st.sampled_from(["naive", "1f1b", "interleaved"]),
)
@settings(max_examples=8)
def test_without_shared_links_it_is_the_plain_version(
    pp: int, microbatches: int, tp: int, dp: int, name: str
) -> None:
    job = grid(make_schedule(name, pp, microbatches), dp=dp, tp=tp, layers=2)
    ends = plain_replay(
        job.each, job.members, real_seconds, lambda call, group: node_cost(call, group)[0]
    )
    replayed = replay(
        job.traces,
        job.role_of,
        job.members,
        real_seconds,
        lambda call, group: (node_cost(call, group)[0], {}),
    )
    assert [replayed.times(rank)[-1] for rank in range(len(ends))] == pytest.approx(ends, rel=1e-12)


def test_shared_links_are_felt() -> None:
    """Four data groups of one node share its network link: their calls take longer than alone."""
    job = grid(make_schedule("gpipe", 1, 1), dp=2, tp=4, layers=1)
    together = replay(job.traces, job.role_of, job.members, real_seconds, node_cost)
    alone = replay(
        job.traces,
        job.role_of,
        job.members,
        real_seconds,
        lambda call, group: (node_cost(call, group)[0], {}),
    )
    data = sum(
        node_cost(event.call, (0, 4))[0]
        for event in job.traces[0]
        if isinstance(event, Start) and event.call.axis == "dp"
    )
    assert together.seconds - alone.seconds == pytest.approx((4 * 0.6 - 1) * data)


# ----------------------------------------------------------------------------------- streams, moves


@pytest.mark.parametrize("waits", [(0, 1), (1,)])
def test_calls_of_a_group_run_one_after_another_beside_the_compute(waits: tuple[int, ...]) -> None:
    """Who waits for the second call alone is exposed to the first one, too."""
    ids = Ids()
    call = GroupCall("dp", "all_reduce", "ring", 1)
    trace: list[Event] = [
        ids.start(call),
        ids.start(call),
        Busy(1.0, "backward"),
        *map(Await, waits),
    ]
    replayed = replay(
        [trace],
        [0, 0],
        lambda axis, rank: (0, 1),
        lambda rank, work: float(str(work)),
        lambda call, group: (2.0, {}),
    )
    spent = time_of(replayed, 0)
    assert replayed.seconds == 4.0
    assert dict(spent.busy) == {"backward": 1.0} and dict(spent.exposed) == {"dp": 3.0}
    assert not sum(spent.idle.values())


def test_a_lane_moves_one_after_another() -> None:
    trace: list[Event] = [
        Transfer(0, "in", 4),
        Transfer(1, "in", 4),
        Transfer(2, "out", 1),
        Busy(1.0, "forward"),
        Await(2),
        Await(1),
    ]
    replayed = replay(
        [trace],
        [0],
        lambda axis, rank: (0,),
        lambda rank, work: 1.0,
        free,
        move_seconds=lambda rank, move: float(move.nbytes),
    )
    assert list(replayed.times(0)) == [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 8.0]
    assert [(piece.kind, piece.stop) for piece in critical_path(replayed)] == [
        ("move", 4.0),
        ("move", 8.0),
    ]


@pytest.mark.parametrize("blocking", [True, False])
def test_a_rank_continues_sooner_than_the_call_ends_on_all(blocking: bool) -> None:
    """Rank 0 continues 0.4 s before the end, and its next call comes so much sooner."""
    calls = [GroupCall("dp", "all_reduce", "ring", nbytes) for nbytes in (1, 2)]
    work = [] if blocking else [Busy(0.5, "backward")]
    traces = [
        [Start(0, calls[0]), *work, Await(0, sooner), Busy(0.1, "update"), Start(1, calls[1])]
        for sooner in (0.4, 0.0)
    ]
    replayed = replay(
        traces,
        [0, 1],
        lambda axis, rank: (0, 1),
        lambda rank, work: float(str(work)),
        lambda call, group: (2.0 * call.nbytes, {}),
    )
    assert replayed.times(0)[-1] == pytest.approx(1.7)
    assert replayed.times(1)[-1] == pytest.approx(2.1)
    assert replayed.seconds == pytest.approx(6.1)
    path = [(piece.name, piece.stop) for piece in critical_path(replayed, calls=False)]
    assert path == [("dp", pytest.approx(2.0)), ("update", pytest.approx(2.1))]


def test_waiting_for_others_is_idle_and_not_communication() -> None:
    call = GroupCall("dp", "all_reduce", "ring", 1)
    trace: list[Event] = [Busy("compute", "backward"), Start(0, call), Await(0)]
    replayed = replay(
        [trace],
        [0, 0, 0],
        lambda axis, rank: (0, 1, 2),
        lambda rank, work: 1.0 + rank,
        lambda call, group: (0.5, {}),
    )
    assert [dict(time_of(replayed, rank).idle) for rank in range(3)] == [
        {"dp": 2.0},
        {"dp": 1.0},
        {"dp": 0.0},
    ]
    assert all(time_of(replayed, rank).exposed == {"dp": 0.5} for rank in range(3))


def test_a_call_that_nobody_waits_for_belongs_to_the_step() -> None:
    trace: list[Event] = [
        Start(0, GroupCall("dp", "all_reduce", "ring", 1)),
        Busy("compute", "backward"),
    ]
    replayed = replay(
        [trace],
        [0, 0],
        lambda axis, rank: (0, 1),
        lambda rank, work: 1.0,
        lambda call, group: (2.5, {}),
    )
    assert replayed.seconds == 2.5 and time_of(replayed, 0).idle == {"end": 1.5}
    assert [piece.kind for piece in critical_path(replayed)] == ["call"]


# -------------------------------------------------------------------------------- traces gone wrong


def pair(first: list[Event], second: list[Event], **options: Any) -> Any:
    return replay(
        [first, second], [0, 1], lambda axis, rank: (0, 1), lambda rank, work: 1.0, free, **options
    )


def test_ranks_that_wait_for_each_other_are_named() -> None:
    traces = [
        [
            Start(0, GroupCall("pp", "recv", "direct", 8, peer=other)),
            Await(0),
            Start(1, GroupCall("pp", "send", "direct", 8, peer=other)),
        ]
        for other in (1, 0)
    ]
    with pytest.raises(DeadlockError) as caught:
        pair(*traces)
    assert str(caught.value) == (
        "deadlock: these ranks wait for each other: rank 0 in send 0 of the pp messages from "
        "rank 1 to rank 0 for rank 1; rank 1 in send 0 of the pp messages from rank 0 to rank 1 "
        "for rank 0"
    )
    with pytest.raises(DeadlockError, match=r"ranks \[0, 1\] wait for ever"):
        plain_replay(
            traces, lambda axis, rank: (0, 1), lambda rank, work: 1.0, lambda call, group: 0.0
        )


def test_groups_in_another_order_are_a_deadlock() -> None:
    one = Ids()
    other = Ids()
    calls = [GroupCall(axis, "all_reduce", "ring", 8) for axis in ("dp", "tp")]
    with pytest.raises(
        DeadlockError,
        match="rank 0 in all_reduce 0 of the dp group of ranks 0, 1 for rank 1; "
        "rank 1 in all_reduce 0 of the tp group of ranks 0, 1 for rank 0",
    ):
        pair(
            [event for call in calls for event in one.blocking(call)],
            [event for call in reversed(calls) for event in other.blocking(call)],
        )


@pytest.mark.parametrize(
    "traces, told",
    [
        (
            (
                [Start(0, GroupCall("dp", "all_reduce", "ring", 8))],
                [Start(0, GroupCall("dp", "all_gather", "ring", 8))],
            ),
            r"call 0 along dp: rank 0 calls an all_reduce \(ring\), rank 1 an all_gather \(ring\)",
        ),
        (([Start(0, GroupCall("dp", "all_reduce", "ring", 8))], []), "rank 1 nothing more"),
        (
            ([Start(0, GroupCall("pp", "recv", "direct", 8, peer=1)), Await(0)], []),
            "rank 0 receives 1 messages of the pp messages from rank 1 to rank 0, but only 0 "
            "are sent",
        ),
        (([Await(3)], []), "event 0 of a trace waits for call 3, which no event before it starts"),
    ],
)
def test_traces_that_do_not_fit_together(traces: Any, told: str) -> None:
    with pytest.raises(MismatchError, match=told):
        pair(*traces)


# -------------------------------------------------------------------------------------------- scale


def _big(dp: int) -> Job:
    return grid(make_schedule("1f1b", 8, 64), dp=dp, tp=8, layers=20)


@pytest.mark.soak
@pytest.mark.parametrize("dp, folded", [(16, False), (256, True)])
def test_a_thousand_ranks_and_sixteen_thousand(dp: int, folded: bool) -> None:
    """1,024 ranks with a clock each, or 16,384 folded: processor time, on one core."""
    job = _big(dp)
    costs = defaultdict[Any, Any](lambda: None)

    def cost(call: GroupCall, group: tuple[int, ...]) -> Any:
        key = call, group
        costs[key] = costs[key] or node_cost(call, group, node=8)
        return costs[key]

    start = time.process_time()
    replayed = replay(job.traces, job.role_of, job.members, real_seconds, cost, folded=folded)
    assert len(job.traces[0]) > 5000
    assert (len(replayed.ranks) == 64) == folded
    assert time.process_time() - start < 60.0
