"""Exercise 19: filled rightly it passes, and each wrong filling fails under its name."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from filling import assert_named, graded, right

import minidist as md
from minidist import lessons
from minidist.autograd.tape import Node
from minidist.autograd.tensor import tensor
from minidist.grading import load_module
from minidist.nn import DropoutKey

RIGHT = right("19")
WRONG = {
    "counted twice": {1: "segments * x + size * a"},
    "nothing is made again": {1: "segments * x"},
    "that keeps every block's input": {1: "layers * x + a"},
    "one block is made again": {1: "(segments - 1) * x + a"},
    "another size has a lower peak": {2: "sizes[0]"},
    "best size for 12 blocks": {2: "round((layers * x / a) ** 0.5)"},
    "the tape was kept": {3: "np.errstate()"},
    "your code raised: pop from empty list": {4: "pass"},
    "a segment starts from another's input": {5: "tensor(kept.pop(0).data, requires_grad=True)"},
    "the gradient that is handed on is None": {5: "tensor(kept.pop().data)"},
    "exchanged": {1: "(size - 1) * x + segments * a"},
    "all blocks' activations": {1: "(segments - 1) * x + layers * a"},
    "the lowest peak, and not its size": {2: "min(peak(layers, size, x, a) for size in sizes)"},
    "the highest peak": {2: "max(sizes, key=lambda size: peak(layers, size, x, a))"},
    "a place in sizes": {2: "int(np.argmin([peak(layers, s, x, a) for s in sizes]))"},
    "every segment starts from the last": {5: "tensor(kept[-1].data, requires_grad=True)"},
    "the segment's output is handed on": {6: "again.data"},
    "a whole step too high": {7: "np.ceil(x / scale + chance)"},
    "half a step too low": {7: "np.floor(x / scale + chance - 0.5)"},
    "in half of the cases": {7: "np.floor(x / scale) + (chance >= 0.5)"},
    "more than inputs": {4: "kept.append(block(x))"},
    "the gradient does not reach the segment before": {6: "dy"},
    "the gradient has the wrong sign": {6: "-again.grad"},
    "the gradient that is handed on is another": {6: "0.5 * again.grad"},
    "negative numbers are rounded towards zero": {7: "np.trunc(x / scale + chance)"},
    "the mean is a whole step too low": {7: "np.floor(x / scale - chance)"},
    "a number is rounded the same way whatever the chance": {7: "np.rint(x / scale)"},
    "the mean is half a step too high": {7: "np.rint(x / scale + chance)"},
    "the mean is another number": {7: "np.floor(x + chance)"},
}


def test_the_right_filling_passes(tmp_path: Path) -> None:
    result = graded("19", RIGHT, tmp_path)
    assert result.passed, result.results[-1].line()


@pytest.mark.sampled(every=15)
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_filling_fails_under_its_name(mistake: str, tmp_path: Path) -> None:
    assert_named("19", mistake, WRONG[mistake], tmp_path)


def test_the_unfilled_exercise_names_its_first_hole(tmp_path: Path) -> None:
    result = graded("19", {}, tmp_path)
    assert (
        "fill hole 1" in result.results[-1].line()
        and "exercise_19.py line" in result.results[-1].line()
    )


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_rank_keeps_and_sends_its_share_of_an_input(size: int) -> None:
    """Also where the ranks do not divide the numbers."""
    kept = load_module(lessons.find("19").part("kept.py"), "19")
    config = kept.lab.CONFIG
    numbers = kept.lab.BATCH * config.context * config.width
    for way in ("shard", "8bit,shard"):
        found = md.run(lambda group, way=way: kept.step_with(group, way, group.size), size=size)[0]
        assert (found["here"], found["sent"]) == kept.shared_bytes(numbers, way.split(","), size)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_block_leaves_ten_nodes_on_the_tape(dropout: float) -> None:
    """Section 1 of the story says so; it leaves one, if it runs again."""
    lab = load_module(lessons.find("19").part("experiments.py"), "19")
    config = replace(lab.CONFIG, dropout=dropout)
    counted = {}
    for which in ("none", "all"):
        model = lab.model_of(config, which)
        x = tensor(np.ones((2, config.context, config.width), np.float32), requires_grad=True)
        key = DropoutKey.of_sequences(0, 0, 0, 2, config.context)
        waiting = [model.blocks[0](x, np.arange(config.context), key).node]
        seen = set()
        while waiting:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                waiting += [edge.source for edge in node.edges if isinstance(edge.source, Node)]
        counted[which] = len(seen)
    assert counted == {"none": 10, "all": 1}
    story = lessons.find("19").part("README.md").read_text(encoding="utf-8")
    assert "one node on the tape instead of ten" in story
