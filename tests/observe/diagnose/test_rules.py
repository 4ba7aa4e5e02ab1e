"""Test what `minidist diagnose` finds in the flight recorders of jobs that went wrong, and of those
that did not."""

import pytest
from flights import VirtualJob, made

from minidist.errors import ConfigError
from minidist.observe.diagnose.flights import read_flights
from minidist.observe.diagnose.rules import diagnose


def findings(folder, **options):
    return diagnose(read_flights(folder), **options).findings


def only(folder, **options):
    (found,) = findings(folder, **options)
    return found


def test_a_job_that_ended_well_is_healthy(tmp_path):
    job = VirtualJob(tmp_path, 3)
    for rank in range(3):
        for step in range(20):
            job.step(rank, step, -50 + step)
            job.call(rank, -50 + step + 0.5 + 0.01 * rank, -50 + step + 0.6)
        job.end(rank, -20.0)
    assert findings(tmp_path) == []
    assert (
        diagnose(read_flights(tmp_path)).summary
        == "ranks 0-2, 60 calls, the last in step 19; every rank ended well"
    )


def test_a_job_whose_ranks_have_just_begun_has_no_newest_record(tmp_path):
    VirtualJob(tmp_path, 2, alive=True)
    found = diagnose(read_flights(tmp_path))
    assert (found.findings, found.summary) == (
        [],
        "ranks 0-1, 0 calls; the job runs and has recorded nothing yet",
    )


def test_a_job_that_runs_is_healthy_while_its_calls_are_young(tmp_path):
    job = VirtualJob(tmp_path, 2, alive=True)
    job.call(0, -3.0, None)
    assert findings(tmp_path) == []
    assert only(tmp_path, stuck=1.0).ranks == (1,)


def test_thirty_of_32_ranks_are_behind_the_two_that_wait(tmp_path):
    job = VirtualJob(tmp_path, 32, alive=True)
    for rank in range(32):
        job.call(rank, -100.0, -99.0, sequence=640)
        if rank in (4, 9):
            job.call(rank, -98.0, None, where="train.py:55")
    found = only(tmp_path)
    assert (found.cause, found.ranks) == (
        "behind",
        tuple(rank for rank in range(32) if rank not in (4, 9)),
    )
    assert (
        "call 641" in found.what and "ranks 4,9 wait" in found.what and found.where == "train.py:40"
    )


def test_thirty_ranks_that_are_still_in_the_call_before_are_behind_too(tmp_path):
    job = VirtualJob(tmp_path, 32, alive=True)
    for rank in range(32):
        early = rank in (4, 9)
        job.call(rank, -100.0, -99.0 if early else None, sequence=640)
        if early:
            job.call(rank, -98.0, None)
        else:
            job.waits(rank, -99.0, 4)
    assert only(tmp_path).ranks == tuple(rank for rank in range(32) if rank not in (4, 9))


def test_the_end_of_a_chain_of_groups_is_the_culprit(tmp_path):
    """Rank 3 waits for 2 in one group, 2 for 1 in another, and 1 computes."""
    job = VirtualJob(tmp_path, 4, alive=True)
    for rank in range(4):
        job.call(rank, -100.0, -99.0)
    job.call(3, -90.0, None, group=7, ranks=(2, 3), axis="tp")
    job.call(2, -90.0, None, group=8, ranks=(1, 2), axis="dp")
    found = only(tmp_path)
    assert (found.cause, found.ranks, found.sure) == ("behind", (1,), "certain")
    assert any("rank 3 waits for those" in line for line in found.evidence)


def test_all_alive_and_one_call_stuck_for_half_an_hour_is_not_healthy(tmp_path):
    job = VirtualJob(tmp_path, 8, alive=True)
    for rank in range(8):
        job.call(rank, -1860.0, None)
    found = only(tmp_path)
    assert (found.cause, found.ranks, found.sure) == ("stuck", (), "possible")
    assert "ranks 0-7 are in all_reduce" in found.evidence[0] and "31 min" in found.evidence[0]


def test_of_a_stuck_call_the_rank_that_waits_for_nobody_is_named(tmp_path):
    job = VirtualJob(tmp_path, 3, alive=True)
    for rank in range(3):
        job.call(rank, -60.0, None)
    job.waits(0, -60.0, 2)
    job.waits(1, -60.0, 0)
    assert (only(tmp_path).cause, only(tmp_path).ranks) == ("stuck", (2,))


def test_a_recorder_that_has_gone_round_ten_times_is_matched_by_sequence(tmp_path):
    """Rank 1 makes 40,000 calls of its own group between two of all ranks."""
    job = VirtualJob(tmp_path, 3, alive=True)
    for rank in range(3):
        job.call(rank, -200.0, -199.0, sequence=7)
    for number in range(40_000):
        made(
            job.flights[1],
            9,
            number + 1,
            "barrier",
            "naive",
            None,
            None,
            None,
            None,
            "own.py:1",
            axis="own",
            world_ranks=(1,),
        )
    for rank in range(3):
        job.call(rank, -100.0, -99.0 if rank else None, sequence=8)
    for rank in (1, 2):
        job.call(rank, -98.0, None, sequence=9)
    assert only(tmp_path).ranks == (0,)


@pytest.mark.parametrize("third", [True, False], ids=["another is behind", "no other is behind"])
def test_a_recorder_that_no_longer_has_the_group_is_suspected_only_where_no_other_rank_is_behind(
    tmp_path, third
):
    job = VirtualJob(tmp_path, 3, alive=True)
    for number in range(5000):
        made(
            job.flights[1],
            9,
            number + 1,
            "barrier",
            "naive",
            None,
            None,
            None,
            None,
            "own.py:1",
            axis="own",
            world_ranks=(1,),
        )
    job.call(0, -98.0, None)
    if not third:
        job.call(2, -98.0, None)
    found = only(tmp_path)
    assert (found.ranks, found.sure) == (((2,), "certain") if third else ((1,), "likely"))


@pytest.mark.parametrize("stuck", [False, True], ids=["the others ended", "the others hang"])
def test_a_killed_rank(tmp_path, stuck):
    job = VirtualJob(tmp_path, 3, alive=stuck)
    for rank in range(3):
        job.call(rank, -100.0, -99.0)
        if rank != 1:
            job.call(rank, -98.0, None if stuck else -97.0, failed=True)
            if not stuck:
                job.end(rank, -97.0, "PeerLostError: rank 1 (process 7) was killed by SIGKILL")
    job.flights[1].pid = 1 << 30
    job.flights[1]._write_header()
    found = only(tmp_path)
    assert (found.cause, found.ranks, found.where) == ("killed", (1,), "train.py:40")
    assert found.sure == ("likely" if stuck else "certain")


def test_an_exception_of_one_rank(tmp_path):
    job = VirtualJob(tmp_path, 2)
    job.call(0, -9.0, -8.0, failed=True)
    job.end(1, -8.5, "ValueError: bad batch")
    job.end(0, -8.0, "PeerLostError: rank 1 failed with ValueError: bad batch")
    found = only(tmp_path)
    assert (found.cause, found.ranks, found.sure) == ("exception", (1,), "certain")
    assert "ValueError: bad batch" in found.what


def test_an_exception_stands_at_its_own_line_and_not_at_the_last_call(tmp_path):
    job = VirtualJob(tmp_path, 2)
    job.call(1, -9.0, -8.9, where="train.py:40")
    with job.at(1, -8.5):
        job.flights[1].end("ValueError: bad batch", "train.py:55")
    assert only(tmp_path).where == "train.py:55"


@pytest.mark.parametrize(
    ("other", "cause"),
    [
        ({"shape": (5,)}, "wrong shape"),
        ({"dtype": "<f8"}, "wrong dtype"),
        ({"op": "max"}, "wrong op"),
        ({"verb": "all_gather", "op": None}, "wrong verb"),
    ],
)
def test_a_call_that_does_not_fit(tmp_path, other, cause):
    job = VirtualJob(tmp_path, 3)
    for rank in range(3):
        job.call(rank, -9.0, -8.0)
        job.call(
            rank, -7.0, -6.0, failed=True, **(other | {"where": "odd.py:3"} if rank == 1 else {})
        )
        job.end(rank, -6.0, "MismatchError: ranks called different things")
    found = only(tmp_path)
    assert (found.cause, found.ranks, found.where, found.sure) == (
        cause,
        (1,),
        "odd.py:3",
        "certain",
    )


A, B, C = ({"shape": (size,), "where": f"train.py:{size}"} for size in (1, 2, 3))


@pytest.mark.parametrize(
    ("calls", "cause"),
    [([A, C, A], "left out"), ([A, B, B, C], "made too often"), ([A, C, B], "wrong order")],
)
def test_calls_out_of_step(tmp_path, calls, cause):
    job = VirtualJob(tmp_path, 3)
    for rank in range(3):
        for number, call in enumerate(calls if rank == 2 else [A, B, C, A]):
            job.call(rank, -9.0 + number, -8.5 + number, **call)
    found = only(tmp_path)
    assert (found.cause, found.ranks) == (cause, (2,))


def test_of_two_ranks_an_earlier_step_tells_which_left_a_call_out(tmp_path):
    job = VirtualJob(tmp_path, 2)
    for rank in range(2):
        for number, call in enumerate([A, B, C, A, B, C, A, C if rank == 0 else B]):
            job.call(rank, -9.0 + number, -8.5 + number, failed=number == 7, **call)
    found = only(tmp_path)
    assert (found.cause, found.ranks, found.sure) == ("left out", (0,), "likely")


def test_a_message_that_was_never_sent(tmp_path):
    job = VirtualJob(tmp_path, 2, alive=True)
    for sequence in (1, 2):
        job.message(0, -99.0, -98.0, sequence, dst=1)
        job.message(1, -99.0, -98.0, sequence, src=0)
    job.message(1, -90.0, None, 3, src=0)
    found = only(tmp_path)
    assert (found.cause, found.ranks) == ("behind", (0,)) and "message 3 (recv)" in found.what


def test_receives_in_a_circle_are_a_deadlock(tmp_path):
    job = VirtualJob(tmp_path, 3, alive=True)
    for rank in range(3):
        job.message(rank, -90.0, None, 1, src=(rank + 1) % 3)
    found = only(tmp_path)
    assert (found.cause, sorted(found.ranks), found.where) == ("deadlock", [0, 1, 2], "pipe.py:7")


def training(job, late, steps=15, alone=None, who=2):
    """Steps of one second; rank `who` is `late` for its calls, in seconds, in every step or only in
    `alone`."""
    for step in range(steps):
        for rank in range(job.size):
            job.step(rank, step, -100.0 + step)
        extra = late if alone is None or step in alone else 0.0
        for rank in range(job.size):
            came = 0.3 + 0.01 * ((rank + step) % job.size) + extra * (rank == who)
            job.call(rank, -100.0 + step + came, -100.0 + step + 0.4 + extra)
    for rank in range(job.size):
        job.end(rank, -80.0)


def test_a_slow_rank_is_the_one_that_waits_least(tmp_path):
    training(VirtualJob(tmp_path, 4), 0.4)
    found = only(tmp_path)
    assert (found.cause, found.ranks, found.sure, found.where) == (
        "slow",
        (2,),
        "certain",
        "train.py:40",
    )
    assert "13 of 13 steps" in found.evidence[0]


@pytest.mark.parametrize(
    ("late", "alone"), [(0.1, None), (0.5, (3, 7, 8))], ids=["a little", "now and then"]
)
def test_a_rank_that_is_late_a_little_or_now_and_then_is_not_slow(tmp_path, late, alone):
    training(VirtualJob(tmp_path, 4), late, alone=alone)
    assert findings(tmp_path) == []


def test_a_busy_machine_makes_no_rank_slow(tmp_path):
    """Two ranks whose steps are lengthened by other programs: late by chance in 7 of 10 steps."""
    for late in (0.5, 0.0):
        job = VirtualJob(tmp_path / str(late), 2)
        training(job, late, steps=12, alone=(1, 2, 4, 5, 7, 8, 10), who=1)
        assert findings(tmp_path / str(late)) == []


def test_clocks_that_differ_are_told_and_name_no_slow_rank(tmp_path):
    job = VirtualJob(tmp_path, 4, hosts={2: "far"}, skew={2: 5.0})
    training(job, 0.0)
    found = only(tmp_path)
    assert (found.cause, found.ranks) == ("clock skew", (2,)) and "far is 5 s ahead" in found.what


def test_a_slow_rank_is_found_where_clocks_differ(tmp_path):
    training(VirtualJob(tmp_path, 4, hosts={2: "far"}, skew={2: 5.0}), 0.4, who=1)
    assert [(found.cause, found.ranks) for found in findings(tmp_path)] == [
        ("slow", (1,)),
        ("clock skew", (2,)),
    ]


def test_a_rank_without_a_recorder_is_told(tmp_path):
    job = VirtualJob(tmp_path, 3)
    for rank in range(3):
        job.end(rank, -1.0)
    (tmp_path / "00001.ring").unlink()
    assert (only(tmp_path).cause, only(tmp_path).ranks) == ("no recorder", (1,))


def test_rings_of_an_earlier_generation_do_not_count(tmp_path):
    old = VirtualJob(tmp_path, 4)
    old.call(3, -9.0, None)
    job = VirtualJob(tmp_path, 3)
    for rank in range(3):
        job.flights[rank]._kept += 60
        job.flights[rank]._write_header()
        job.end(rank, -1.0)
    assert [flight.rank for flight in read_flights(tmp_path)] == [0, 1, 2]
    assert findings(tmp_path) == []


def test_dumps_are_read_where_there_are_no_rings(tmp_path):
    job = VirtualJob(tmp_path, 2)
    job.call(0, -12.0, None)
    for rank in range(2):
        with job.at(rank, 0.0):
            job.flights[rank].dump(tmp_path / f"{rank}.json")
        (tmp_path / f"0000{rank}.ring").unlink()
    assert [(found.cause, found.ranks) for found in findings(tmp_path)] == [("behind", (1,))]


@pytest.mark.parametrize("host", ["", "far"])
def test_a_dump_of_a_healthy_job_says_nothing_of_its_end(host, tmp_path, monkeypatch):
    """The processes have ended since; how, a dump cannot know."""
    job = VirtualJob(tmp_path, 2)
    job.call(0, -0.5, None)
    for rank in range(2):
        if host:
            monkeypatch.setattr("platform.node", lambda: host)
        with job.at(rank, 0.0):
            job.flights[rank].dump(tmp_path / f"{rank}.json")
        monkeypatch.undo()
        (tmp_path / f"0000{rank}.ring").unlink()
    assert findings(tmp_path) == []
    assert "the job ran when it was dumped" in diagnose(read_flights(tmp_path)).summary


def test_a_link_that_broke(tmp_path):
    job = VirtualJob(tmp_path, 3)
    for rank, why in enumerate(
        [
            "LinkLostError: rank 1 sent no more",
            "LinkLostError: rank 0 sent no more",
            "PeerLostError: rank 0 failed with LinkLostError",
        ]
    ):
        job.call(rank, -9.0, -8.0, failed=True)
        job.end(rank, -8.0, why)
    assert (only(tmp_path).cause, only(tmp_path).ranks) == ("link lost", (0, 1))


def test_a_folder_without_recorders_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="no flight recorder is here"):
        read_flights(tmp_path)
    with pytest.raises(ConfigError, match="there is no such folder"):
        read_flights(tmp_path / "none")
