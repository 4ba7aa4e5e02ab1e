"""Grades exercise 12: ranks as threads run your parts; the whole layer in one process is the answer
key."""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

from minidist.autograd import ops
from minidist.autograd.tensor import tensor
from minidist.comm.group import Group
from minidist.console import plural
from minidist.grading import Known, Mistake, Result, expect, judge, named
from minidist.launch import run
from minidist.nn import GPTConfig
from minidist.nn.shares import head_shares
from minidist.parallel.tensor.tensor_layers import head_columns
from minidist.parallel.tensor.tensor_parallel import elements_sent, plain_tensor_mlp

ROWS = 5
WIDTH = 4
HIDDEN = 10
VOCABULARY = 11
LIMIT = 60.0

CUT_FROM = (plain_tensor_mlp,)
ANSWERS = {
    1: "np.concatenate([np.arange(i * head_width, (i + 1) * head_width) for i in mine])",
    2: "np.concatenate([queries + third * heads * head_width for third in range(3)])",
    6: "dy.sum(axis=0)",
    7: 'group.all_reduce(logits.max(axis=1), "max")',
    8: "group.all_reduce(np.exp(logits - highest[:, None]).sum(axis=1))",
    9: "group.all_reduce(target)",
    10: "2 * (ranks - 1) * 4 * blocks * tokens * width",
}
"""The right code of the holes beyond the plain version."""


def grade(exercise: ModuleType) -> Iterator[Result]:
    """Columns, the MLP forward and back, the loss, then the traffic."""
    for heads, size in ((4, 2), (5, 3)):
        for rank in range(size):
            yield _columns(exercise, heads, rank, size)
    for size in (1, 3):
        yield from _mlp(size, run(_run_mlp, exercise, size=size, limit=LIMIT))
    for size in (1, 3):
        yield from _loss(size, run(_run_loss, exercise, size=size, limit=LIMIT))
    for blocks, tokens, width, ranks in ((1, 10, 10, 5), (3, 7, 16, 4)):
        yield _traffic(exercise, blocks, tokens, width, ranks)


# ------------------------------------------------------------------------------------------ columns


def _columns(exercise: ModuleType, heads: int, rank: int, size: int) -> Result:
    """Compare the columns with the library's, and with what known mistakes give."""
    width = 4
    target = np.concatenate(
        head_columns(heads, heads, width, head_shares(heads, heads, size))[rank]
    ).tolist()
    ours = np.asarray(exercise.head_columns(heads, width, rank, size)).tolist()
    own = np.array_split(np.arange(heads * width), size)[rank]
    straddling = [int(x) + third * heads * width for third in range(3) for x in own]
    one_matrix = np.array_split(np.arange(3 * heads * width), size)[rank].tolist()
    head_by_head = np.array_split(np.arange(heads), size)[rank]
    return expect(
        f"rank {rank} of {size}: columns of {heads} heads",
        target,
        ours,
        "other columns",
        f"a head has {width} columns among the queries, {width} among the keys and {width} among the "
        "values: section 2 (holes 1, 2)",
        known={
            "three times the queries": target[: len(target) // 3] * 3,
            "another rank's heads": np.concatenate(
                head_columns(heads, heads, width, head_shares(heads, heads, size))[0]
            ).tolist(),
            "a head lies on two ranks": straddling,
            "keys and values are missing: the matrix was cut as one": one_matrix,
        },
        signs={
            "head numbers, not columns": len(ours) == 3 * len(head_by_head),
            "only the queries": len(ours) == len(target) // 3,
            "in another order": sorted(ours) == sorted(target),
            f"within the queries the {width} columns of a head lie side by side": ours[:width]
            != list(range(ours[0], ours[0] + width))
            and len(ours) == len(target),
            f"no keys, or no values: the keys begin at column {heads * width}": not any(
                heads * width <= column < 2 * heads * width for column in ours
            )
            or not any(2 * heads * width <= column for column in ours),
            "a column twice": len(set(ours)) < len(ours),
            "columns are missing": set(ours) < set(target),
        },
    )


# ---------------------------------------------------------------------------------------------- MLP


def _weights() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(5)
    return {
        "x": draw.normal(size=(ROWS, WIDTH)),
        "up": draw.normal(size=(WIDTH, HIDDEN)),
        "down": draw.normal(size=(HIDDEN, WIDTH)),
        "bias": draw.normal(size=WIDTH),
        "dy": draw.normal(size=(ROWS, WIDTH)),
    }


def _run_mlp(group: Group, exercise: ModuleType) -> dict[str, Any]:
    """Run the student's MLP with this rank's part; return what it gives."""
    w = _weights()
    own = np.array_split(np.arange(HIDDEN), group.size)[group.rank]
    up = w["up"][:, own]
    down = w["down"][own]
    y, dx, dup, ddown = exercise.plain_tensor_mlp(w["x"], up, down, w["bias"], w["dy"], group)
    dbias = exercise.bias_gradient(w["dy"], group)
    return {
        "y": np.array(y),
        "dx": np.array(dx),
        "dup": np.array(dup),
        "ddown": np.array(ddown),
        "dbias": np.array(dbias),
        "own": own,
    }


def _mlp(size: int, ranks: list[dict[str, Any]]) -> Iterator[Result]:
    """Compare the results and gradients of the ranks with those of the whole MLP by the tape."""
    w = _weights()
    leaf = {name: tensor(w[name], requires_grad=True) for name in ("x", "up", "down", "bias")}
    whole = ops.linear(ops.relu(ops.linear(leaf["x"], leaf["up"])), leaf["down"], leaf["bias"])
    whole.backward(w["dy"])
    grads = {name: np.asarray(found.grad) for name, found in leaf.items()}
    on = f"on {plural(size, 'rank')}"
    yield _output(f"y {on}", whole.data, ranks)
    yield _input_gradient(f"dx {on}", grads["x"], ranks)
    yield _bias_gradient(f"gradient of the bias {on}", grads["bias"], ranks)
    for name in ("up", "down"):
        yield _matrix_gradient(f"gradient of {name} {on}", name, grads[name], ranks)


def _output(task: str, y: np.ndarray, ranks: list[dict[str, Any]]) -> Result:
    """Compare the ranks' y with the whole MLP's."""
    w = _weights()
    size = len(ranks)
    bias = w["bias"]
    parts = [
        np.maximum(w["x"] @ w["up"][:, rank["own"]], 0) @ w["down"][rank["own"]] for rank in ranks
    ]
    return _same(
        task,
        y,
        ranks,
        "y",
        {
            "every rank adds the bias: it counts P times": y + (size - 1) * bias,
            "the bias is missing": y - bias,
            "partial sums are not added up": parts[0] + bias,
            "a mean, not a sum": (y - bias) / size + bias,
            "the largest of the ranks' partial sums, not their sum": np.max(parts, axis=0) + bias,
            "neither partial sums added up nor the bias": parts[0],
        },
        "is a rank's product some columns of y, or a partial sum? And how often may the bias be in "
        "y? section 1 (hole 3)",
    )


def _input_gradient(task: str, dx: np.ndarray, ranks: list[dict[str, Any]]) -> Result:
    """Compare the ranks' gradient of the input with the tape's."""
    w = _weights()
    parts = [
        (w["dy"] @ w["down"][rank["own"]].T * (w["x"] @ w["up"][:, rank["own"]] > 0))
        @ w["up"][:, rank["own"]].T
        for rank in ranks
    ]
    return _same(
        task,
        dx,
        ranks,
        "dx",
        {
            "f forgotten: only this rank's columns": parts[0],
            "a mean, not a sum": dx / len(ranks),
            "relu's gradient is missing": w["dy"] @ w["down"].T @ w["up"].T,
            "the largest of the ranks' gradients, not their sum": np.max(parts, axis=0),
        },
        "every rank's columns used the same x: what is x's gradient, then? section 1 (hole 5)",
    )


def _bias_gradient(task: str, grad: np.ndarray, ranks: list[dict[str, Any]]) -> Result:
    """Compare the ranks' gradient of the bias with the tape's."""
    dy = _weights()["dy"]
    return _same(
        task,
        grad,
        ranks,
        "dbias",
        {
            "counted P times": grad * len(ranks),
            "this is dy, not its sum over the rows": dy,
            "a mean over the rows": grad / ROWS,
            "divided by the ranks": grad / len(ranks),
            "one number, not one for each of the bias's": np.asarray(dy.sum()),
            "summed over the wrong dim": dy.sum(axis=1),
        },
        "each number of the bias was added to every row, on every rank alike: section 1 (hole 6)",
    )


def _matrix_gradient(task: str, name: str, grad: np.ndarray, ranks: list[dict[str, Any]]) -> Result:
    """Compare each rank's gradient of its part of a matrix with the tape's."""
    own = [np.take(grad, rank["own"], axis=int(name == "up")) for rank in ranks]
    right = all(
        np.allclose(rank["d" + name], target) for rank, target in zip(ranks, own, strict=True)
    )
    return Result(
        task,
        right,
        "that of the own part",
        "equal" if right else "another",
        "not that of the own rows" if name == "down" else "inner or dy was changed on the way",
        "these rows are on this rank only, and dy is whole: what of their gradient could another "
        "rank have? section 1 (hole 4)"
        if name == "down"
        else "leave what is given unchanged (hole 3)",
    )


def _same(
    task: str,
    target: np.ndarray,
    ranks: list[dict[str, Any]],
    name: str,
    known: Known,
    advice: str,
) -> Result:
    """Every rank's `name` beside the target; a difference by the name of the mistake that gives
    it."""
    wrong = [
        rank
        for rank, result in enumerate(ranks)
        if result[name].shape != target.shape or not np.allclose(result[name], target)
    ]
    if not wrong:
        return Result(task, True, "the whole layer's", "equal")
    first = ranks[0][name]
    mistake, advice = named(
        "another result",
        advice,
        known=known,
        gives=lambda value: value.shape == first.shape and np.allclose(first, value),
    )
    return Result(
        task,
        False,
        "the whole layer's",
        f"another on {len(wrong)} of {len(ranks)}",
        mistake,
        advice,
    )


# --------------------------------------------------------------------------------------------- loss


class WatchedGroup:
    """A group that remembers how many numbers were all-reduced."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.rank = group.rank
        self.size = group.size
        self.numbers = 0

    def all_reduce(self, x: Any, *args: Any, **options: Any) -> Any:
        """Return what the group's all_reduce returns, and count the numbers."""
        self.numbers += np.asarray(x).size
        return self.group.all_reduce(x, *args, **options)


def _run_loss(group: Group, exercise: ModuleType) -> list[tuple[float, int]]:
    """The student's loss of small and of huge logits, and how much travelled."""
    results = []
    for scale in (1.0, 4000.0):
        logits, targets = _logits(scale)
        own = np.array_split(np.arange(VOCABULARY), group.size)[group.rank]
        watched = WatchedGroup(group)
        with np.errstate(all="ignore"):
            loss = exercise.cross_entropy(logits[:, own], targets, int(own[0]), watched)
        results.append((float(loss), watched.numbers))
    return results


def _logits(scale: float) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(2)
    # each token's logits lie elsewhere, so it has its own maximum
    far = 5 * scale * np.arange(ROWS)[:, None]
    return scale * draw.normal(size=(ROWS, VOCABULARY)) - far, draw.integers(0, VOCABULARY, ROWS)


def _loss(size: int, ranks: list[list[tuple[float, int]]]) -> Iterator[Result]:
    """Compare the loss with the library's over the whole vocabulary."""
    on = f"on {plural(size, 'rank')}"
    for number, (name, scale) in enumerate(
        (("loss", 1.0), ("loss of logits in the ten thousands", 4000.0))
    ):
        target = ops.cross_entropy(*_logits(scale)).item()
        ours = [rank[number][0] for rank in ranks]
        right = all(np.isclose(loss, target, rtol=1e-9) for loss in ours)
        yield judge(
            f"{name} {on}",
            right,
            f"{target:.6f}",
            f"{ours[0]:.6f}",
            "all agree on another number",
            "which of the three numbers of a token does a rank know only in part? section 5 (holes "
            "7, 8, 9)",
            signs={
                "exp overflows, or vanishes: take each token's own largest logit, of all ranks, "
                "off first": not np.isfinite(ours).all(),
                "sums under different maxima cannot be added": Mistake(
                    not right
                    and np.isclose(ours[0], _own_maxima(*_logits(scale), size), rtol=1e-9).any(),
                    "use the maximum of all ranks: section 5 (holes 7, 8)",
                ),
                "ranks disagree: something was not joined": len(set(np.round(ours, 9))) > 1,
                **{
                    mistake: not right and np.isclose(ours[0], wrong, rtol=1e-9)
                    for mistake, wrong in _wrong_losses(*_logits(scale), size).items()
                },
            },
        )
    if size > 1:
        yield expect(
            f"numbers all-reduced a token {on}",
            3,
            ranks[0][0][1] // ROWS,
            "more travels than maximum, sum and target",
            "section 5 (holes 7, 8, 9)",
        )


def _own_maxima(logits: np.ndarray, targets: np.ndarray, size: int) -> list[float]:
    """Return rank 0's losses if each rank's sum is under its own maximum: with the maximum of all
    ranks in the end, or with rank 0's."""
    parts = [logits[:, own] for own in np.array_split(np.arange(VOCABULARY), size)]
    target = np.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    sums = [np.exp(part - part.max(axis=1, keepdims=True)).sum(axis=1) for part in parts]
    total = np.log(np.sum(sums, axis=0))
    return [
        float(np.mean(total + highest - target))
        for highest in (logits.max(axis=1), parts[0].max(axis=1))
    ]


def _wrong_losses(logits: np.ndarray, targets: np.ndarray, size: int) -> dict[str, float]:
    """Return the losses that known mistakes give, by name."""
    parts = [logits[:, own] for own in np.array_split(np.arange(VOCABULARY), size)]
    highest = logits.max(axis=1)
    target = np.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    others_have_0 = np.maximum(target, 0) if size > 1 else target
    with np.errstate(all="ignore"):
        sums = [np.exp(part - highest[:, None]).sum(axis=1) for part in parts]
        means = [np.exp(part - highest[:, None]).mean(axis=1) for part in parts]
        total = np.log(np.sum(sums, axis=0))
        tokens = {
            "exp of the logits themselves: the largest was not taken off": np.log(
                np.exp(logits).sum(axis=1)
            )
            + highest
            - target,
            "the largest rank's sum of exp, not that of all": np.log(np.max(sums, axis=0))
            + highest
            - target,
            "a mean over the ids, not a sum": np.log(np.sum(means, axis=0)) + highest - target,
            "the target's logit is divided by the ranks": total + highest - target / size,
            "a target's logit below 0 is lost: the other ranks have 0": total
            + highest
            - others_have_0,
            "the target's logit has the wrong sign": total + highest + target,
        }
        return {name: float(np.mean(losses)) for name, losses in tokens.items()}


# ------------------------------------------------------------------------------------------ traffic


def _traffic(exercise: ModuleType, blocks: int, tokens: int, width: int, ranks: int) -> Result:
    """Beside the library's formula, as the difference of a model of so many blocks and one more."""
    configs = [
        GPTConfig(vocabulary=8, context=8, layers=layers, width=width, heads=ranks)
        for layers in (1, blocks + 1)
    ]
    less, more = (elements_sent(config, ranks=ranks, tokens=tokens) for config in configs)
    target = more - less
    return expect(
        f"numbers sent for {plural(blocks, 'block')} on {ranks} ranks",
        target,
        exercise.numbers_sent(blocks, tokens, width, ranks),
        "wrong traffic",
        "how many all-reduces has a block, of how many numbers, and what do all ranks of a ring send "
        "for one? section 4 (hole 10)",
        known={
            "of one rank": target // ranks,
            "that is with blocks computed again": target // 2 * 3,
            "one all-reduce a block": target // 4,
            "numbers of a message, not sent": target // (2 * (ranks - 1)),
            "only half: forward or backward only, or one of the ring's two rounds": target // 2,
            "a ring of P ranks has P - 1 steps each way": target // (ranks - 1) * ranks,
            "bytes of float64, not numbers": target * 8,
            "one block, not all": target // blocks,
        },
    )


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "12", *sys.argv[1:]]))
