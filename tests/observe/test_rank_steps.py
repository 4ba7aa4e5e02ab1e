"""A line a step from every rank: what stands in it, its size, and what a reader makes of torn and
old files."""

import json
import sys
import threading
import time

import numpy as np
import pytest

import minidist as md
from minidist.comm.flight.slots import CALL, MESSAGE
from minidist.observe import rank_steps
from minidist.observe.rank_steps import (
    FOLDER,
    MOST_BYTES,
    StepRecorder,
    read_rank_steps,
    steps_file,
)


def busy(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.sampled
@pytest.mark.parametrize("transport", ["threads", "tcp"])
def test_what_a_step_holds(transport, tmp_path):
    def job(world):
        recorder = StepRecorder(world, tmp_path, alike="pp0")
        for step in range(3):
            with recorder.input():
                time.sleep(0.02)
            busy(0.03 if world.rank == 1 else 0.01)
            world.all_reduce(np.ones(500), algorithm="ring")
            recorder.step_done(
                tokens=10 + world.rank, loss=2.5, digest={"dp": "a"} if step == 2 else None
            )
        recorder.close()

    md.run(job, size=2, transport=transport)
    found = read_rank_steps(tmp_path)
    assert {
        rank: (each.size, each.alike, [line["step"] for line in each.steps])
        for rank, each in found.items()
    } == {0: (2, "pp0", [0, 1, 2]), 1: (2, "pp0", [0, 1, 2])}
    for rank, each in found.items():
        for line in each.steps:
            assert line["tokens"] == 10 + rank and line["loss"] == 2.5
            assert line["input"] >= 0.02 and line["cpu"] >= (0.03 if rank else 0.01)
            # what the program computes in input() is in both; each value is rounded to a
            # microsecond
            assert line["seconds"] > line["calls"] + max(line["input"], line["cpu"]) - 2e-6
            assert ("rss" in line) == ("others" in line) == (transport == "tcp")
            assert len(json.dumps(line)) < MOST_BYTES
        assert [line.get("digest") for line in each.steps] == [None, None, {"dp": "a"}]
    assert sum(line["cpu"] for line in found[1].steps) > 1.5 * sum(
        line["cpu"] for line in found[0].steps
    )


def test_the_waits_of_a_call_are_not_computation(tmp_path):
    def job(world):
        recorder = StepRecorder(world, tmp_path)
        time.sleep(0.2 * world.rank)
        world.start_all_reduce(np.ones(5)).wait()
        recorder.step_done()
        recorder.close()

    md.run(job, size=2, transport="tcp")
    first, last = (read_rank_steps(tmp_path)[rank].steps[0] for rank in range(2))
    assert first["calls"] > 0.15 > last["calls"] and first["cpu"] < 0.1


@pytest.mark.sampled
@pytest.mark.parametrize("way", ["blocking", "started", "message"])
def test_the_two_measures_of_time_in_calls_agree(way, tmp_path):
    """The records of steps have the sum of what the flight recorder has call by call. Rank 1 is
    late."""

    def job(world):
        recorder = StepRecorder(world, tmp_path)
        for step in range(3):
            world.tell_step(step)
            time.sleep(0.3 * world.rank)
            if way == "message":
                world.send(np.ones(5), dst=0) if world.rank else world.recv(src=1)
            elif way == "started":
                world.start_all_reduce(np.ones(5)).wait()
            else:
                world.all_reduce(np.ones(5))
            recorder.step_done()
        recorder.close()
        return [
            entry for entry in world.ledger.flight.entries() if entry["kind"] in (CALL, MESSAGE)
        ]

    entries = md.run(job, size=2, transport="tcp")
    for rank, each in read_rank_steps(tmp_path).items():
        for line in each.steps:
            stood = sum(entry["stood"] for entry in entries[rank] if entry["step"] == line["step"])
            assert stood == pytest.approx(line["calls"], abs=0.03) and (rank == 1 or stood > 0.05)


def test_a_thread_within_the_library_is_where_the_program_called_it(monkeypatch):
    stop = threading.Event()
    began = threading.Event()
    thread = threading.Thread(target=lambda: (began.set(), stop.wait()))
    thread.start()
    began.wait(10)
    found = {thread.ident: sys._current_frames()[thread.ident]}
    monkeypatch.setattr(rank_steps, "frames", lambda: found)
    try:
        assert "test_rank_steps.py:" in (rank_steps._other_thread() or "")
        found[threading.get_ident()] = found.pop(thread.ident)  # its own thread does not count
        assert rank_steps._other_thread() is None
    finally:
        stop.set()
        thread.join()


def test_other_threads_are_told_with_their_line(tmp_path):
    stop = threading.Event()

    def hog():
        while not stop.is_set():
            sum(range(50))

    def job(world):
        recorder = StepRecorder(world, tmp_path)
        threading.Thread(target=hog, daemon=True).start()
        before = time.process_time()
        while time.process_time() < before + 0.2:
            time.sleep(0.01)
        recorder.step_done()
        recorder.close()

    md.run(job, size=1, transport="tcp")
    (line,) = read_rank_steps(tmp_path)[0].steps
    assert line["others"] > line["cpu"] and "test_rank_steps.py:" in line["busy"]


def alone(folder, **options):
    """A recorder of a rank that is alone."""
    made = []
    md.run(lambda world: made.append(StepRecorder(world, folder, **options)), size=1)
    return made[0]


def test_a_line_is_never_long(tmp_path):
    recorder = alone(tmp_path)
    for peer in range(1, 60):
        recorder._times._out[peer] = [peer, 9, 10**9, 10**9, 10**12]
    recorder.step_done(loss=1.0)
    recorder.step_done(digest={f"group {number}": "f" * 20 for number in range(50)})
    recorder.close()
    lines = steps_file(tmp_path, 0).read_bytes().splitlines()
    assert all(len(line) < MOST_BYTES for line in lines) and len(json.loads(lines[1])["out"]) > 10
    assert set(json.loads(lines[2])) == {"step", "time", "seconds"}


def test_a_run_that_goes_on_appends_and_the_later_line_counts(tmp_path):
    for first, loss in ((0, 1.0), (1, 2.0)):
        recorder = alone(tmp_path, goes_on=first > 0, first_step=first)
        for _ in range(2):
            recorder.step_done(loss=loss)
        recorder.close()
    assert [line["loss"] for line in read_rank_steps(tmp_path)[0].steps] == [1.0, 2.0, 2.0]
    again = alone(tmp_path)
    again.close()
    assert read_rank_steps(tmp_path)[0].steps == []


def test_torn_lines_and_ranks_of_a_larger_job_are_left_out(tmp_path):
    (tmp_path / FOLDER).mkdir()
    about = {"size": 2, "pid": 1, "host": "a", "clock": 0.0, "alike": ""}
    for rank, since, size in ((0, 20.0, 2), (1, 20.0, 2), (2, 10.0, 3)):
        line = json.dumps({"rank": rank, "time": since, **about, "size": size})
        steps_file(tmp_path, rank).write_text(line + '\n{"step":0,"seconds":1}\n{"step":1,"sec')
    found = read_rank_steps(tmp_path)
    assert sorted(found) == [0, 1] and found[0].steps == [{"step": 0, "seconds": 1}]
    assert read_rank_steps(tmp_path / "none") == {}
