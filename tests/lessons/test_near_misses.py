"""No answer that is one small mistake away from the right one passes a check (support/near_miss.py
makes them)."""

import multiprocessing
import os
from pathlib import Path

import pytest
from filling import fill, right
from near_miss import neighbours

from minidist import lessons
from minidist.grading import load_module, run_check

LIMIT = 90  # seconds of one check: a neighbour may wait for ever
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["minidist", "minidist.grading", "minidist.lessons.checking", "filling"]
)

WRAPS = "an index from -1 to -P counts from the end"
SWAPPED = "both orders give the same"
LISTS = "a verb takes a list of numbers as an array"
LAST = "NumPy takes any negative length as the one that fits"
SAME = {
    ("00", 8): {
        "with no_grad():\n    total += model.loss(inputs, targets).item()": "the default divisor"
    },
    ("03", 1): {"group.rank - step - 1": WRAPS},
    ("03", 2): {"group.rank - step - 2": WRAPS},
    ("03", 5): {"group.rank - step": WRAPS},
    ("03", 6): {"group.rank - step - 1": WRAPS},
    ("04", 2): {"sum(((a in half) != (b in half) for b, a in links))": SWAPPED},
    ("09", 7): {"group.all_gather([float(mine)]).any()": LISTS},
    ("17", 10): {
        "mesh['pp', 'tp'].all_reduce([squares])": LISTS,
        "mesh['tp', 'pp'].all_reduce(np.array([squares]))": SWAPPED,
    },
    ("18", 1): {
        "np.argsort(-chances, kind='stable')[:, :k]": "the last axis is the default",
        "np.argsort(-chances, axis=1)[:, :k]": "no two chances are equal",
    },
    ("18", 4): {"np.argsort(chosen)": "rows of one expert may be in any order"},
    ("18", 7): {"experts * float(chances.mean(axis=0) @ f)": SWAPPED},
    ("21", 1): {"residual += gradient.reshape(-2)": LAST},
    ("21", 5): {"np.add.at(gradient.reshape(-2), places, values)": LAST},
    ("23", 2): {
        "wait.start <= min(wait.call.end, wait.stop) <= now": "differs only for a wait of no "
        "length; then the chain with the call and the chain without it are both critical",
    },
    ("23", 5): dict.fromkeys(
        (
            "max((call + alone for alone, call in zip(asked, seconds)))",
            "max((call + alone for call, alone in zip(seconds, asked)))",
        ),
        "a sum in another order",
    ),
    ("24", 2): {
        "max(ended.get((way, count[way] - 1), -1.0), *came[way, count[way]].values())": "no rank "
        "arrives before 0",
    },
    ("25", 3): {
        "arrivals.argmax(axis=1)[delay >= share * step]": "no delay is exactly the limit",
    },
}
"""{(lesson, hole): {neighbour: why it means the same as the right code}}."""


def passes(number: str, file: Path, report: Path) -> None:
    """Write "passed" into `report` if the exercise passes the lesson's check."""
    os.chdir(file.parent)  # an answer may write where it stands
    check = load_module(lessons.find(number).part("check.py"), number)
    results = run_check(check.grade, lambda: load_module(file, number), file)
    report.write_text("passed" if results[-1].passed else results[-1].line(), encoding="utf-8")


def outcome(number: str, answers: dict[int, str], folder: Path) -> str:
    """Return "passed", or the check's first mistake."""
    file = folder / f"exercise_{number}.py"
    report = folder / "report"
    report.unlink(missing_ok=True)
    exercise = lessons.find(number).part("exercise.py").read_text(encoding="utf-8")
    file.write_text(fill(exercise, answers), encoding="utf-8")
    graded = FORKS.Process(target=passes, args=(number, file, report))
    graded.start()
    graded.join(LIMIT)
    if graded.is_alive():
        graded.kill()
        graded.join()
        return f"no end within {LIMIT} s"
    return report.read_text(encoding="utf-8") if report.exists() else f"exit {graded.exitcode}"


@pytest.mark.soak
@pytest.mark.parametrize("number", [lesson.number for lesson in lessons.every_lesson()])
def test_no_near_miss_passes(number: str, tmp_path: Path) -> None:
    answers = right(number)
    assert outcome(number, answers, tmp_path) == "passed"
    passed = [
        (number, hole, code)
        for hole, text in answers.items()
        for code in neighbours(text)
        if code not in SAME.get((number, hole), {})
        and outcome(number, {**answers, hole: code}, tmp_path) == "passed"
    ]
    assert not passed, "\n".join(map(str, passed))
