"""Test what holds a run up now: watch names the rank or link that diagnose names, for the same
cause, and since when."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
from flights import VirtualJob
from sick_jobs import Fault, judge, sick_job
from step_records import MIB, linked, table, write_records
from watched import WatchedRun

from minidist.observe.diagnose.flights import RankFlight, read_flights
from minidist.observe.diagnose.rules import diagnose
from minidist.observe.live.looking import Looking
from minidist.observe.live.slow_now import GONE, NEWEST, slow_now, wrong_now
from minidist.observe.rank_steps import read_rank_steps

SLOW = {"cpu": 1.5}
READS = {"input": lambda step, line: 0.025}
MORE = {"tokens": 1.4, "cpu": 1.3}
HOGS = {"others": lambda step, line: 0.06}


def silent(size):
    """A recorder that says nothing."""
    return [RankFlight(0, "here", 1, size, {}, [], "unknown", 0.0)]


def of_diagnose(records):
    """(ranks, cause) of what diagnose finds first, but for the recorders that are not there."""
    found = [
        fault
        for fault in diagnose(silent(len(records.ranks)), records.ranks).findings
        if fault.cause != "no recorder"
    ]
    return [(fault.ranks, fault.cause) for fault in found][:1]


def of_watch(records):
    now = slow_now(silent(len(records.ranks)), records.ranks)
    return [] if now is None else [(now.ranks, now.cause)]


@pytest.mark.sampled
@pytest.mark.parametrize("steps", [20, 70, 150])
@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize(
    "changed", [SLOW, READS, MORE, HOGS], ids=["slow", "reads", "more", "hogs"]
)
def test_watch_and_diagnose_name_the_same_rank_for_the_same_cause(changed, size, steps):
    records = table(size, steps, victim=1, at=steps - 12, **changed)
    assert of_watch(records) == of_diagnose(records) != []


@pytest.mark.parametrize(
    "records",
    [
        table(),
        table(7, 200),
        table(cpu=1.15),
        table(tokens=1.2, cpu=1.15),
        table(steps=12, at=8, **SLOW),
        table(2, 100, at=96, **SLOW),
        linked(slow=1.0),
        linked(slow=1.0, late=0.5),
    ],
    ids=[
        "clean",
        "clean and long",
        "a little slower",
        "a little more",
        "four steps",
        "four of many",
        "links",
        "a late receiver",
    ],
)
def test_where_diagnose_names_nobody_watch_does_not_either(records):
    assert of_watch(records) == of_diagnose(records) == []


def test_a_slow_link_has_two_ends():
    records = linked()
    now = slow_now(silent(4), records.ranks)
    assert of_watch(records) == of_diagnose(records) == [((1, 2), "slow link")]
    assert now is not None and now.who == "the link from rank 1 to rank 2" and now.slow_ranks == ()


def test_all_ranks_may_wait_for_their_data():
    records = table(3, 40)
    for each in records.ranks.values():
        for line in each.steps[20:]:
            line["input"] = 0.05
    now = slow_now(silent(3), records.ranks)
    assert of_watch(records) == of_diagnose(records) == [((0, 1, 2), "late reader")]
    assert now is not None and (now.who, now.since, now.slow_ranks) == ("ranks 0-2", 21, (0, 1, 2))


def slow_in(steps, of, *, size=3, victim=2, changed="cpu"):
    """Records in which the victim computes twice as long in some steps."""
    return table(
        size,
        of,
        victim=victim,
        at=0,
        **{changed: lambda step, line: line[changed] * (1 + (step in steps))},
    )


@pytest.mark.parametrize(
    ("steps", "since"),
    [
        (range(20, 50), 21),
        (range(50 - NEWEST, 50), 2),
        (range(7, 230), 8),
        ([*range(20, 60), *range(63, 90)], 21),
        ([*range(20, 30), *range(41, 70)], 42),
    ],
    ids=[
        "a streak",
        "from the first step that counts",
        "longer than is judged at once",
        "with a pause",
        "again",
    ],
)
def test_since_when(steps, since):
    """Slow with pauses means slow since the first slow step, if none was longer than the streak
    before it."""
    records = slow_in({*steps}, max(steps) + 1)
    now = slow_now(silent(3), records.ranks)
    assert now is not None and (now.ranks, now.cause, now.since) == ((2,), "slow compute", since)


def test_what_is_over_is_named_by_diagnose_alone():
    records = slow_in({*range(10, 30)}, 30 + GONE)
    assert of_watch(records) == of_diagnose(records) == [((2,), "slow compute")]
    records = slow_in({*range(10, 30)}, 31 + GONE)
    assert of_watch(records) == [] and of_diagnose(records) == [((2,), "slow compute")]


def test_a_fault_that_is_over_hides_none_that_lasts():
    records = slow_in({*range(2, 30)}, 52)
    for line in records.ranks[0].steps[44:]:
        line["input"] = 0.03
    assert of_watch(records) == [((0,), "late reader")]
    again = slow_in({*range(2, 30), *range(44, 52)}, 52)  # the same rank, less long
    assert of_watch(again) == [((2,), "slow compute")]


def test_a_rank_that_lags_in_its_records_is_judged_by_the_steps_that_all_have():
    records = slow_in({*range(20, 50)}, 50)
    for line in table(3, 70).ranks[0].steps[50:]:
        records.ranks[0].steps.append(line)
    assert of_watch(records) == [((2,), "slow compute")]


def test_what_else_is_wrong_is_told_and_explains_a_rank_that_comes_late(tmp_path: Path) -> None:
    leak = table(4, 40, rss=lambda step, line: 80 * MIB + 2 * MIB * step)
    assert wrong_now(leak.ranks) == ("the memory of rank 2 grows in every step",)
    assert wrong_now(table().ranks) == wrong_now({}) == ()
    run = WatchedRun(tmp_path, steps=40, slow=2)
    flights = read_flights(run.folder)
    late = slow_now(flights, table(4, 40).ranks)
    explained = slow_now(flights, leak.ranks)
    assert late is not None and (late.ranks, late.cause) == ((2,), "slow") and explained is None
    assert [fault.cause for fault in diagnose(flights, leak.ranks).findings if fault.ranks == (2,)][
        :1
    ] != ["slow"]


def test_a_look_reads_the_records_of_steps(tmp_path: Path) -> None:
    """All ranks come to their calls at once; the records tell that one of them computes longer."""
    WatchedRun(tmp_path, steps=30)
    write_records(tmp_path, table(4, 30, victim=3, at=15, **SLOW), ends_at=time.time())
    looking = Looking(tmp_path)
    now = looking.look().slow
    assert now is not None and (now.ranks, now.cause, now.since) == ((3,), "slow compute", 16)
    found = diagnose(read_flights(tmp_path), read_rank_steps(tmp_path)).findings
    assert [(fault.ranks, fault.cause, fault.what, fault.sure) for fault in found] == [
        (now.ranks, now.cause, now.what, now.sure)
    ]
    assert now.seconds == pytest.approx(3.0, abs=1.0)  # steps of 0.2 s
    file = tmp_path / "steps" / "00003.jsonl"
    clean = write_records(tmp_path / "clean", table(4, 50)) / "steps" / "00003.jsonl"
    file.write_text(file.read_text() + "\n".join(clean.read_text().splitlines()[31:]) + "\n")
    for rank in range(3):
        other = tmp_path / "steps" / f"{rank:05d}.jsonl"
        lines = (tmp_path / "clean" / "steps" / other.name).read_text().splitlines()[31:]
        other.write_text(other.read_text() + "\n".join(lines) + "\n")
    assert looking.look().slow is None


def test_records_of_an_earlier_run_do_not_count(tmp_path: Path) -> None:
    write_records(tmp_path, table(4, 30, rss=lambda step, line: 80 * MIB + 2 * MIB * step, **SLOW))
    WatchedRun(tmp_path, steps=0, log=False)
    now = Looking(tmp_path).look()
    assert (now.state, now.slow, now.wrong) == ("not begun", None, ())


def test_of_a_run_that_hangs_the_cause_of_the_hang_is_told(tmp_path: Path) -> None:
    WatchedRun(tmp_path, steps=30, slow=2, quiet=30.0)
    now = Looking(tmp_path).look()
    assert now.state == "stalled" and now.slow is None


# ----------------------------------------------------------------------------- jobs that really ran


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["slow compute", "late reader", "uneven data", "hog", "slow link"])
def test_of_a_sick_job_watch_names_whom_diagnose_names(kind: str, tmp_path: Path) -> None:
    """Where other programs hide the fault from diagnosis, or in the last steps, another job is
    made: three at most."""
    for turn in range(3):
        fault = Fault(kind, 1, 4, at=6, seed=3 + turn, steps=36)
        found = sick_job(tmp_path / str(turn), fault).found
        now = slow_now(read_flights(tmp_path / str(turn)), read_rank_steps(tmp_path / str(turn)))
        if now is not None and judge(fault, found) == (True, True):
            assert (now.ranks, now.cause) == (found[0].ranks, found[0].cause)
            return
    raise AssertionError(f"in none of three jobs both name the fault; the last: {found}, {now}")


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_a_clean_job_is_never_called_slow(seed: int, tmp_path: Path) -> None:
    """Looked at after every second step; ranks share their cores."""
    assert (
        sick_job(tmp_path, Fault("none", 0, (4, 8, 3)[seed], seed=40 + seed, steps=300)).found == []
    )
    records = read_rank_steps(tmp_path)
    told = {}
    for end in range(2, 300, 2):
        known = {rank: replace(each, steps=each.steps[:end]) for rank, each in records.items()}
        if (now := slow_now([], known)) is not None:
            told[end] = now
    assert told == {}


# --------------------------------------------------------------- recorders without records of steps


@pytest.mark.parametrize(("since", "steps"), [(0, 12), (25, 40), (33, 40), (37, 40)])
def test_a_rank_that_comes_late_is_named_with_the_step_from_which_it_does(
    since: int, steps: int, tmp_path: Path
) -> None:
    """It waits least; the others wait 80 ms of 200 for it."""
    now = Looking(WatchedRun(tmp_path, steps=steps, slow=2, since=since).folder).look()
    if steps - since < 7:  # in too few of the newest steps
        assert now.slow is None
        return
    assert now.slow is not None and (now.slow.ranks, now.slow.cause) == ((2,), "slow")
    assert (
        now.slow.since == since + 1
        and "the others wait 0.08 s of a step of 0.2 s for it" in now.slow.what
    )
    assert (
        now.slow.seconds == pytest.approx(0.2 * (steps - since), abs=1e-3)
        and now.slow.where == "train.py:40"
    )
    waited = {rank.rank: rank.parts.waiting for rank in now.ranks if rank.parts is not None}
    assert waited[2] < 0.001
    assert [waited[rank] for rank in (0, 1, 3)] == pytest.approx(
        [0.08 * min(10, steps - since) / 10] * 3, abs=1e-3
    )


def test_since_when_is_the_newest_time_that_it_is_late(tmp_path: Path) -> None:
    """Rank 1 was late in steps 3 to 9 and is again from 25 on, but for one step."""
    job = VirtualJob(tmp_path, 3)
    for step in range(40):
        late = step in range(3, 10) or (step >= 25 and step != 30)
        for rank in range(3):
            job.step(rank, step, step)
            job.call(rank, step + (0.5 if rank == 1 and late else 0.1), step + 0.6)
    now = slow_now(read_flights(tmp_path))
    assert now is not None and (now.ranks, now.since) == ((1,), 26)


def test_ranks_that_are_late_in_turn_are_not_slow(tmp_path: Path) -> None:
    job = VirtualJob(tmp_path, 3)
    for step in range(30):
        for rank in range(3):
            job.step(rank, step, step)
            job.call(rank, step + (0.5 if step % 3 == rank else 0.1), step + 0.6)
    assert slow_now(read_flights(tmp_path)) is None
