"""Exercise 10: filled rightly it passes, and each wrong filling fails under its name."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filling import assert_named, graded, right

from minidist.grading import load_module
from minidist.lessons import find

RIGHT = right("10")
WRONG = {
    "layer 1 has two ranks": {1: "rank * each"},
    "a layer has no rank: [0]": {1: "rank * each + min(rank, more) + 1"},
    "takes no gradient": {2: "tensor(group.recv(src=group.rank - 1))"},
    "rank 1's layers get an array": {2: "group.recv(src=group.rank - 1)"},
    "did not get the output of those before": {2: "tensor(inputs, requires_grad=True)"},
    "y.data is the array of y": {3: "group.send(y, dst=group.rank + 1)"},
    "only the last rank's y is a loss": {4: "None"},
    "backward takes an array, not a tensor": {4: "tensor(group.recv(src=group.rank + 1))"},
    "the last rank's layers": {3: "group.send(y.data * 2.0, dst=group.rank + 1)"},
    "more or less than each cut needs": {
        3: "group.send(y.data, dst=group.rank + 1)\ngroup.send(y.data, dst=group.rank)"
        "\ngroup.send(y.data, dst=group.rank + 1)"
    },
    "layer 2's gradient is 0.5 times the right one": {
        4: "group.recv(src=group.rank + 1) / group.size"
    },
    "layer 2's gradient is another one": {5: "group.send(x.data, dst=group.rank - 1)"},
    "the ranks wait for each other": {5: "group.recv(src=group.rank - 1)"},
    "layer 2's gradient is 0 times the right one": {
        5: "group.send(x.grad * 0.0, dst=group.rank - 1)"
    },
    "rank 1 sends None to rank 0": {5: "group.send(y.grad, dst=group.rank - 1)"},
    "1 rank, 0 cuts": {6: "2 * ranks * sequences * tokens * width * itemsize"},
    "one direction only": {6: "(ranks - 1) * sequences * tokens * width * itemsize"},
    "elements, not bytes": {6: "2 * (ranks - 1) * sequences * tokens * width"},
    "one sequence, not the batch": {6: "2 * (ranks - 1) * tokens * width * itemsize"},
    "that is what the slowest rank waits": {7: "1 - max(times) / sum(times)"},
    "the share in which they compute": {7: "1 / len(times)"},
}


def test_the_right_filling_passes(tmp_path: Path) -> None:
    result = graded("10", RIGHT, tmp_path)
    assert result.passed, result.results[-1].line()


@pytest.mark.sampled(every=10)
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_filling_fails_under_its_name(mistake: str, tmp_path: Path) -> None:
    assert_named("10", mistake, WRONG[mistake], tmp_path)


def test_the_unfilled_exercise_names_its_first_hole(tmp_path: Path) -> None:
    result = graded("10", {}, tmp_path)
    assert (
        "fill hole 1" in result.results[-1].line()
        and "exercise_10.py line" in result.results[-1].line()
    )


def test_32_layers_on_four_gpus_are_the_storys_table() -> None:
    """N2:166, counted on a model without numbers."""
    told = find("10").part("README.md").read_text()
    rows = list[Any]()
    load_module(find("10").part("lesson.py"), "10").notes_size(
        SimpleNamespace(table=lambda title, heads, found, note: rows.extend(found))
    )
    assert len(rows) == 5
    for row in rows:
        assert "| " + " | ".join(row).replace("|  |", "| |") + " |" in told
