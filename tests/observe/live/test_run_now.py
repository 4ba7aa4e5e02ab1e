"""Test what the recorders say of a run: time, bytes, memory, power."""

from pathlib import Path

import pytest
from watched import WatchedRun

from minidist.observe.live.looking import Looking
from minidist.observe.live.run_now import (
    BETWEEN_HOSTS,
    UNKNOWN_LINK,
    RankNow,
    newest_parts,
    watts_of,
)
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
    assert axis.a_second == pytest.approx(240.0, rel=1e-3) and axis.exposed == pytest.approx(
        0.05, abs=1e-4
    )


def test_a_link_to_a_rank_without_a_recorder_is_not_said_to_lead_to_another_host(
    tmp_path: Path,
) -> None:
    run = WatchedRun(tmp_path, size=3)
    (run.folder / "flight" / "00002.ring").unlink()
    (axis,) = Looking(run.folder).look().axes
    assert axis.link == UNKNOWN_LINK
    run = WatchedRun(tmp_path / "two", size=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("platform.node", lambda: "another")
        run.job.flights[1]._write_header()
    (axis,) = Looking(run.folder).look().axes
    assert axis.link == BETWEEN_HOSTS


def test_the_mean_is_over_steps_that_all_ranks_have_ended() -> None:
    one, other = (
        {step: StepParts(seconds) for step, seconds in steps.items()}
        for steps in ({3: 1.0, 4: 2.0, 5: 9.0}, {2: 9.0, 3: 3.0, 4: 5.0})
    )
    found = newest_parts(
        {
            0: one,
            1: other,
        }
    )
    assert [parts and parts.seconds for parts in found.values()] == [1.5, 4.0]
    found = newest_parts({0: one, 1: {}})
    assert found[0] is not None and found[0].seconds == 4.0 and found[1] is None


def rank_now(rank: int, host: str, watts: float | None, source: str) -> RankNow:
    return RankNow(rank, host, "runs", 1, None, {}, {}, None, watts, source)


def test_counters_of_a_host_count_once_and_an_estimate_makes_the_sum_one() -> None:
    counted = [
        rank_now(rank, "one" if rank < 2 else "two", 50.0 + rank, "rapl") for rank in range(4)
    ]
    assert watts_of(counted) == (51.0 + 53.0, False)
    assert watts_of([*counted, rank_now(4, "three", 7.0, "estimate")]) == (111.0, True)
    assert watts_of([rank_now(0, "one", 300.0, "nvml"), rank_now(1, "one", 310.0, "nvml")]) == (
        610.0,
        False,
    )
    assert watts_of([rank_now(0, "one", None, "")]) == (None, False)
