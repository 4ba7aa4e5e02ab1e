"""Model parallel: equal to one process, at the cost its docstring states, and idle as it says."""

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import STAGED, differ, train_stages
from planted import Bug, check_caught
from training import global_batch, tiny

import minidist as md
from minidist.errors import ShardError
from minidist.nn import GPT
from minidist.observe.timeline import Timeline
from minidist.optim import SGD
from minidist.parallel.pipeline.model_parallel import ModelParallel

BOUND = 1e-10
CHANGES = {**STAGED, "layers": 5}


@pytest.fixture(scope="module")
def serial() -> dict[str, Any]:
    """One process, three steps of five sequences."""
    return md.run(train_stages, "single", CHANGES, size=1)[0]


@pytest.mark.sampled
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_equals_one_process(serial: dict[str, Any], size: int) -> None:
    ranks = md.run(train_stages, "model parallel", CHANGES, size=size)
    assert all(differ(rank, serial) < BOUND for rank in ranks)
    # the table, twice
    assert size == 1 or sum(len(rank["own"]) for rank in ranks) == len(serial["weights"]) + 1


any_job = given(
    size=st.integers(1, 6),
    sequences=st.integers(1, 7),
    accumulate=st.integers(1, 4),
    layers=st.integers(4, 7),
    tied=st.booleans(),
    positions=st.sampled_from(["learned", "rotary"]),
)


@settings(max_examples=2)
@any_job
def test_any_job(
    size: int, sequences: int, accumulate: int, layers: int, tied: bool, positions: str
) -> None:
    """Also passes without a row."""
    check_job(size, sequences, accumulate, layers, tied, positions)


@pytest.mark.soak
@settings(max_examples=150)
@any_job
def test_very_many_jobs(
    size: int, sequences: int, accumulate: int, layers: int, tied: bool, positions: str
) -> None:
    """The same, more often."""
    check_job(size, sequences, accumulate, layers, tied, positions)


def check_job(
    size: int, sequences: int, accumulate: int, layers: int, tied: bool, positions: str
) -> None:
    """Ranks equal one process."""
    changes = {"layers": layers, "tied": tied, "positions": positions}
    one, many = (
        md.run(
            lambda world, name: train_stages(
                world, name, changes, steps=2, sequences=sequences, accumulate=accumulate
            ),
            name,
            size=count,
        )[0]
        for name, count in (("single", 1), ("model parallel", size))
    )
    assert differ(many, one) < BOUND


def gradient_not_handed_back(right: Any, self: Any, work: Any, number: int) -> None:
    """The stage before is given zeros."""
    x, _ = work.kept[self.group.rank, number]
    if x is not None:
        x.register_hook(lambda dx: dx * 0.0)
    right(self, work, number)


BUGS = [
    Bug("gradient not handed back", ModelParallel, "backward", gradient_not_handed_back),
    Bug("table not summed", ModelParallel, "sum_ends", lambda right, self: None),
    Bug(
        "dropout of the first rows",
        ModelParallel,
        "run",
        lambda right, self, part, **options: right(
            self, replace(part, first=part.first + 1), **options
        ),
    ),
]


@pytest.mark.sampled
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bugs_break_parity(
    serial: dict[str, Any], bug: Bug, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check() -> None:
        assert differ(md.run(train_stages, "model parallel", CHANGES, size=2)[0], serial) < BOUND

    check_caught(bug, check, monkeypatch)


@pytest.mark.sampled
@pytest.mark.parametrize(("size", "tied"), [(1, True), (2, True), (4, False)])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_bytes_are_the_formula(size: int, tied: bool, accumulate: int) -> None:
    """Whatever the number of passes."""
    changes = {"layers": 4, "tied": tied}
    config = tiny(layers=4, tied=tied)
    ranks = md.run(
        lambda world: train_stages(
            world, "model parallel", changes, steps=2, sequences=7, accumulate=accumulate
        ),
        size=size,
    )
    sent = [rank["sent"].get("world", {}) for rank in ranks]
    assert (
        sum(s.get("send", 0) for s in sent)
        == 2 * 2 * (size - 1) * 7 * config.context * config.width * 8
    )
    table = 2 * 2 * config.vocabulary * config.width * 8 if tied and size > 1 else 0
    assert sum(s.get("all_reduce", 0) for s in sent) == table
    assert all(rank["sent"]["control"] == {"all_gather": 2 * 2 * 8 * (size - 1)} for rank in ranks)


def test_one_rank_works_at_a_time() -> None:
    """By recorded spans: none overlaps another rank's. With stages that sleep the ranks are idle
    (p-1)/p."""

    def job(world: Any) -> list[list[float]]:
        timeline = Timeline(world.rank)
        config = tiny(layers=3)
        strategy = ModelParallel(GPT(config), world, seed=0, recorder=timeline)
        forward = strategy.stages.forward
        strategy.stages.forward = lambda *args, **options: (
            time.sleep(0.02),
            forward(*args, **options),
        )[1]
        strategy.step(global_batch(0, 2, config), SGD(strategy.parameters, 0.1), accumulate=2)
        return [
            [span.start, span.stop]
            for span in timeline.spans
            if span.name in ("forward", "backward")
        ]

    spans = sorted(span for rank in md.run(job, size=3) for span in rank)
    assert all(one[1] <= other[0] for one, other in zip(spans, spans[1:], strict=False))
    busy = sum(stop - start for start, stop in spans)
    length = spans[-1][1] - spans[0][0]
    assert 1 - busy / (3 * length) > 0.6


def test_layers_that_do_not_fit() -> None:
    with pytest.raises(ShardError, match="use at most 4"):
        md.run(lambda world: ModelParallel(GPT(tiny(layers=2)), world, seed=0), size=5)
