"""Exercise 12: filled rightly it passes, and each wrong filling fails under its name."""

from pathlib import Path

import pytest
from filling import assert_named, graded, right

RIGHT = right("12")
WRONG = {
    "a head lies on two ranks": {1: "np.array_split(np.arange(heads * head_width), size)[rank]"},
    "the matrix was cut as one": {
        1: "mine",
        2: "np.array_split(np.arange(3 * heads * head_width), size)[rank]",
    },
    "head numbers, not columns": {1: "mine"},
    "only the queries": {2: "queries"},
    "three times the queries": {2: "np.concatenate([queries, queries, queries])"},
    "the keys begin at column 16": {
        2: "np.concatenate([queries + third * head_width for third in range(3)])"
    },
    "another rank's heads": {1: "np.arange(len(mine) * head_width)"},
    "a column twice": {1: "np.concatenate([np.arange(i, i + head_width) for i in mine])"},
    "columns are missing": {1: "np.arange(mine[0] * head_width, mine[-1] * head_width)"},
    "in another order": {
        2: "np.concatenate([queries + third * heads * head_width for third in (0, 2, 1)])"
    },
    "it counts P times": {3: "group.all_reduce(active @ down + bias)"},
    "lie side by side": {1: "(mine[:, None] + heads * np.arange(head_width)).ravel()"},
    "the bias is missing": {3: "group.all_reduce(active @ down)"},
    "partial sums are not added up": {3: "active @ down + bias"},
    "not that of the own rows": {4: "active.T @ dy / group.size"},
    "f forgotten": {5: "dinner @ up.T"},
    "a mean, not a sum": {5: "group.all_reduce(dinner @ up.T) / group.size"},
    "the largest of the ranks' partial sums": {3: 'group.all_reduce(active @ down, "max") + bias'},
    "the largest of the ranks' gradients": {5: 'group.all_reduce(dinner @ up.T, "max")'},
    "relu's gradient is missing": {5: "group.all_reduce(dy @ down.T @ up.T)"},
    "a mean over the rows": {6: "dy.mean(axis=0)"},
    "divided by the ranks": {6: "dy.sum(axis=0) / group.size"},
    "the wrong dim": {6: "dy.sum(axis=1)"},
    "counted P times": {6: "group.all_reduce(dy.sum(axis=0))"},
    "this is dy": {6: "dy"},
    "or vanishes": {7: "np.full(len(targets), group.all_reduce(logits.max(), 'max'))"},
    "exp overflows": {7: "np.zeros(len(targets))"},
    "ten thousands on 3 ranks: inf": {7: 'group.all_reduce(logits.max(axis=1), "min")'},
    "sums under different maxima cannot be added": {
        8: "group.all_reduce(np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1))"
    },
    "cannot be added: use the maximum of all ranks": {7: "logits.max(axis=1)"},
    "ranks disagree": {8: "np.exp(logits - highest[:, None]).sum(axis=1)"},
    "the target's logit is divided by the ranks": {9: "group.all_reduce(target) / group.size"},
    "a target's logit below 0 is lost": {9: 'group.all_reduce(target, "max")'},
    "the largest was not taken off": {8: "group.all_reduce(np.exp(logits).sum(axis=1))"},
    "the largest rank's sum of exp": {
        8: 'group.all_reduce(np.exp(logits - highest[:, None]).sum(axis=1), "max")'
    },
    "a mean over the ids": {8: "group.all_reduce(np.exp(logits - highest[:, None]).mean(axis=1))"},
    "all agree on another number": {9: "group.all_reduce(target) + 1"},
    "more travels": {
        7: 'group.all_reduce(logits.max(axis=1), "max") + 0 * group.all_reduce(targets)'
    },
    "bytes of float64": {10: "2 * (ranks - 1) * 4 * blocks * tokens * width * 8"},
    "forward or backward only": {10: "2 * (ranks - 1) * 2 * blocks * tokens * width"},
    "a ring of P ranks has P - 1 steps": {10: "2 * ranks * 4 * blocks * tokens * width"},
    "one block, not all": {10: "2 * (ranks - 1) * 4 * tokens * width"},
    "numbers of a message": {10: "4 * blocks * tokens * width"},
}


def test_the_right_filling_passes(tmp_path: Path) -> None:
    result = graded("12", RIGHT, tmp_path)
    assert result.passed, result.results[-1].line()


@pytest.mark.sampled(every=10)
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_filling_fails_under_its_name(mistake: str, tmp_path: Path) -> None:
    assert_named("12", mistake, WRONG[mistake], tmp_path)


def test_the_unfilled_exercise_names_its_first_hole(tmp_path: Path) -> None:
    result = graded("12", {}, tmp_path)
    assert not result.passed
    assert (
        "fill hole 1" in result.results[-1].line()
        and "exercise_12.py line" in result.results[-1].line()
    )
