"""What the recorders say of a run: time, bytes, memory, power, and the rank that is slow, since when."""

from pathlib import Path

import pytest
from flights import VirtualJob
from watched import WatchedRun

from minidist.observe.diagnose.flights import read_flights
from minidist.observe.live.looking import Looking
from minidist.observe.live.run_now import RankNow, newest_parts, slow_now, watts_of
from minidist.observe.live.step_parts import StepParts


def test_time_bytes_and_memory_of_recorded_ranks(tmp_path: Path) -> None:
    now = Looking(WatchedRun(tmp_path, size=3).folder).look()
    for rank in now.ranks:
        assert rank.parts is not None and rank.parts.exposed == pytest.approx(0.05, abs=1e-4)
        assert rank.parts.waiting == pytest.approx(0.0, abs=1e-4)
        assert rank.memory["gradients"] == (10 + rank.rank) << 10 and rank.limit == 64 << 20
        assert rank.peak["total"] == sum(rank.memory.values())
        assert rank.watts == pytest.approx(10.0, rel=1e-3) and rank.source == "estimate"
    assert now.watts == pytest.approx(30.0, rel=1e-3) and now.estimate
    (axis,) = now.axes
    assert (axis.name, axis.ranks, axis.link, axis.a_step) == ("world", 3, "one host", 48)
    assert axis.a_second == pytest.approx(240.0, rel=1e-3) and axis.exposed == pytest.approx(0.05, abs=1e-4)


@pytest.mark.parametrize(("since", "steps"), [(0, 12), (25, 40), (33, 40), (37, 40)])
def test_a_slow_rank_is_named_with_the_step_from_which_it_is_slow(since: int, steps: int, tmp_path: Path) -> None:
    """It waits least; the others wait 80 ms of 200 for it."""
    now = Looking(WatchedRun(tmp_path, steps=steps, slow=2, since=since).folder).look()
    if steps - since < 7:                               # in too few of the newest steps
        assert now.slow is None
        return
    assert now.slow is not None and now.slow.rank == 2
    assert now.slow.since == since + 1 and now.slow.delay == pytest.approx(0.08, abs=1e-3)
    assert now.slow.seconds == pytest.approx(0.2 * (steps - since), abs=1e-3) and now.slow.where == "train.py:40"
    waited = {rank.rank: rank.parts.waiting for rank in now.ranks if rank.parts is not None}
    assert waited[2] < 0.001
    assert [waited[rank] for rank in (0, 1, 3)] == pytest.approx([0.08 * min(10, steps - since) / 10] * 3, abs=1e-3)


def test_since_when_is_the_newest_time_that_it_is_slow(tmp_path: Path) -> None:
    """Rank 1 was slow in steps 3 to 9 and is again from 25 on, but for one step."""
    job = VirtualJob(tmp_path, 3)
    for step in range(40):
        late = step in range(3, 10) or (step >= 25 and step != 30)
        for rank in range(3):
            job.step(rank, step, step)
            job.call(rank, step + (0.5 if rank == 1 and late else 0.1), step + 0.6)
    now = slow_now(read_flights(tmp_path))
    assert now is not None and (now.rank, now.since) == (1, 26) and now.delay == pytest.approx(0.4, abs=1e-3)


def test_ranks_that_are_late_in_turn_are_not_slow(tmp_path: Path) -> None:
    job = VirtualJob(tmp_path, 3)
    for step in range(30):
        for rank in range(3):
            job.step(rank, step, step)
            job.call(rank, step + (0.5 if step % 3 == rank else 0.1), step + 0.6)
    assert slow_now(read_flights(tmp_path)) is None


def test_the_mean_is_over_steps_that_all_ranks_have_ended() -> None:
    one, other = ({step: StepParts(seconds) for step, seconds in steps.items()}
                  for steps in ({3: 1.0, 4: 2.0, 5: 9.0}, {2: 9.0, 3: 3.0, 4: 5.0}))
    found = newest_parts({0: one, 1: other, })
    assert [parts and parts.seconds for parts in found.values()] == [1.5, 4.0]
    found = newest_parts({0: one, 1: {}})
    assert found[0] is not None and found[0].seconds == 4.0 and found[1] is None


def rank_now(rank: int, host: str, watts: float | None, source: str) -> RankNow:
    return RankNow(rank, host, "runs", 1, None, {}, {}, None, watts, source)


def test_counters_of_a_host_count_once_and_an_estimate_makes_the_sum_one() -> None:
    counted = [rank_now(rank, "one" if rank < 2 else "two", 50.0 + rank, "rapl") for rank in range(4)]
    assert watts_of(counted) == (51.0 + 53.0, False)
    assert watts_of([*counted, rank_now(4, "three", 7.0, "estimate")]) == (111.0, True)
    assert watts_of([rank_now(0, "one", 300.0, "nvml"), rank_now(1, "one", 310.0, "nvml")]) == (610.0, False)
    assert watts_of([rank_now(0, "one", None, "")]) == (None, False)
