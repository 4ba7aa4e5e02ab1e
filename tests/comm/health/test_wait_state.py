"""Seconds in calls are measured where they are asked for, and only there."""

import threading
import time

from minidist.comm.health.wait_state import RunningCall, spent_in_calls


def one_call(seconds: float = 0.0) -> None:
    with RunningCall():
        time.sleep(seconds)


def in_a_thread(job) -> list:
    found: list = []
    thread = threading.Thread(target=lambda: found.append(job()))
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_that_never_asks_looks_at_no_clock(monkeypatch):
    def refuse() -> float:
        raise AssertionError("looked at the clock")

    monkeypatch.setattr("time.thread_time", refuse)
    in_a_thread(one_call)


def test_calls_count_from_the_first_question_on():
    def job() -> tuple[float, ...]:
        one_call(0.01)
        before = spent_in_calls()
        with RunningCall():
            one_call(0.02)  # inside another: it counts once
        after = spent_in_calls()
        return *before, after[0], after[1]

    asked, worked, seconds, busy = in_a_thread(job)
    assert (asked, worked) == (0.0, 0.0)
    assert 0.02 <= seconds < 2 and 0 <= busy < 0.02


def test_a_question_inside_a_call_counts_from_the_next_one():
    def job() -> float:
        with RunningCall():
            spent_in_calls()
            time.sleep(0.02)
        return spent_in_calls()[0]

    assert in_a_thread(job) == 0.0
