"""Streaming DiLoCo: which fragment travels when, what is mixed in, and that no rank waits for what
is on its way."""

import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from local_steps import new_model, reference, vector_of
from planted import Bug, check_caught
from training import global_batch, tiny, train

import minidist as md
from minidist.comm.limits import STRETCH_BYTES
from minidist.errors import ConfigError
from minidist.nn import GPTConfig
from minidist.optim import AdamW
from minidist.parallel.compress import streaming
from minidist.parallel.compress.local_steps import LocalSteps
from minidist.parallel.compress.streaming import StreamingLocalSteps, fragment_sent
from minidist.parallel.hybrid.hybrid import Plan, Trainer

BOUND = 1e-10
CASES = [
    {"every": 6, "fragments": 3},
    {"every": 6, "fragments": 3, "delay": 1, "mix": 0.5},
    {"every": 4, "fragments": 2, "delay": 3, "mix": 0.25},
    {"every": 3, "fragments": 3, "delay": 2, "mix": 0.9},
    {"every": 4, "fragments": 1, "delay": 2},
    {"every": 4, "fragments": 4, "mix": 0.5},
]


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize(("size", "case"), [*zip((2, 3, 5, 2, 3, 5), CASES, strict=True)])
def test_equals_its_formula(size: int, case: dict[str, Any]) -> None:
    check(size, case, steps=case["every"] * 5 // 2)


def check(size: int, case: dict[str, Any], *, steps: int) -> None:
    """The common weights, each rank's own, and the losses; the same bits on all ranks and in a
    second run."""
    one = reference(size, steps=steps, sequences=9, **case)

    def rank(world: Any) -> tuple[np.ndarray, np.ndarray, list[float]]:
        plan = Plan(
            dp=size,
            local_steps=case["every"],
            **{name: case[name] for name in case if name != "every"},
        )
        trainer = Trainer(plan, tiny(), world, seed=3, lr=1e-2, clip=0.5)
        losses = [trainer.step(global_batch(step, 9, tiny())) for step in range(steps)]
        own = vector_of(trainer.model)
        common = trainer.state_dict()
        trainer.close()
        return (
            np.concatenate(
                [np.ravel(common[name]) for name, _ in trainer.model.named_parameters()]
            ),
            own,
            losses,
        )

    ranks = md.run(rank, size=size)
    for (common, own, losses), expected in zip(ranks, one["own"], strict=True):
        np.testing.assert_allclose(common, one["common"], rtol=0, atol=BOUND)
        np.testing.assert_allclose(own, expected, rtol=0, atol=BOUND)
        np.testing.assert_allclose(losses, one["losses"], rtol=1e-12)
        assert np.array_equal(common, ranks[0][0])
        assert losses == ranks[0][2]
    assert np.array_equal(md.run(rank, size=size)[0][0], ranks[0][0])


@st.composite
def periods(draw: st.DrawFn) -> dict[str, Any]:
    """H, F, τ and α."""
    fragments = draw(st.integers(1, 5))
    each = draw(st.integers(1, 3))
    return {
        "every": fragments * each,
        "fragments": fragments,
        "delay": draw(st.integers(0, fragments * each - 1)),
        "mix": draw(st.sampled_from([0.0, 0.3, 0.75])),
    }


any_period = given(size=st.integers(1, 6), case=periods(), steps=st.integers(1, 20))


@pytest.mark.soak
@settings(max_examples=3)
@any_period
def test_any_period(size: int, case: dict[str, Any], steps: int) -> None:
    check(size, case, steps=steps)


@pytest.mark.soak
@settings(max_examples=150)
@any_period
def test_very_many_periods(size: int, case: dict[str, Any], steps: int) -> None:
    check(size, case, steps=steps)


def fragments_change_places(right: Any, step: int, every: int, fragments: int) -> int | None:
    """The last fragment is sent first."""
    sent = right(step, every, fragments)
    return None if sent is None else fragments - 1 - sent


BUGS = [
    Bug(
        "mixed the other way round",
        StreamingLocalSteps,
        "_merge",
        lambda right, self, fragment, mix: right(self, fragment, 1 - mix),
    ),
    Bug(
        "mixed in a step late",
        StreamingLocalSteps,
        "__init__",
        lambda right, self, *args, delay, **options: right(self, *args, delay=delay + 1, **options),
    ),
    Bug("fragments change places", streaming, "fragment_sent", fragments_change_places),
]


@pytest.mark.sampled
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bugs_are_seen(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    case = {"every": 6, "fragments": 3, "delay": 1, "mix": 0.25}
    check_caught(bug, partial(check, 2, case, steps=9), monkeypatch)


@pytest.mark.parametrize(
    ("every", "fragments"), [(1, 1), (6, 1), (6, 2), (6, 3), (6, 6), (25, 5), (100, 4)]
)
def test_which_fragment_is_sent(every: int, fragments: int) -> None:
    """Fragment f after steps H·k + (f+1)·H/F, and no other."""
    expected = {
        every * k + (f + 1) * every // fragments: f for k in range(4) for f in range(fragments)
    }
    found = {step: fragment_sent(step, every, fragments) for step in range(-every, 4 * every + 1)}
    assert {step: fragment for step, fragment in found.items() if fragment is not None} == expected


@pytest.mark.parametrize("case", CASES)
def test_how_often_each_is_sent(case: dict[str, Any]) -> None:
    def rank(world: Any) -> None:
        strategy = StreamingLocalSteps(new_model(), world, **case)
        for first in range(9):
            for last in range(first, 20):
                turns = [
                    fragment_sent(step, case["every"], case["fragments"])
                    for step in range(first + 1, last + 1)
                ]
                assert strategy.sends(first, last) == [
                    turns.count(number) for number in range(case["fragments"])
                ]

    md.run(rank, size=1)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_bytes_are_the_formula(size: int) -> None:
    """Of 5 and 4 fragments of three: 1,856 weights do not divide; the sum over the ranks is exact
    all the same."""
    ranks = md.run(
        lambda world: train(world, steps=9, sequences=8, local_steps=6, fragments=3, delay=1),
        size=size,
    )
    edges = np.cumsum([0, *(len(part) for part in np.array_split(vector_of(new_model()), 3))])
    sizes = np.diff(edges)
    # after steps 2, 4, 6, 8
    expected = 2 * (size - 1) * 8 * int(2 * sizes[0] + sizes[1] + sizes[2])
    assert sum(rank["sent"]["dp"]["all_reduce"] for rank in ranks) == expected


def test_one_fragment_without_delay_is_diloco() -> None:
    def rank(world: Any, kind: type[LocalSteps]) -> bytes:
        strategy = kind(new_model(), world, every=2)
        optimizer = AdamW(strategy.parameters, 1e-2)
        for step in range(4):
            strategy.step(global_batch(step, 5, tiny()), optimizer)
        return strategy.common.tobytes()

    assert md.run(lambda world: rank(world, StreamingLocalSteps), size=2) == md.run(
        lambda world: rank(world, LocalSteps), size=2
    )


def test_no_rank_waits_for_a_fragment_on_its_way() -> None:
    """Rank 1 begins when rank 0 has sent its first fragment and made a step more; the third step
    needs the sum."""
    ahead = threading.Event()

    def rank(world: Any) -> None:
        trainer = Trainer(Plan(dp=2, local_steps=4, fragments=2, delay=1), tiny(), world, seed=3)
        assert world.rank == 0 or ahead.wait(20)
        trainer.start_step(global_batch(0, 4, tiny()))
        trainer.start_step(global_batch(1, 4, tiny()))  # sends fragment 0
        strategy: Any = trainer.strategy
        pending = strategy.fragments[0].pending
        assert pending is not None and (world.rank == 1 or not pending.done())
        ahead.set()
        late = trainer.start_step(global_batch(2, 4, tiny()))  # mixes it in
        assert strategy.fragments[0].pending is None
        late.wait()

    md.run(rank, size=2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"every": 4, "fragments": 3}, "choose steps that fragments divides, as 1 × 3"),
        ({"every": 4, "delay": 4}, "choose 0 to 3"),
        ({"every": 4, "mix": 1.0}, "choose 0 to less than 1"),
    ],
)
def test_refuses(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        md.run(lambda world: StreamingLocalSteps(new_model(), world, **options), size=1)


@pytest.mark.parametrize(
    ("fragments", "messages"),
    [
        pytest.param(1, 4, marks=pytest.mark.soak),
        (2, 4),
        pytest.param(4, 8, marks=pytest.mark.soak),
    ],
)
def test_messages_of_a_large_fragment(fragments: int, messages: int) -> None:
    """6.2 MiB of weights on two ranks: 2(P-1) messages of a rank for every 4 MiB of every
    fragment."""
    config = GPTConfig(vocabulary=64, context=16, layers=2, heads=4, width=256)

    def rank(world: Any) -> tuple[int, list[int]]:
        trainer = Trainer(
            Plan(dp=2, local_steps=4, fragments=fragments, algorithm="ring"), config, world, seed=3
        )
        for step in range(4):
            trainer.step(global_batch(step, 2, config))
        nbytes = sum(parameter.data.nbytes for parameter in trainer.model.parameters())
        trainer.close()
        return nbytes, [
            row["messages"]
            for row in world.ledger.rows()
            if row["axis"] == "dp" and row["verb"] == "all_reduce"
        ]

    (nbytes, sent), _ = md.run(rank, size=2)
    stretches = fragments * -(-nbytes // fragments // STRETCH_BYTES)
    assert sent == [2 * stretches] == [messages]
