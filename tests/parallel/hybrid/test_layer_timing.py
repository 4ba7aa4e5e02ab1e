"""Layers of stages by measured time: the same on all ranks, and the measuring leaves nothing
behind."""

from typing import Any

import pytest
from helpers import becomes_unhurried
from training import tiny

import minidist as md
from minidist.comm.group import Group
from minidist.device import account
from minidist.nn import GPTConfig, MixtureConfig
from minidist.parallel.hybrid import layer_timing as chapter
from minidist.parallel.hybrid.layer_timing import measured_costs, stage_layers


def test_layers_by_measured_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output takes as long as three blocks: a stage of its own."""
    monkeypatch.setattr(chapter, "measured_costs", lambda config, group, device: (1.0, 0.0, 3.0))
    for how, expected in (("even", [2, 2, 2]), ("measured", [3, 3, 0]), ("1,4,1", [1, 4, 1])):
        assert md.run(
            lambda world, how=how: stage_layers(how, tiny(layers=6), 3, world), size=1
        ) == [expected]


def test_measuring_leaves_nothing_behind() -> None:
    """Neither in the account, whose limit it may pass, nor noise that a mixture of experts would
    want a key for."""

    def job(world: Any) -> int:
        with account.use(account.MemoryAccount(limit=100)) as memory:
            layers = stage_layers(
                "measured", tiny(mixture=MixtureConfig(experts=2, noise=0.5)), 2, world
            )
            assert sum(layers) == tiny().layers
        return memory.peak["total"]

    assert md.run(job, size=2) == [0, 0]


def test_measured_costs_are_rank_0s() -> None:
    first, *others = md.run(lambda world: measured_costs(tiny(), world, rounds=1), size=3)
    assert all(seconds > 0 for seconds in first) and others == [first, first]


def test_the_other_ranks_wait_as_long_as_rank_0_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = list[bool]()
    transports = dict[int, Any]()

    def patient(config: GPTConfig, device: str) -> list[float]:
        waited.append(becomes_unhurried(transports[1]))
        return [1.0, 2.0, 3.0]

    def body(world: Group) -> tuple[float, float, float]:
        transports[world.rank] = world.transport
        world.barrier()
        return measured_costs(tiny(), world, rounds=1)

    monkeypatch.setattr(chapter, "_time_parts", patient)
    assert md.run(body, size=2) == [(1.0, 2.0, 3.0)] * 2 and waited == [True]
