"""A pipeline of modules that are no GPT: equal to one process, with every kind of schedule, and
refused in a line where it cannot be."""

from typing import Any

import numpy as np
import pytest

import minidist as md
from minidist.errors import ShardError
from minidist.nn import Linear, Module
from minidist.parallel.pipeline import own_stages
from minidist.parallel.pipeline.schedules import make_schedule

STEPS = 4


class Layer(Module):
    """Each stage has another width, and the one in the middle folds a dim: shapes differ."""

    def __init__(self, inputs: int, outputs: int, folds: bool = False) -> None:
        self.linear = Linear(inputs, outputs, dtype="float64")
        self.folds = folds

    def forward(self, x: Any) -> Any:
        y = self.linear(x).tanh()
        return y.reshape(y.shape[0], 2, -1) if self.folds else y


class Last(Layer):
    def loss(self, x: Any, targets: Any, divisor: float) -> Any:
        return md.ops.cross_entropy(self.linear(x).mean(1), targets, divisor=divisor)


def stages() -> list[Module]:
    return [Layer(5, 7), Layer(7, 12, folds=True), Layer(6, 4), Last(4, 3)]


def batch_of(step: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(step)
    return rng.normal(size=(7, 5)), rng.integers(0, 3, 7)


def alone(clip: float | None) -> tuple[list[float], dict[str, np.ndarray]]:
    """The plainest loop over all stages in one process."""
    whole = own_stages.StageList(dict(enumerate(stages())))
    whole.initialize(3)
    *front, last = whole.stages.values()
    rule = md.optim.SGD(list(whole.parameters()), lr=0.3)
    losses = []
    for step in range(STEPS):
        x, targets = batch_of(step)
        y: Any = x
        for stage in front:
            y = stage(y)
        loss = last.loss(y, targets, targets.size)  # type: ignore[attr-defined]
        loss.backward()
        norm = md.optim.global_norm(p.grad for p in whole.parameters())
        rule.step(None, 1.0 if clip is None else md.optim.clip_scale(norm, clip))
        rule.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.data.copy() for name, p in whole.named_parameters()}


def train(
    world: md.Group, name: str, clip: float | None, chunks: int | None = None
) -> tuple[list[float], dict[str, np.ndarray]]:
    pipeline = md.Pipeline(
        stages(), world, make_schedule(name, world.size, 3, chunks=chunks), seed=3
    )
    rule = md.optim.SGD(pipeline.parameters, lr=0.3)
    losses = [pipeline.step(batch_of(step), rule, clip=clip) for step in range(STEPS)]
    return losses, pipeline.state_dict()


def check_equal(size: int, name: str, clip: float | None, chunks: int | None = None) -> None:
    losses, weights = alone(clip)
    for mine, own in md.run(train, name, clip, chunks, size=size):
        assert np.allclose(mine, losses, rtol=0, atol=1e-13)
        assert own.keys() == weights.keys()
        for key, weight in weights.items():
            assert np.abs(own[key] - weight).max() < 1e-13, key


@pytest.mark.parametrize(
    ("size", "name", "chunks"),
    [
        (4, "gpipe", None),
        (4, "1f1b", None),
        (4, "zb-h1", None),
        (2, "interleaved", None),
        (2, "zb-v", None),
        (2, "dualpipe-v", None),
        (1, "interleaved", 4),
    ],
)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_equals_one_process(size: int, name: str, chunks: int | None, clip: float | None) -> None:
    check_equal(size, name, clip, chunks)


@pytest.mark.parametrize("bug", ["another stage", "no loss divisor", "names of others"])
def test_planted_bugs_break_parity(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own: Any = own_stages.OwnStages
    if bug == "another stage":
        forward = own.forward
        monkeypatch.setattr(
            own, "forward", lambda self, stage, x, **rest: forward(self, max(stage, 1), x, **rest)
        )
    elif bug == "no loss divisor":
        forward = own.forward
        monkeypatch.setattr(
            own,
            "forward",
            lambda self, stage, x, **rest: forward(self, stage, x, **{**rest, "divisor": 3}),
        )
    else:
        shapes = own.shapes
        monkeypatch.setattr(own, "shapes", lambda self, numbers: shapes(self, [*numbers][::-1]))
    with pytest.raises((AssertionError, md.errors.MinidistError, ValueError)):
        check_equal(2, "interleaved", None)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: stages()[1:], "3 modules for a pipeline of 4 stages"),
        (lambda: [*stages()[:3], Layer(4, 3)], "the last stage, a Layer, has no loss"),
        (lambda: [np.tanh, *stages()[1:]], "stage 0 of the pipeline is a ufunc"),
        (lambda: [shared := Layer(5, 5), shared, *stages()[2:]], "stages 0 and 1 have the same"),
    ],
)
def test_what_cannot_be_stages_is_refused_in_a_line(wrong: Any, says: str) -> None:
    def job(world: md.Group) -> None:
        md.Pipeline(wrong(), world, make_schedule("1f1b", 4, 2), seed=0)

    with pytest.raises(ShardError) as caught:
        md.run(job, size=4)
    assert says in str(caught.value) and "\n" not in str(caught.value)
