"""Stages: which layers go where, and that they together are the model."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training import global_batch, tiny

from minidist.autograd.tensor import tensor
from minidist.device import account
from minidist.errors import ShardError
from minidist.nn import GPT
from minidist.parallel.pipeline.stages import Stages, balanced_layers, hollow


@settings(max_examples=20)
@given(
    costs=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    stages=st.integers(1, 4),
    first=st.integers(0, 9),
    last=st.integers(0, 9),
)
def test_no_split_has_a_faster_slowest_stage(
    costs: list[int], stages: int, first: int, last: int
) -> None:
    if len(costs) < stages - 2:
        with pytest.raises(ShardError, match=f"use at most {len(costs) + 2}"):
            balanced_layers(costs, stages)
        return

    def slowest(split: tuple[int, ...]) -> float:
        edges = [0, *itertools.accumulate(split)]
        sums = [sum(costs[start:stop]) for start, stop in itertools.pairwise(edges)]
        sums[0], sums[-1] = sums[0] + first, sums[-1] + last
        return max(sums)

    splits = [
        split
        for split in itertools.product(range(len(costs) + 1), repeat=stages)
        if sum(split) == len(costs) and all(split[1:-1])
    ]
    assert slowest(tuple(balanced_layers(costs, stages, first=first, last=last))) == min(
        map(slowest, splits)
    )


def test_even_layers_and_heavy_ends() -> None:
    assert sorted(balanced_layers([1.0] * 8, 3)) == [2, 3, 3]
    assert balanced_layers([1.0] * 8, 4, first=0.2, last=2.0) == [2, 2, 3, 1]
    assert balanced_layers([1.0] * 2, 4) == [0, 1, 1, 0]


@pytest.mark.sampled
@pytest.mark.parametrize("layers", [[1, 3], [2, 1, 1], [0, 2, 2, 0], [4]])
@pytest.mark.parametrize("tied", [True, False])
def test_stages_together_are_the_model(layers: list[int], tied: bool) -> None:
    config = tiny(layers=4, tied=tied)
    whole = GPT(config)
    whole.initialize(3)
    inputs, targets = global_batch(0, 2, config)
    x = inputs
    weights = {}
    for stage in range(len(layers)):
        part = Stages(GPT(config), layers, [stage])
        part.model.initialize(3)
        weights.update(part.model.state_dict())
        x = part.forward(stage, x, targets=targets)
    assert x.item() == whole.loss(inputs, targets).item()
    assert weights.keys() == whole.state_dict().keys()
    for name, array in whole.state_dict().items():
        np.testing.assert_array_equal(weights[name], array)


@pytest.mark.parametrize(
    ("layers", "says"),
    [([1, 2], "must add up to 4"), ([5, -1], "must add up to 4"), ([2, 0, 2], "stage 1 has none")],
)
def test_layers_that_do_not_fit(layers: list[int], says: str) -> None:
    with pytest.raises(ShardError, match=says):
        Stages(GPT(tiny(layers=4)), layers, [0])


def test_a_hollow_tensor_goes_backward_like_a_full_one() -> None:
    grads = []
    for make in (lambda y: y, hollow):
        x = tensor(np.arange(6.0).reshape(2, 3), requires_grad=True)
        y = make(x * 2.0 + 1.0)
        y.backward(np.full((2, 3), 3.0))
        grads.append(x.grad)
        assert y.shape == (2, 3)
    np.testing.assert_array_equal(*grads)


def test_a_hollow_tensor_keeps_no_numbers() -> None:
    held = []
    for make in (lambda y: y, hollow):
        with account.use(account.MemoryAccount()) as memory:
            x = tensor(np.ones((100, 100)), requires_grad=True)
            y = make(x + x)
            held.append(memory.now["activations"])
            assert y.shape == (100, 100)
    assert held[0] - held[1] == 100 * 100 * 8
