"""Exercise 20: filled rightly it passes, and each wrong filling fails under its name."""

from pathlib import Path

import pytest
from filling import assert_named, graded, right

from minidist.grading import load_module
from minidist.lessons import find

RIGHT = right("20")
WRONG = {
    "they stay on the device": {1: "h.grad = p.grad.copy()"},
    "freed before it is copied": {1: "p.zero_grad()\nh.grad = np.array(p.grad)"},
    "written over the host's weights": {1: "h.data[...] = p.grad\np.zero_grad()"},
    "that is one parameter's": {3: "2"},
    "one parameter's, and not all": {4: "14"},
    "two bytes too many": {4: "(4 + 4 + 8) * parameters"},
    "a dict": {5: "passes * itemsize * parameters"},
    "the bytes of a number are missing": {
        5: '{"device to host": passes * parameters, "host to device": parameters}'
    },
    "gradients travel in the device's precision": {
        5: '{"device to host": 4 * passes * parameters, "host to device": itemsize * parameters}'
    },
    "gradients travel once, not twice": {
        5: '{"device to host": 2 * passes * itemsize * parameters, '
        '"host to device": itemsize * parameters}'
    },
    "once a step, and not once a pass": {6: "passes * 16 * parameters"},
    "the next unit is never read": {7: "pass"},
    "the move is not remembered": {
        7: "if index + 1 < len(units):\n    start_read(units[index + 1])"
    },
    "read again, and not the next": {
        7: "if index + 1 < len(units):\n    coming = start_read(unit)"
    },
    "the run is not updated": {8: "arriving[run].wait()\ngoing.append(start_up(run))"},
    "waits for the gradients of other runs": {
        8: "for move in arriving.values():\n    move.wait()\noptimizer_step(run)\ngoing.append(start_up(run))"
    },
    "the gradients did not go down": {1: "p.zero_grad()"},
    "other gradients": {1: "h.grad = 2.0 * p.grad * p.grad\np.zero_grad()"},
    "the new weights never reach the device": {2: "pass"},
    "the device reads host memory": {2: "p.data = h.data"},
    "the weights are another array": {2: "p.data = h.data.copy()"},
    "the old weights go down to the host": {2: "h.data[...] = p.data"},
    "a direction is missing": {5: '{"device to host": passes * itemsize * parameters}'},
    "the wait for b: before a computes": {
        7: """
            if index + 1 < len(units):
                coming = start_read(units[index + 1])
                coming.wait()
           """
    },
    "gradients do not stay": {3: "4 * parameters"},
    "the gradients lie there too": {4: "12 * parameters"},
    "the masters are missing": {4: "10 * parameters"},
    "weights travel in the device's precision": {
        5: '{"device to host": passes * itemsize * parameters, "host to device": 4 * parameters}'
    },
    "each pass sends its gradients": {
        5: '{"device to host": itemsize * parameters, "host to device": itemsize * parameters}'
    },
    "weights come up once a step": {
        5: '{"device to host": passes * itemsize * parameters, "host to device": passes * '
        "itemsize * parameters}"
    },
    "the gradients are on disk too": {6: "12 * parameters"},
    "weights are their own masters": {6: "20 * parameters"},
    "more than one unit ahead": {
        7: """
            if index == 0:
                ahead = {unit: start_read(unit) for unit in units[1:]}
            coming = ahead[units[min(index + 1, len(units) - 1)]]
           """
    },
    "nothing hides behind the computation": {
        7: """
            results.append(compute(unit, weights))
            if index + 1 < len(units):
                coming = start_read(units[index + 1])
            continue
           """
    },
    "a unit computed with another's weights": {
        7: """
            if index + 1 < len(units):
                coming = start_read(units[index + 1])
                weights = coming.wait()
           """
    },
    "did not wait for its gradients": {8: "optimizer_step(run)\ngoing.append(start_up(run))"},
    "weights go up before they are new": {
        8: "arriving[run].wait()\ngoing.append(start_up(run))\noptimizer_step(run)"
    },
    "never reach the device": {8: "arriving[run].wait()\noptimizer_step(run)"},
    "nothing hides behind Adam": {
        8: "arriving[run].wait()\noptimizer_step(run)\nstart_up(run).wait()"
    },
    "ended before its weights were up": {
        8: "arriving[run].wait()\noptimizer_step(run)\nstart_up(run)"
    },
}


class Told:
    """A page that keeps its tables' rows."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []

    def table(self, title: str, columns: list[str], rows: list[list[str]], note: str = "") -> None:
        self.rows += rows


@pytest.mark.soak
def test_the_story_has_what_a_run_of_other_axes_moves() -> None:
    """Peaks depend a little on how fast things leave; what lies on disk and what moves do not."""
    page = Told()
    story = find("20").part("README.md").read_text(encoding="utf-8")
    load_module(find("20").part("lesson.py"), "20").other_axes(page)
    assert len(page.rows) == 6
    for _, home, _, _, disk, moved, same in page.rows:
        assert same == "ok"
        assert home == "none" or f"| {disk or ''} | {moved} |".replace("|  |", "| |") in story


def test_which_part_of_other_machines_shortens_a_step() -> None:
    """PCIe 6 does not, Grace's memory does, and CXL does where the disk is the narrowest."""
    lab = load_module(find("20").part("experiments.py"), "20")
    seconds = lab.on_machines()
    none, optimizer, everything = map(list, zip(*seconds.values(), strict=True))
    at = list(seconds).index
    h100 = at("H100, PCIe 5")
    assert optimizer[at("H100, PCIe 6")] == pytest.approx(optimizer[h100], rel=0.01)
    grace = at("Grace Hopper")
    assert optimizer[grace] < 0.6 * optimizer[h100]
    memory = at("H100, PCIe 5, Grace's memory")
    assert optimizer[memory] - none[memory] == pytest.approx(
        optimizer[grace] - none[grace], rel=0.1
    )
    assert everything[at("H100, CXL for the disk")] < 0.7 * everything[grace]
    assert none[at("PCIe server, 4 lanes up")] > 4 * none[h100]


def test_the_right_filling_passes(tmp_path: Path) -> None:
    result = graded("20", RIGHT, tmp_path)
    assert result.passed, result.results[-1].line()


def test_what_is_right_is_told_as_right(tmp_path: Path) -> None:
    told = {result.task: result for result in graded("20", RIGHT, tmp_path).results}
    assert told["weights on the host"].measured == told["weights on the host"].target
    assert told["weights on the device"].measured == told["weights on the device"].target


@pytest.mark.soak  # other lessons' wrong fillings are graded in the default run
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_filling_fails_under_its_name(mistake: str, tmp_path: Path) -> None:
    assert_named("20", mistake, WRONG[mistake], tmp_path)


def test_the_unfilled_exercise_names_its_first_hole(tmp_path: Path) -> None:
    result = graded("20", {}, tmp_path)
    assert not result.passed
    assert (
        "fill hole 1" in result.results[-1].line()
        and "exercise_20.py line" in result.results[-1].line()
    )
