"""Each state of a run, told from its folder."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from flights import GONE, VirtualJob
from watched import WatchedRun

from minidist.errors import ConfigError
from minidist.observe.live.looking import Looking
from minidist.observe.live.run_now import (
    DIED,
    ENDED,
    FINISHED,
    NOT_BEGUN,
    RUNNING,
    STALLED,
    STOPPED_RUN,
)
from minidist.observe.step_log import STEP_LOG, StepLog


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    now = Looking(WatchedRun(tmp_path).folder).look()
    assert (now.state, now.what, now.step, now.steps) == (RUNNING, "step 20 of 50", 20, 50)
    assert (
        now.losses[-1] == 3.0
        and now.tokens_per_second == 5120.0
        and now.step_seconds == pytest.approx(0.2)
    )
    assert [rank.rank for rank in now.ranks] == [0, 1, 2, 3] and {
        rank.step for rank in now.ranks
    } == {21}
    assert now.slow is None


def test_one_whose_ranks_have_recorded_nothing_for_long_is_stalled_and_says_for_whom(
    tmp_path: Path,
) -> None:
    run = WatchedRun(tmp_path, quiet=30.0)
    for rank in (0, 1, 3):
        run.job.call(rank, -29.9, None)
    now = Looking(tmp_path).look()
    assert now.state == STALLED and "rank 2" in now.what


def test_a_stopped_process_is_told_and_a_run_that_goes_on_again(tmp_path: Path) -> None:
    run = WatchedRun(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        run.job.flights[3].pid = child.pid
        run.job.flights[3]._write_header()
        looking = Looking(tmp_path)
        assert looking.look().state == RUNNING
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        now = looking.look()
        assert now.state == STOPPED_RUN and f"the process of rank 3 ({child.pid} on " in now.what
        assert [rank.process for rank in now.ranks] == ["runs"] * 3 + ["is stopped"]
        child.send_signal(signal.SIGCONT)
        os.waitpid(child.pid, os.WCONTINUED)
        assert looking.look().state == RUNNING
    finally:
        child.kill()
        child.wait()
        assert child.stdin is not None
        child.stdin.close()


def test_a_run_that_died_names_the_culprit(tmp_path: Path) -> None:
    run = WatchedRun(tmp_path, alive=False)
    run.end(1, why="ValueError: no such token")
    run.end(0, 2, 3, why="PeerLostError: rank 1 is gone")
    now = Looking(tmp_path).look()
    assert (now.state, now.what) == (DIED, "rank 1 failed with ValueError: no such token")
    run = WatchedRun(tmp_path / "killed", alive=False)
    run.end(0, 1, 3, why="PeerLostError: rank 2 (process 9 on vm) is gone")
    now = Looking(tmp_path / "killed").look()
    assert (now.state, now.what) == (DIED, "rank 2 was killed, or exited without a word")


def test_ranks_that_are_still_ending_do_not_make_a_run_dead(tmp_path: Path) -> None:
    run = WatchedRun(tmp_path)
    run.end(1, why="ValueError: no such token")
    now = Looking(tmp_path).look()
    assert (now.state, now.what) == (RUNNING, "step 20 of 50; rank 1 ended with an error")


def test_a_run_that_was_told_to_stop_has_ended(tmp_path: Path) -> None:
    run = WatchedRun(tmp_path, alive=False)
    run.end(0, 1, 2, 3)
    now = Looking(tmp_path).look()
    assert (now.state, now.what) == (ENDED, "step 20 of 50; every rank ended without an error")
    for ring in (tmp_path / "flight").iterdir():  # as train does after Ctrl-C
        ring.unlink()
    now = Looking(tmp_path).look()
    assert (
        now.state == ENDED
        and "it was told to stop while it went well" in now.what
        and now.losses[-1] == 3.0
    )


def test_a_finished_run_and_a_later_one_in_its_folder(tmp_path: Path) -> None:
    run = WatchedRun(tmp_path, alive=False, steps=50)
    run.finish()
    now = Looking(tmp_path).look()
    assert (now.state, now.what) == (FINISHED, "50 steps; validation loss 1.5000")
    assert now.step == 50 and len(now.ranks) == 4
    log = StepLog(tmp_path / STEP_LOG, goes_on=False)  # all this is old, and the rings are newer
    log.write(run.state(50).line(1e9))
    log.close()
    os.utime(tmp_path / "metrics.json", (1e9, 1e9))
    assert WatchedRun(tmp_path, steps=0, log=False).job.size == 4
    now = Looking(tmp_path).look()
    assert (now.state, now.losses) == (NOT_BEGUN, ())


def test_a_run_that_has_not_begun_holds_its_folder(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        now = Looking(tmp_path).look()
        assert now.state == NOT_BEGUN and now.what.startswith(
            f"process {os.getpid()} has the folder"
        )
        log = StepLog(tmp_path / STEP_LOG, goes_on=False)
        log.write(WatchedRun(tmp_path / "other", steps=0).state(3).line(2e9))
        log.close()
        now = Looking(tmp_path).look()
        assert (
            now.state == RUNNING and "there are no flight recorders" in now.what and now.ranks == ()
        )
    finally:
        os.close(folder)


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        Looking(tmp_path / "none")
    with pytest.raises(ConfigError, match="nothing of a run is here"):
        Looking(tmp_path).look()


def test_a_folder_of_recorders_alone_is_watched_too(tmp_path: Path) -> None:
    """The recorders are of a program that minidist launch --flight has started."""
    run = WatchedRun(tmp_path, log=False)
    now = Looking(tmp_path / "flight").look()
    assert (now.state, now.what) == (RUNNING, "step 20")
    assert now.losses == () and now.step_seconds == pytest.approx(0.2) and len(now.ranks) == 4
    run.end(0, 1, 2, 3)
    now = Looking(tmp_path / "flight").look()
    assert (now.state, now.what) == (FINISHED, "step 20; every rank ended without an error")


def test_a_look_says_when_the_next_one_takes_no_time_from_the_ranks(tmp_path: Path) -> None:
    looking = Looking(WatchedRun(tmp_path).folder)
    start = time.process_time()
    looking.look()
    assert 0 < looking.rest <= 20 * (time.process_time() - start) + 0.01


def test_the_link_is_the_job_s_own_inside_a_host(tmp_path: Path) -> None:
    run = WatchedRun(tmp_path)
    run.job.flights[0]._link = "shm"
    run.job.flights[0]._write_header()
    assert [axis.link for axis in Looking(tmp_path).look().axes] == ["shm"]


def test_ranks_of_another_host_are_not_judged(tmp_path: Path) -> None:
    job = VirtualJob(tmp_path, 2, hosts={0: "far", 1: "away"})
    for rank in range(2):
        job.step(rank, 0, -9.0)
        job.flights[rank].pid = GONE
    now = Looking(tmp_path).look()
    assert now.state == RUNNING and "on other hosts" in now.what
