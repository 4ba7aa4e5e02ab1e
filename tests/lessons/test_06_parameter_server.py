"""Exercise 06: filled rightly it passes, and each wrong filling fails under its name."""

from pathlib import Path

import pytest
from filling import assert_named, graded, right

from minidist.grading import load_module
from minidist.lessons import find

RIGHT = right("06")
WRONG = {
    "one server has all keys": {1: "0"},
    "divided by number, not by size": {1: "key % len(loads)"},
    "nothing was pulled": {3: "group.recv(src=workers)"},
    "there is no such server": {1: "-1"},
    "the weights were pushed": {2: "group.send(p.data, dst=workers)"},
    "divided by the number of workers: each worker divides": {
        2: "group.send(p.grad / workers, dst=workers)"
    },
    "multiplied by the number of workers": {2: "group.send(p.grad * workers, dst=workers)"},
    "the opposite sign": {2: "group.send(-p.grad, dst=workers)"},
    "what came was added to the weights": {3: "p.data[...] += group.recv(src=workers)"},
    "divided by the number of workers": {
        4: "sum(group.recv(src=worker) for worker in range(workers)) / workers"
    },
    "one worker's gradients alone": {4: "[group.recv(src=worker) for worker in range(workers)][0]"},
    "the last worker's gradients alone": {
        4: "[group.recv(src=worker) for worker in range(workers)][-1]"
    },
    "the ranks wait for each other": {2: "pass"},
    "the gradients came back": {5: "group.send(p.grad, dst=worker)"},
    "wrong weights": {5: "group.send(-p.data, dst=worker)"},
    "the bound is one too lax": {
        6: "done[worker] - min(done[other] for other in running) <= staleness + 1"
    },
    "the bound is one too strict": {
        6: "done[worker] - min(done[other] for other in running) < max(staleness, 1)"
    },
    "a lost worker holds the others up": {6: "done[worker] - min(done) <= staleness"},
    "your code raised": {
        6: "done[worker] - min(done[other] for other in running - {worker}) <= staleness"
    },
    "not a pair": {7: "2 * workers * model_bytes / servers"},
    "one worker is left out": {
        7: "2 * (workers - 1) * model_bytes / servers, 4 * (workers - 1) / workers * model_bytes"
    },
    "the servers are not in the ring": {
        7: "2 * workers * model_bytes / servers, "
        "4 * (workers + servers - 1) / (workers + servers) * model_bytes"
    },
    "one direction alone": {
        7: "workers * model_bytes / servers, 4 * (workers - 1) / workers * model_bytes"
    },
    "of all servers together": {
        7: "2 * workers * model_bytes, 4 * (workers - 1) / workers * model_bytes"
    },
}


@pytest.mark.soak  # tests/parallel/data/test_parameter_server.py replays late updates
def test_how_late_a_slow_worker_is_on_a_clock_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same on every machine: updates of workers 0 and 1 between what worker 2 read and what it
    pushes."""
    load_module(find("06").part("lesson.py"), "06").BREAKS["no-bound"]()
    clock, bounded, _, _, free, _ = capsys.readouterr().out.splitlines()
    assert "staleness 1, on a clock" in clock
    assert "after 41 s;" in bounded and "late by [4, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 0]" in bounded
    assert "after 12 s;" in free and "late by [8, 8, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0]" in free


class Told:
    """A page that keeps its tables' rows."""

    def __init__(self) -> None:
        self.rows: list[list[object]] = []

    def table(
        self, title: str, columns: list[str], rows: list[list[object]], note: str = ""
    ) -> None:
        self.rows += rows


def test_the_story_has_the_bytes_that_a_run_moves_and_keeps() -> None:
    page = Told()
    story = find("06").part("README.md").read_text(encoding="utf-8")
    load_module(find("06").part("lesson.py"), "06").digits(page)
    assert len(page.rows) == 3
    for name, pushed, one, kept, other, _ in page.rows:
        assert (one, other) == ("ok", "ok")
        line = next(line for line in story.splitlines() if line.startswith(f"| {name}"))
        assert f"| {pushed:,} | {kept:,} |" in line


def test_the_right_filling_passes(tmp_path: Path) -> None:
    result = graded("06", RIGHT, tmp_path)
    assert result.passed, result.results[-1].line()


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_filling_fails_under_its_name(mistake: str, tmp_path: Path) -> None:
    assert_named("06", mistake, WRONG[mistake], tmp_path)


def test_the_unfilled_exercise_names_its_first_hole(tmp_path: Path) -> None:
    result = graded("06", {}, tmp_path)
    assert not result.passed
    assert (
        "fill hole 1" in result.results[-1].line()
        and "exercise_06.py line" in result.results[-1].line()
    )


def test_the_story_has_the_models_through_a_link() -> None:
    story = find("06").part("README.md").read_text(encoding="utf-8")
    few, many = (
        (2 * workers, 2 * workers / 4, 4 * (workers - 1) / workers) for workers in (8, 100)
    )
    assert "(a) {:g}. (b) About {:g}. (c) {:g}.".format(*few) in story
    assert "(d) {:g}, about {:g}, and {:g}.".format(*many) in story


def test_the_story_has_how_late_updates_are_on_the_clock() -> None:
    lab = load_module(find("06").part("experiments.py"), "06")
    story = " ".join(find("06").part("README.md").read_text(encoding="utf-8").split())
    late = {}
    for bound in (None, 2):
        updates, _ = lab.on_a_clock(40, [1.0, 1.0, 4.0], bound)
        late[bound] = [
            number - each.versions[0] for number, each in enumerate(updates) if each.worker == 2
        ]
    assert late[None] == [8] * 10 + [0] * 30 and "(a) 8: two workers make four steps" in story
    assert late[2] == [6] + [2] * 37 + [0] * 2
    assert "late by 6." in story and "late by 2 (green circles), until the others" in story
