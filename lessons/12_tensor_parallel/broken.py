"""Run the experiments of section 8: each makes one mistake and shows its result."""

from functools import partial
from typing import Any

import numpy as np

import minidist as md
from minidist.autograd import ops
from minidist.autograd.tensor import tensor
from minidist.comm.group import Group
from minidist.console import size_text
from minidist.lessons.lab import random_batch
from minidist.lessons.running import Break
from minidist.nn import GPT, GPTConfig
from minidist.optim import Adam
from minidist.parallel.hybrid.mesh import Mesh
from minidist.parallel.hybrid.parallelize import compose
from minidist.parallel.hybrid.plan import Plan
from minidist.parallel.step.model_axis import ModelAxis
from minidist.parallel.tensor.tensor_layers import TensorRegion, split_gpt
from minidist.parallel.tensor.tensor_parallel import TensorParallel, tensor_parallel

CONFIG = GPTConfig(vocabulary=23, context=8, layers=3, width=16, heads=4, dtype="float64")


class OneWay(TensorRegion):
    """A region without f: what enters is not all-reduced on its way back."""

    def enter(self, x: Any) -> Any:
        """Return x itself."""
        return x


def gradients(
    group: Group, region: type[TensorRegion]
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Return the losses of thirty steps on one batch, without clipping, and rank 0's gradients of
    the first."""

    class Cut(TensorParallel):
        """Tensor parallelism with regions of the given class."""

        def __init__(self, model: GPT, group: Group) -> None:
            ModelAxis.__init__(self, model, group)
            split_gpt(model, region(group))

    mesh = Mesh(group, tp=group.size)
    model = GPT(CONFIG)
    strategy = compose(model, mesh, Plan(tp=group.size), [Cut(model, mesh["tp"])], seed=0)
    optimizer = Adam(strategy.parameters, 3e-3)
    losses = []
    first: dict[str, np.ndarray] = {}
    for _ in range(30):
        losses.append(strategy.step(random_batch(CONFIG, 0, 4), optimizer))
        first = first or {name: np.array(p.grad) for name, p in model.named_parameters()}
    return losses, first


def no_f() -> None:
    """Leave out the backward all-reduce of the column linears."""
    right = md.run(partial(gradients, region=TensorRegion), size=2)[0]
    wrong = md.run(partial(gradients, region=OneWay), size=2)[0]
    for step in (0, 29):
        print(
            f"loss of step {step + 1:2}: right {right[0][step]:.6f}, without f {wrong[0][step]:.6f}"
        )
    print(
        "No error, and another model. Gradients of step 1 on rank 0, relative error (expected "
        "0.00%), from the end of the model:"
    )
    for name in reversed(right[1]):
        if name.endswith("weight"):
            scale = np.abs(right[1][name]).max()
            print(f"  {name:32} {np.abs(wrong[1][name] - right[1][name]).max() / scale:8.2%}")


def straddle() -> None:
    """Cut three heads in the middle for two ranks: each rank makes scores of half a head."""
    draw = np.random.default_rng(0)
    heads = 3
    t = 6
    width = 8
    q, k, v = (draw.normal(size=(1, heads, t, width)) for _ in range(3))
    right = ops.causal_attention(q, k, v).data
    print("three heads on two ranks, head 1 cut in the middle; expected: each head off by 0.0%")
    # Rank 0 has head 0 and half of head 1.
    pieces = {0: [slice(0, 8)], 1: [slice(0, 4), slice(4, 8)], 2: [slice(0, 8)]}
    for head, parts in pieces.items():
        y = np.concatenate(
            [
                ops.causal_attention(*(x[:, head : head + 1, :, part] for x in (q, k, v))).data
                for part in parts
            ],
            axis=-1,
        )
        error = np.abs(y - right[:, head : head + 1]).max() / np.abs(right).max()
        owner = "on both ranks" if len(parts) > 1 else f"on rank {head // 2}"
        print(f"head {head}, {owner:13}: off by {error:.1%}")
    print(
        "softmax of a part of a score is not a part of its softmax: heads are cut between, "
        "never through"
    )


def bias_early() -> None:
    """Add the bias of a row linear before the sum."""

    def job(group: Group) -> list[float]:
        x = np.ones((1, 8))
        w = np.full((8, 2), 0.5)
        b = np.array([1.0, 2.0])
        own = np.array_split(np.arange(8), group.size)[group.rank]
        early = group.all_reduce(x[:, own] @ w[own] + b)
        late = group.all_reduce(x[:, own] @ w[own]) + b
        return [*early[0], *late[0]]

    for size in (1, 2, 4):
        early0, early1, late0, late1 = md.run(job, size=size)[0]
        print(
            f"{size} rank{'s' * (size > 1)}: bias before the sum ({early0:g}, {early1:g}), after "
            f"it ({late0:g}, {late1:g}); right is (5, 6)"
        )


def gather_between() -> None:
    """Run N2:156: an all-gather after the column linear, and then each rank takes its columns
    again."""

    def job(group: Group, gathers: bool) -> tuple[float, int]:
        draw = np.random.default_rng(0)
        x = draw.normal(size=(64, 16))
        up = draw.normal(size=(16, 64))
        down = draw.normal(size=(64, 16))
        own = np.array_split(np.arange(64), group.size)[group.rank]
        inner = np.maximum(x @ up[:, own], 0)
        if gathers:
            inner = np.ascontiguousarray(group.all_gather(inner.T.copy())[own].T)
        y = group.all_reduce(inner @ down[own], algorithm="ring")
        return float(y.sum()), sum(row["nbytes"] for row in group.ledger.rows())

    for gathers in (False, True):
        ranks = md.run(partial(job, gathers=gathers), size=4)
        print(
            f"{'with' if gathers else 'without'} the gather: the sum of y is {ranks[0][0]:.6f}, "
            f"all ranks sent {size_text(sum(sent for _, sent in ranks))}"
        )
    print(
        "the gather fetches unused columns: the rows of the second matrix need just the columns "
        "that are here"
    )


def local_softmax() -> None:
    """Take on each rank the cross-entropy of its own slice of the vocabulary."""

    def job(group: Group) -> tuple[float, float]:
        model = tensor_parallel(GPT(CONFIG), group)
        model.initialize(0)
        inputs, targets = random_batch(CONFIG, 0, 4)
        logits = model(inputs)
        first = model.output.first  # type: ignore[attr-defined]
        mine = (targets >= first) & (targets < first + logits.shape[-1])
        own = ops.cross_entropy(tensor(logits.data[mine]), targets[mine] - first).item()
        return own, model.output.loss(logits, targets, divisor=None).item()

    for rank, (own, right) in enumerate(md.run(job, size=3)):
        print(f"rank {rank}: its own slice's loss {own:.4f}, the vocabulary's {right:.4f}")
    print(
        "a softmax over fewer ids gives each too much probability: the sum of exp must come from "
        "all ranks"
    )


BREAKS = {
    "no-f": Break(no_f, says="No error, and another model"),
    "straddle": Break(straddle, says="head 1, on both ranks: off by 40"),
    "bias-early": Break(bias_early, says="4 ranks: bias before the sum (8, 12), after it (5, 6)"),
    "gather-between": Break(gather_between, says="all ranks sent 144 KiB"),
    "local-softmax": Break(local_softmax, says="rank 0: its own slice's loss 2.02"),
}
