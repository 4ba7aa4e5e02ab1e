"""Exercise 23: filled rightly it passes, each wrong filling fails under its name; what the lesson's
tables say."""

import inspect
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from filling import assert_named, graded, right
from hypothesis import given, settings
from hypothesis import strategies as st

import minidist as md
from minidist import lessons
from minidist.grading import load_module
from minidist.observe.step_bound import lower_bound, plain_critical_path
from minidist.observe.why import why

RIGHT = right("23")
LESSON = load_module(lessons.find("23").part("lesson.py"), "23")
lab = LESSON.lab
STEP = LESSON.LAYER
WRONG = {
    "on the rank that began last": {1: "record.windows[one][0]"},
    "whose step was the longest": {1: "record.windows[one][1] - record.windows[one][0]"},
    "the rank with the highest number": {1: "one"},
    "a path that misses the last call": {2: "wait.stop < now"},
    "a path that misses the call": {2: "False"},
    "a call that ends just now is left out": {
        2: "wait.start < min(wait.call.end, wait.stop) < now"
    },
    "a call that was hidden is taken": {2: "wait.stop <= now"},
    "ends on the other rank only later": {2: "wait.start < wait.call.end <= now"},
    "ended before the wait for it began held up nobody": {2: "wait.call.end <= now"},
    "the path stays on its rank": {4: "rank, call.begin"},
    "whoever asked last": {4: "1 - rank, call.begin"},
    "goes on to rank 0": {4: "0, call.begin"},
    "the first wait is taken": {3: "held[0]"},
    "a path that misses the queue": {3: "held[-2:][0]"},
    "never reaches the begin": {4: "call.last_rank, call.end"},
    "without the work before its call": {5: "max(seconds)"},
    "are of two calls": {5: "max(asked) + max(seconds)"},
    "the chain of the last call": {5: "asked[-1] + seconds[-1]"},
    "without the work before the first one": {6: "sum(seconds)"},
    "busy from its first call on": {6: "max(asked) + sum(seconds)"},
    "a bound that is none": {6: "2 * sum(seconds)"},
    "not the share of a slower rank": {7: "asked"},
    "the slower rank is counted backwards": {7: "asked - came"},
    "nothing is booked on the slower rank": {7: "0.0"},
    "counted from this rank's request": {8: "begin - asked"},
    "the queue is counted backwards": {8: "came - begin"},
    "nothing is booked on the link": {8: "0.0"},
    "a call has the link before it is asked for": {9: "min(left, key=lambda call: urgency[call])"},
    "the call that came first has the link": {
        9: "min((call for call in left if came[call] <= now), key=lambda call: came[call])"
    },
    "the least urgent call has the link": {
        9: "max((call for call in left if came[call] <= now), key=lambda call: urgency[call])"
    },
    "not the most urgent call": {
        9: "max((call for call in left if came[call] <= now), key=lambda call: seconds[call])"
    },
}


def test_the_right_filling_passes(tmp_path: Path) -> None:
    result = graded("23", RIGHT, tmp_path)
    assert result.passed, result.results[-1].line()


@pytest.mark.sampled(every=10)
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_filling_fails_under_its_name(mistake: str, tmp_path: Path) -> None:
    assert_named("23", mistake, WRONG[mistake], tmp_path)


def test_the_unfilled_exercise_names_its_first_hole(tmp_path: Path) -> None:
    result = graded("23", {}, tmp_path)
    assert not result.passed
    assert (
        "fill hole 1" in result.results[-1].line()
        and "exercise_23.py line" in result.results[-1].line()
    )


def test_the_link_of_a_wrong_order_is_drawn(tmp_path: Path) -> None:
    """Calls in their order of coming, where the first one waits until it has been asked for."""
    late = (
        "min((call for call in left if came[call] < now), key=lambda call: urgency[call], "
        "default=min(left))"
    )
    said = graded("23", {**RIGHT, 9: late}, tmp_path).results[-1]
    assert said.picture.splitlines()[0] == "right:"
    assert said.picture.count("  link |") == 2


def test_ends_that_tell_no_start_are_not_drawn() -> None:
    check = load_module(lessons.find("23").part("check.py"), "23")
    seconds = [2, 3]
    assert "link" in check._drawn_link([2.0, 5.0], [5.0, 3], seconds)
    for odd in (None, [1.0], [5.0, None], [5.0, float("nan")], [1.0, 5.0], [2.0, 1e9]):
        assert check._drawn_link([2.0, 5.0], odd, seconds) == "", odd


def test_each_case_takes_what_it_takes_by_hand() -> None:
    for name, job, by_hand in LESSON.CASES:
        assert 1e3 * lab.run(job).seconds == pytest.approx(by_hand), name


jobs = st.builds(
    lab.Job,
    strategy=st.sampled_from(sorted(lab.STRATEGIES)),
    layers=st.integers(1, 5),
    bucket=st.sampled_from([1_000_000, 3_000_000, 4_000_000, 8_000_000]),
    bandwidth=st.sampled_from([2e9, 1e9, 4e8]),
    slow=st.sampled_from([0.7, 1.0, 1.3]),
    ahead=st.integers(0, 2),
    late=st.dictionaries(st.integers(0, 3), st.sampled_from([0.004, 0.03])),
    order=st.sampled_from(["backward", "forward"]),
)


@given(jobs)
@settings(max_examples=60, deadline=None)
def test_the_plain_path_is_that_of_the_replay(job: lab.Job) -> None:
    """Part by part: neighbours of work joined; of ranks that do alike, either may be named."""
    record = lab.run(job)
    path = plain_critical_path(record)
    found = list[tuple[str, float, float]]()
    for piece in why(record)["path"]:
        name = "work" if piece["kind"] == "busy" else piece["name"]
        if found and found[-1][0] == name == "work":
            found[-1] = (name, found[-1][1], piece["stop"])
        else:
            found.append((name, piece["start"], piece["stop"]))
    parts = [part for part in path if part.stop > part.start]
    assert [part.name for part in parts] == [name for name, _, _ in found]
    assert [part.start for part in parts] == pytest.approx([start for _, start, _ in found])
    assert sum(part.stop - part.start for part in path) == pytest.approx(record.seconds)
    assert lower_bound(record) <= record.seconds * (1 + 1e-12)


def test_the_plain_path_goes_through_the_rank_that_came_last() -> None:
    """Backward is slow on rank 1, the update on rank 0."""
    record = load_module(lessons.find("23").part("check.py"), "23").two_slow()
    assert [part.rank for part in plain_critical_path(record)] == [1, None, 0]
    assert [
        (piece["kind"], piece["rank"]) for piece in why(record)["path"] if piece["kind"] == "busy"
    ] == [("busy", 1), ("busy", 1), ("busy", 0)]


@pytest.mark.parametrize(("strategy", "change"), LESSON.CHANGES)
def test_a_prediction_is_what_then_runs(strategy: str, change: object) -> None:
    """Exact, but for buckets that cut tensors otherwise than evenly: those within 4 %."""
    _, told, ran = LESSON.followed(strategy, change)
    uneven = getattr(change, "bucket", None) == 12 * LESSON.MB
    assert told == pytest.approx(ran, rel=0.04 if uneven else 1e-9)


def test_the_causes_of_a_late_bucket_name_it_alone() -> None:
    """7.6 of 30 ms hide behind backward; the others are exposed where the next buckets are waited
    for, too."""
    rows = why(lab.run(replace(STEP, late={3: 0.030})))["rows"]
    assert {(row["cause"], row["call"]) for row in rows} == {
        ("slow transfer", "all_reduce bucket 3")
    }


def test_what_a_late_bucket_is_booked_with_and_what_it_costs() -> None:
    """The booked milliseconds are up to the amount of the cause; without it the step is shorter by
    less."""
    told = " ".join(lessons.find("23").part("README.md").read_text(encoding="utf-8").split())
    usual = lab.run(STEP)
    late = lab.run(replace(STEP, late={3: 0.030}))
    booked = sum(row["seconds"] for row in why(late)["rows"] if row["rank"] == 0)
    shorter = late.exposed(0) - usual.exposed(0)
    assert 1e3 * booked == pytest.approx(26.5)
    assert 1e3 * shorter == pytest.approx(22.4)
    assert late.seconds - usual.seconds == pytest.approx(shorter)
    for said in (
        f"The step takes {1e3 * late.seconds:.1f} ms: {1e3 * shorter:.1f} longer, not 30.",
        f"{1e3 * booked:.1f} ms each in all, and all of that is booked",
        f"Without it each rank would wait {1e3 * shorter:.1f} ms less: "
        f"{1e3 * usual.exposed(0):.1f} ms",
        f"Here the lower bound is {1e3 * lower_bound(late):.1f} ms",
    ):
        assert said in told, said
    costs = [lab.run(replace(STEP, late={at: 0.030})).seconds - usual.seconds for at in (7, 0)]
    assert [round(1e3 * each, 1) for each in costs] == [30.0, 16.7]
    assert "In bucket 7 the fault would cost all 30 ms, in bucket 0 only 16.7." in told


def test_the_story_says_what_the_clock_says() -> None:
    told = lessons.find("23").part("README.md").read_text(encoding="utf-8")
    assert "".join(inspect.getsource(lab.soonest_needed_first).partition("ends = [")[1:]) in told
    for _, job, _ in LESSON.CASES:
        assert f"{1e3 * lab.run(job).seconds:.1f}" in told
    for bandwidth in (5e8, 2.5e8):
        for slices in (1, 4, 16):
            job = replace(STEP, bandwidth=bandwidth)
            for urgent in (False, True):
                assert f"{1e3 * lab.scheduled(job, slices, priority=urgent):.1f}" in told


@pytest.mark.parametrize("way", lab.WAYS[::3])
def test_training_steps_take_what_their_blocks_sleep(way: str) -> None:
    seconds = max(md.run(partial(lab.training_seconds, steps=4), way, 0.001, size=2))
    assert seconds >= lab.CONFIG.layers * (lab.FORWARD + lab.BACKWARD)
