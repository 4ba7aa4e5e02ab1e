"""Learning-rate schedules: their formulas, and PyTorch's."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.errors import ConfigError
from minidist.optim import LR_SCHEDULES, LearningRate, constant, warmup_cosine
from minidist.optim.schedules import inverse_square_root, linear, stable_decay, step_decay


def test_constant() -> None:
    assert [constant(step, peak=0.5) for step in (0, 1, 10**9)] == [0.5] * 3
    assert [constant(step, peak=0.5, warmup=4) for step in range(6)] == [
        0.125,
        0.25,
        0.375,
        0.5,
        0.5,
        0.5,
    ]


def test_warmup_cosine() -> None:
    rates = [warmup_cosine(step, peak=1.0, warmup=4, total=12, floor=0.1) for step in range(15)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[8] == pytest.approx(0.55)  # half way down
    assert rates[4:12] == sorted(rates[4:12], reverse=True) and rates[12:] == [0.1] * 3
    assert warmup_cosine(0, peak=1.0, warmup=0, total=10) == 1.0
    assert warmup_cosine(3, peak=1.0, warmup=3, total=3, floor=0.2) == 0.2


def test_linear() -> None:
    rates = [linear(step, peak=1.0, warmup=2, total=6, floor=0.2) for step in range(8)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    assert [linear(step, peak=1.0, warmup=2, total=2) for step in range(4)] == [0.5, 1.0, 0.0, 0.0]


def test_inverse_square_root() -> None:
    rates = [inverse_square_root(step, peak=1.0, warmup=4) for step in range(16)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[15] == 0.5  # √(4 / 16)
    assert [inverse_square_root(step, peak=1.0, warmup=0) for step in (0, 3)] == [1.0, 0.5]


def test_stable_decay() -> None:
    rates = [
        stable_decay(step, peak=1.0, warmup=2, total=8, decay=4, floor=0.0) for step in range(10)
    ]
    assert rates == [0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert stable_decay(7, peak=1.0, warmup=0, total=8, decay=0) == 1.0
    with pytest.raises(
        ConfigError,
        match="a decay of 7 steps does not fit a run of 8 with a warm-up of 2; .* 0 and 6",
    ):
        stable_decay(0, peak=1.0, warmup=2, total=8, decay=7)


def test_step_decay() -> None:
    assert [step_decay(step, peak=8.0, every=2, factor=0.5, warmup=1) for step in range(6)] == [
        8,
        8,
        8,
        4,
        4,
        2,
    ]


def test_warmup_longer_than_the_run() -> None:
    for schedule in (warmup_cosine, linear):
        with pytest.raises(ConfigError, match="warm-up of 11 steps does not fit a run of 10"):
            schedule(0, peak=1.0, warmup=11, total=10)


@pytest.mark.parametrize("name", LR_SCHEDULES)
def test_by_name(name: str) -> None:
    """Up to the peak and never above it; then never up again; those that end, end at the floor."""
    rate = LearningRate(name=name, peak=2.0, warmup=5, total=40, floor=0.25)
    rates = [rate(step) for step in range(50)]
    assert max(rates) == 2.0 and rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[0] == (2.0 if name == "constant" else pytest.approx(0.4))
    ends = {"constant": 2.0, "inverse-sqrt": 2.0 * math.sqrt(5 / 50), "step": 2.0 * 0.1**3}
    assert rates[-1] == pytest.approx(ends.get(name, 0.5))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": "sine"}, "choose one of constant, cosine, linear, inverse-sqrt, wsd, step"),
        ({"name": "linear"}, "pass steps="),
        ({"name": "step"}, "pass steps="),
        ({"name": "wsd", "total": 9, "decay": 10}, "a run of 9"),
        ({"name": "step", "every": 0}, "every from 1"),
        ({"name": "cosine", "total": 9, "floor": 1.5}, "a floor from 0 to 1"),
    ],
)
def test_what_does_not_fit(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LearningRate(**{"peak": 1.0, **options})


def of_torch(schedulers: Callable[[Any, Any], Any], steps: int) -> list[float]:
    """The rates that PyTorch's scheduler gives an optimizer of peak 1."""
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = schedulers(torch.optim.lr_scheduler, optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("name", LR_SCHEDULES)
def test_more_steps_move_the_end_alone(name: str) -> None:
    """A run of 100 steps that is to make 4,000: it has warmed up, and what was derived from 100
    stays."""
    before = LearningRate(name=name, peak=1.0, warmup=5, total=100)
    after = before.extended(4000)
    assert (after.warmup, after.total) == (5, 4000)
    rates = [after(step) for step in range(4001)]
    assert rates[:5] == [before(step) for step in range(5)]
    # no second warm-up
    assert all(later <= sooner for sooner, later in zip(rates[5:], rates[6:], strict=False))
    if name in ("constant", "inverse-sqrt", "step"):
        assert rates[:101] == [before(step) for step in range(101)]  # nor any jump
    else:
        assert rates[4000] == before(100) == pytest.approx(0.1)
    if name == "wsd":
        assert (rates[3980], rates[3990]) == (1.0, pytest.approx(0.55))  # of the last 20 steps
    assert after.extended(4000) == after


@pytest.mark.soak
@settings(max_examples=20, deadline=None)
@given(
    warmup=st.integers(2, 9),
    rest=st.integers(2, 30),
    floor=st.sampled_from([0.0, 0.1, 0.5]),
    every=st.integers(1, 7),
    factor=st.sampled_from([0.1, 0.5]),
    decay=st.integers(1, 20),
)
def test_as_pytorch(
    warmup: int, rest: int, floor: float, every: int, factor: float, decay: int
) -> None:
    """To rounding: PyTorch's schedulers multiply the rate before by a quotient, so each step
    rounds."""
    total = warmup + rest
    decay = min(decay, rest)

    def after_warmup(of: Any, optimizer: Any, *then: Any, at: int = warmup) -> Any:
        rise = of.LinearLR(
            optimizer, start_factor=1 / warmup, end_factor=1.0, total_iters=warmup - 1
        )
        return of.SequentialLR(optimizer, [rise, *then], milestones=[warmup, at][: len(then)])

    def root(step: int) -> float:
        return min((step + 1) / warmup, math.sqrt(warmup / (step + 1)))

    theirs: dict[str, Callable[[Any, Any], Any]] = {
        "constant": lambda of, optimizer: of.ConstantLR(optimizer, factor=1.0),
        "cosine": lambda of, optimizer: after_warmup(
            of, optimizer, of.CosineAnnealingLR(optimizer, rest, floor)
        ),
        "linear": lambda of, optimizer: after_warmup(
            of, optimizer, of.LinearLR(optimizer, 1.0, floor, rest)
        ),
        "inverse-sqrt": lambda of, optimizer: of.LambdaLR(optimizer, root),
        "wsd": lambda of, optimizer: after_warmup(
            of,
            optimizer,
            of.ConstantLR(optimizer, 1.0),
            of.LinearLR(optimizer, 1.0, floor, decay),
            at=total - decay,
        ),
        "step": lambda of, optimizer: after_warmup(
            of, optimizer, of.StepLR(optimizer, every, factor)
        ),
    }
    for name in LR_SCHEDULES:
        ours = LearningRate(
            name=name,
            peak=1.0,
            warmup=warmup,
            total=total,
            floor=floor,
            every=every,
            factor=factor,
            decay=decay,
        )
        # beyond, PyTorch's cosine rises
        steps = total + 1 if name in ("cosine", "linear", "wsd") else 2 * total
        assert [ours(step) for step in range(steps)] == pytest.approx(
            of_torch(theirs[name], steps), abs=1e-12
        ), name
