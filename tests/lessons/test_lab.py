"""Test what the lessons share: batches follow from seeds, and differences are what their names
say."""

from functools import partial

import numpy as np
import pytest

import minidist as md
from minidist.lessons import lab
from minidist.nn import GPTConfig
from minidist.optim import SGD
from minidist.parallel.step.single import Single

CONFIG = GPTConfig(vocabulary=11, context=4, layers=1, width=8, heads=2, dtype="float64")
BATCHES = {
    "random": lab.random_batch,
    "hashed": lambda config, step, sequences: lab.hashed_batch(f"{step}", config, sequences),
    "counting": lab.counting_batch,
    "rule": lab.rule_batch,
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_follows_from_its_step(name: str) -> None:
    inputs, targets = BATCHES[name](CONFIG, 3, 5)
    again, _ = BATCHES[name](CONFIG, 3, 5)
    other, _ = BATCHES[name](CONFIG, 4, 5)
    assert inputs.shape == targets.shape == (5, CONFIG.context)
    assert inputs.max() < CONFIG.vocabulary > targets.max()
    assert np.array_equal(inputs, again) and not np.array_equal(inputs, other)
    if name == "rule":
        assert np.array_equal(targets, (5 * inputs + 3) % CONFIG.vocabulary)
    else:
        assert np.array_equal(inputs[:, 1:], targets[:, :-1])
    if name == "counting":
        assert np.array_equal(targets, (inputs + 5) % CONFIG.vocabulary)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_one_process_trains_as_single_does(scale: float) -> None:
    batches = [lab.random_batch(CONFIG, step, 3) for step in range(3)]
    model = lab.new_model(CONFIG)
    single = Single(model)
    optimizer = SGD(single.parameters, 0.25 * scale)
    for batch in batches:
        single.step(batch, optimizer)
    found = lab.alone(lab.new_model(CONFIG), partial(SGD, lr=0.25), batches, scale)
    assert np.array_equal(found, lab.weights(model))


def test_differences() -> None:
    target = np.array([1.0, -4.0])
    assert lab.difference(target + [0.0, 1.0], target) == 0.25
    assert lab.difference(np.ones(3), target) == float("inf")
    state = {"a": target, "b": np.array([2.0])}
    assert lab.state_difference({**state, "b": np.array([4.0])}, state) == 0.5
    assert (
        md.run(lambda group: lab.spread(group, np.full(2, 2.0 + group.rank)), size=3) == [1.0] * 3
    )
