"""PipeDream: equal to one process that uses weights as late as the stages recorded; late and hungry
by the formula."""

from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from pipelines import replay_updates
from planted import Bug, check_caught
from training import difference, global_batch, tiny

import minidist as md
from minidist.device import account
from minidist.errors import PlanError
from minidist.nn import GPT
from minidist.optim import AdamW
from minidist.parallel.pipeline import pipedream
from minidist.parallel.pipeline.pipedream import PipeDream
from minidist.parallel.pipeline.schedules import make_schedule
from minidist.parallel.step.step import Part, micro_parts

BOUND = 1e-10
STEPS = 2
SEQUENCES = 9
CONFIG = {"layers": 4}


def run_stages(world: Any, microbatches: int, name: str = "1f1b") -> dict[str, Any]:
    """Return what a rank holds and recorded after some steps."""
    config = tiny(**CONFIG)
    strategy = PipeDream(GPT(config), world, make_schedule(name, world.size, microbatches), seed=3)
    optimizer = AdamW(strategy.parameters, 1e-2)
    losses = []
    updates = []
    names = sorted(strategy.model.state_dict())
    memory = account.current()
    memory.reset_peak()
    for step in range(STEPS):
        losses.append(strategy.step(global_batch(step, SEQUENCES, config), optimizer))
        updates.append([list(update) for update in strategy.updates])
    held = memory.peak["parameters"], memory.now["parameters"]
    return {
        "weights": strategy.state_dict(),
        "losses": losses,
        "updates": updates,
        "names": names,
        "held": list(held),
        "own": sum(weight.data.nbytes for weight in strategy.weights),
    }


def replay(ranks: list[dict[str, Any]], microbatches: int) -> dict[str, Any]:
    """One process: each microbatch forward and backward with every stage's weights as late as its
    rank recorded."""
    config = tiny(**CONFIG)
    batches = [global_batch(step, SEQUENCES, config) for step in range(STEPS)]
    return replay_updates(
        config,
        ranks,
        [
            [
                (part.inputs, part.targets)
                for part in micro_parts(Part(*batch, first=0), microbatches)
            ]
            for batch in batches
        ],
    )


@pytest.mark.sampled
@pytest.mark.parametrize("microbatches", [1, 3, 11])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_equals_the_replay(size: int, microbatches: int) -> None:
    check_replay(size, microbatches)


def check_replay(size: int, microbatches: int) -> None:
    """The stages have the weights and losses of the replay."""
    ranks = md.run(run_stages, microbatches, size=size)
    again = replay(ranks, microbatches)
    assert difference(ranks[0]["weights"], again["weights"]) < BOUND
    np.testing.assert_allclose(ranks[-1]["losses"], again["losses"], rtol=1e-12)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    "transport",
    [
        "threads-unbuffered",
        "tcp",
        pytest.param("shm", marks=pytest.mark.soak),
        pytest.param("mpi", marks=pytest.mark.soak),
    ],
)
def test_the_same_bits_on_every_transport(transport: str) -> None:
    here, there = (md.run(run_stages, 7, size=3, transport=way) for way in ("threads", transport))
    assert here[0]["losses"] == there[0]["losses"] and here[0]["updates"] == there[0]["updates"]
    for name, array in here[0]["weights"].items():
        np.testing.assert_array_equal(array, there[2]["weights"][name])


@cache
def four_stages() -> list[dict[str, Any]]:
    """Return what four stages hold after steps of nine microbatches."""
    return md.run(run_stages, 9, size=4)


def test_weights_are_as_late_as_there_are_stages_ahead() -> None:
    """Version max(0, b - (p - 1 - stage)); on the last stage always the newest: and naive is never
    late."""
    for rank, result in enumerate(four_stages()):
        assert result["updates"][0] == [[b, max(0, b - (3 - rank))] for b in range(9)]
    for result in md.run(run_stages, 4, "naive", size=3):
        assert result["updates"][1] == [[b, b] for b in range(4)]


def test_copies_of_the_weights() -> None:
    """At the peak a stage has p - 1 - stage copies beside the newest, at the end none."""
    for rank, result in enumerate(four_stages()):
        assert result["held"] == [(4 - rank) * result["own"], result["own"]]


def not_updated(right: Any, self: Any, microbatch: int, met: int) -> None:
    """An update counts, and leaves the weights as they were."""
    self.updates.append((microbatch, met))
    self.version += 1
    for weight in self.weights:
        weight.zero_grad()


BUGS = [
    Bug(
        "no stash",
        pipedream.StashingPass,
        "_put",
        lambda right, self, arrays: right(self, [weight.data for weight in self.weights]),
    ),
    Bug("forward with old weights", pipedream.StashingPass, "_update", not_updated),
]


@pytest.mark.sampled
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bugs_break_the_replay(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    check_caught(bug, partial(check_replay, 3, 7), monkeypatch)


def test_what_it_cannot_do() -> None:
    def job(world: Any, name: str, tied: bool, **options: Any) -> None:
        config = tiny(layers=4, tied=tied)
        strategy = PipeDream(GPT(config), world, make_schedule(name, world.size, 4), seed=0)
        strategy.step(global_batch(0, 4, config), AdamW(strategy.parameters, 0.1), **options)

    for name, tied, options, says in (
        ("1f1b", True, {}, "tied=False"),
        ("interleaved", False, {}, "choose 1f1b"),
        ("zb-h1", False, {}, "choose 1f1b"),
        ("1f1b", False, {"clip": 1.0}, "clip=1.0"),
        ("1f1b", False, {"accumulate": 2}, "accumulate=2"),
    ):
        with pytest.raises(PlanError, match=says):
            md.run(
                lambda world, name=name, tied=tied, options=options: job(
                    world, name, tied, **options
                ),
                size=2,
            )
