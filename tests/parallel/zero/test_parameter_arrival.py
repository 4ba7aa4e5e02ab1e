"""Weights that are on their way: a step does not wait for them, whoever reads one does."""

from typing import Any

import numpy as np
import pytest
from training import SMALL_BUCKETS, difference, global_batch, tiny

import minidist as md
from minidist.comm.transports.throttled import delayed
from minidist.nn import GPT
from minidist.optim import SGD
from minidist.parallel.zero.replica import ParameterArrivals
from minidist.parallel.zero.zero1 import Zero1
from minidist.parallel.zero.zero2 import Zero2


def under_way(strategy: Any) -> int:
    """Return how many runs are still to be waited for."""
    return sum(parameter.arrival is not None for parameter in strategy.model.parameters())


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [Zero1, Zero2])
def test_a_step_returns_while_weights_travel_and_a_reader_waits(stage: Any) -> None:
    def job(world: Any, alpha: float) -> dict[str, np.ndarray]:
        model = GPT(tiny())
        model.initialize(3)
        with delayed(world, alpha=alpha, beta=0) as slow:
            strategy = stage(model, slow, bucket_bytes=SMALL_BUCKETS)
            strategy.step(global_batch(0, 4, tiny()), SGD(strategy.parameters, 0.1))
            last = list(model.parameters())[-1]
            if alpha:
                assert (
                    under_way(strategy) == len(list(model.parameters()))
                    and last.arrival is not None
                )
            assert np.isfinite(last.data).all() and last.arrival is None
            weights = model.state_dict()
            assert not under_way(strategy)
        return weights

    slowly, at_once = (
        md.run(lambda world, a=alpha: job(world, a), size=2) for alpha in (0.03, 0.0)
    )
    assert [difference(rank, at_once[0]) for rank in slowly] == [0.0, 0.0]


def test_they_set_out_in_the_order_of_use() -> None:
    """The first bucket holds the last layer; the embedding is needed first."""

    def job(world: Any) -> list[str]:
        model = GPT(tiny())
        lines = []
        model.initialize(0)
        strategy = Zero2(model, world, bucket_bytes=SMALL_BUCKETS)
        strategy.recorder.announce = lambda axis, name: lines.append(name)  # type: ignore[method-assign]
        strategy.step(global_batch(0, 4, tiny()), SGD(strategy.parameters, 0.1))
        first = next(iter(model.parameters()))
        assert first in strategy.flats[-1].parameters
        return [line for line in lines if line.startswith("all_gather")]

    lines = md.run(job, size=2)[0]
    assert len(lines) > 2 and lines == [
        f"all_gather bucket {index}" for index in reversed(range(len(lines)))
    ]


def test_an_update_waits_for_weights_that_nobody_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a rank would change what it is still sending."""
    waited: list[int] = []
    wait_for_all = ParameterArrivals.wait_for_all

    def watched(self: Any) -> None:
        waited.append(len(self._pending))
        wait_for_all(self)
        assert not self._pending

    monkeypatch.setattr(ParameterArrivals, "wait_for_all", watched)

    def job(world: Any) -> None:
        model = GPT(tiny())
        model.initialize(0)
        strategy = Zero1(
            model,
            world,
            loss=lambda part, divisor: (model.tokens.weight * (1.0 / divisor)).sum(),
            bucket_bytes=SMALL_BUCKETS,
        )
        for step in range(2):
            strategy.step(global_batch(step, 4, tiny()), SGD(strategy.parameters, 0.1))

    md.run(job, size=2)
    assert waited[:2] == [0, 0] and min(waited[2:]) > 2
