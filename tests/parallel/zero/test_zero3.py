"""ZeRO-3: equal to one process, 3AΨ of traffic, and never more weights than the shard, two units
and the root."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import Bug, check_caught
from training import CHOICES, Chooser, difference, global_batch, tiny
from zero import BOUND, check_equal, sent_for_training, train

import minidist as md
from minidist.device import account
from minidist.errors import ConfigError, GradientError, MismatchError
from minidist.nn import GPT
from minidist.optim import AdamW
from minidist.parallel.step.recorder import Silent
from minidist.parallel.step.single import Single
from minidist.parallel.zero.fsdp_units import Unit
from minidist.parallel.zero.gradient_shards import GradientShards
from minidist.parallel.zero.zero3 import Zero3

# --------------------------------------------------------------------------- parallel equals serial
# tests/parallel/test_parity.py has whole trainings on fixed sizes, over every transport


any_job = given(
    size=st.integers(1, 5),
    accumulate=st.integers(1, 3),
    strategy=st.fixed_dictionaries(
        {"ahead": st.integers(0, 3), "free_after_forward": st.booleans()}
    ),
    options=st.fixed_dictionaries(
        {
            "sequences": st.integers(1, 9),
            "optimizer": st.sampled_from(["adamw", "adam", "sgd"]),
            "clip": st.sampled_from([None, 0.1]),
            "frozen": st.sampled_from(
                [(), ("tokens.weight", "blocks.0.mlp.up.bias"), ("norm.weight", "norm.bias")]
            ),
            "changes": st.fixed_dictionaries(
                {"tied": st.booleans(), "layers": st.sampled_from([1, 3])}
            ),
        }
    ),
)


@settings(max_examples=3)
@any_job
def test_any_job(
    size: int, accumulate: int, strategy: dict[str, Any], options: dict[str, Any]
) -> None:
    """Uneven parts and shards, ranks without a row, accumulation, prefetch, a weight used twice,
    frozen weights."""
    check_equal(
        3,
        size,
        steps=2,
        step_options={"accumulate": accumulate},
        strategy_options=strategy,
        **options,
    )


@pytest.mark.soak
@settings(max_examples=200)
@any_job
def test_very_many_jobs(
    size: int, accumulate: int, strategy: dict[str, Any], options: dict[str, Any]
) -> None:
    """The same, more often."""
    check_equal(
        3,
        size,
        steps=2,
        step_options={"accumulate": accumulate},
        strategy_options=strategy,
        **options,
    )


def test_ranks_that_use_different_parameters() -> None:
    def choose(world: Any) -> dict[str, np.ndarray]:
        model = Chooser()
        strategy: Any = Single(model) if world.size == 1 else Zero3(model, world)
        optimizer = AdamW(strategy.parameters, 0.1)
        for batch in CHOICES:
            strategy.step((batch, batch), optimizer)
        return model.state_dict() if world.size == 1 else strategy.state_dict()

    serial = md.run(choose, size=1)[0]
    for weights in md.run(choose, size=3):
        assert difference(weights, serial) < BOUND


BUGS = [
    Bug(
        "forgets to add",
        GradientShards,
        "take_sum",
        lambda right, self: (right(self), self.forget())[0],
    ),
    Bug(
        "stale weights",
        Unit,
        "free",
        lambda right, self: None if self._whole and self.calls == 0 else right(self),
    ),
    Bug(
        "skips a unit",
        Zero3,
        "_reduce",
        lambda right, self, unit: unit.name == "norm" or right(self, unit),
    ),
]


@pytest.mark.sampled
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bugs_break_parity(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    check = partial(check_equal, 3, 3, optimizer="sgd", clip=None, step_options={"accumulate": 2})
    check_caught(bug, check, monkeypatch)


# ------------------------------------------------------------------------------------ what it costs


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("size", "accumulate", "tied", "free"),
    [
        (2, 1, False, True),
        (3, 2, False, True),
        (5, 1, True, True),
        (3, 3, True, True),
        (3, 2, False, False),
        (2, 2, True, False),
    ],
)
def test_bytes_are_the_formula(size: int, accumulate: int, tied: bool, free: bool) -> None:
    """3A(Ψ-R) + (1+A)R, or 2A(Ψ-R) + (1+A)R, from the first step to the last, with ranks without a
    row."""
    steps = 2
    ranks = md.run(
        lambda world: train(
            world,
            3,
            {"tied": tied},
            steps=steps,
            sequences=4,
            free_after_forward=free,
            step_options={"accumulate": accumulate},
        ),
        size=size,
    )
    root = ranks[0]["weights"]["tokens.weight"].nbytes if tied else 0
    units = ranks[0]["nbytes"] - root
    parts = 5 if tied else 6  # tokens, positions, two blocks, norm, head
    gathers = (2 if free else 1) * accumulate
    each = steps * (size - 1)
    assert sent_for_training(ranks) == {
        "all_gather": each * (gathers * units + root),
        "reduce_scatter": each * accumulate * (units + root),
    }
    for rank in ranks:
        sent = rank["sent"]["world"]
        for verb, nbytes in sent_for_training(ranks).items():
            assert abs(sent[verb] - nbytes / size) <= steps * 3 * accumulate * parts * 2 * 8
        assert sum(rank["sent"]["control"].values()) == steps * 2 * 8 * (size - 1)


@pytest.mark.sampled
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_bytes_a_parameter(size: int, tied: bool) -> None:
    """float32, Adam: (4 + 4 + 8)/P, and at the peak two units beside it, and a tied weight as the
    root."""
    changes = {"dtype": "float32", "width": 32, "vocabulary": 50, "layers": 4, "tied": tied}
    for rank in md.run(lambda world: train(world, 3, changes, optimizer="adam"), size=size):
        nbytes = rank["nbytes"]
        memory = rank["memory"]
        unit = sum(
            array.nbytes for name, array in rank["weights"].items() if name.startswith("blocks.0")
        )
        root = rank["weights"]["tokens.weight"].nbytes if tied else 0
        assert nbytes > 4 * unit
        for category, times in (("parameters", 1), ("gradients", 1), ("optimizer", 2)):
            assert memory[category]["now"] == pytest.approx(
                times * nbytes / size, rel=0.01, abs=200
            )
        for category in ("parameters", "gradients"):
            expected = nbytes / size + 2 * unit + root
            assert memory[category]["peak"] <= 1.01 * expected + 200
        assert memory["parameters"]["peak"] >= nbytes / size + unit


@pytest.mark.sampled
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_ahead_limits_what_is_in_flight(ahead: int) -> None:
    changes = {"layers": 6, "width": 32}
    for rank in md.run(lambda world: train(world, 3, changes, ahead=ahead), size=2):
        unit = sum(
            array.nbytes for name, array in rank["weights"].items() if name.startswith("blocks.0")
        )
        peak = rank["memory"]["parameters"]["peak"] - rank["nbytes"] / 2
        assert ahead * unit + 0.9 * unit < peak <= (1 + ahead) * unit + 500


def test_a_unit_that_is_not_freed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    free = Unit.free
    monkeypatch.setattr(
        Unit, "free", lambda self: None if self.name == "blocks.1" and self._whole else free(self)
    )
    with pytest.raises(AssertionError):
        test_bytes_a_parameter(2, False)


def test_a_rank_draws_its_shard_alone() -> None:
    """The same weights as drawn whole, and never more than the shard and a block of the
    generator's."""
    config = tiny(width=32, layers=4)

    def job(world: Any) -> tuple[dict[str, np.ndarray], int, int]:
        memory = account.current()
        memory.reset_peak()
        strategy = Zero3(GPT(config), world, seed=5)
        return (
            strategy.state_dict(),
            memory.peak["parameters"],
            sum(p.data.nbytes for p in strategy.parameters),
        )

    whole = GPT(config)
    whole.initialize(5)
    for weights, _, shard in md.run(job, size=4):
        assert difference(weights, whole.state_dict()) == 0
        assert shard == pytest.approx(sum(array.nbytes for array in weights.values()) / 4, rel=0.01)


# -------------------------------------------------------------------------------------------- order


class Notebook(Silent):
    """A recorder that remembers which collectives were started."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def announce(self, axis: str, name: str) -> None:
        self.lines.append(name)


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_next_unit_is_on_its_way_while_one_computes(ahead: int) -> None:
    def job(world: Any) -> list[str]:
        model = GPT(tiny(layers=3))
        book = Notebook()
        model.initialize(0)
        strategy = Zero3(model, world, ahead=ahead, recorder=book)
        for block in model.blocks:
            block.register_forward_pre_hook(
                lambda module, args: book.lines.append(f"forward {module.path}")
            )
            block.register_backward_pre_hook(
                lambda module: book.lines.append(f"backward {module.path}")
            )
        optimizer = AdamW(strategy.parameters, 0.1)
        for step in range(2):
            book.lines.clear()
            strategy.step(global_batch(step, 4, tiny()), optimizer)
        return book.lines

    for lines in md.run(job, size=2):
        gathers = [index for index, line in enumerate(lines) if line == "all_gather blocks.1"]
        assert len(gathers) == 2 and lines.count("all_gather head") == 2
        assert (gathers[0] < lines.index("forward blocks.0")) == (ahead == 1)
        assert (gathers[1] < lines.index("backward blocks.2")) == (ahead == 1)
        reduced = [line for line in lines if line.startswith("reduce_scatter")]
        assert len(reduced) == len(set(reduced)) == 7


def test_small_units_come_early_where_there_is_room() -> None:
    """A block and what lies before and after it are less than two blocks: all may be on their way
    at once."""

    def job(world: Any) -> list[str]:
        model = GPT(tiny(layers=3))
        book = Notebook()
        model.initialize(0)
        strategy = Zero3(model, world, recorder=book)
        model.tokens.register_forward_pre_hook(
            lambda module, args: book.lines.append("forward tokens")
        )
        model.head.register_backward_pre_hook(lambda module: book.lines.append("backward head"))
        for step in range(2):
            book.lines.clear()
            strategy.step(global_batch(step, 4, tiny()), AdamW(strategy.parameters, 0.1))
        return book.lines

    for lines in md.run(job, size=2):
        at = lines.index("forward tokens")
        assert lines[:at] == [f"all_gather {name}" for name in ("tokens", "positions", "blocks.0")]
        at = lines.index("backward head")
        assert lines[at - 3 : at] == [f"all_gather {name}" for name in ("head", "norm", "blocks.2")]


# ----------------------------------------------------------------------------------------- mistakes


def test_mistakes_are_refused() -> None:
    def job(world: Any) -> None:
        model = GPT(tiny())
        model.initialize(world.rank)
        with pytest.raises(MismatchError, match=r"ranks \[1\] differ"):
            Zero3(model, world)
        model.initialize(0)
        with pytest.raises(ConfigError, match="ahead=-1"):
            Zero3(model, world, ahead=-1)
        with pytest.raises(ConfigError, match="belongs to two units"):
            Zero3(model, world, units=[model.blocks[0], model.blocks[0].mlp])
        with pytest.raises(ConfigError, match="no part of the model"):
            Zero3(model, world, units=[GPT(tiny())])
        tied = GPT(tiny(tied=True))
        tied.initialize(0)
        strategy = Zero3(tied, world)  # its children: the tied embedding among them
        with pytest.raises(GradientError, match="tied"):
            strategy.step(global_batch(0, 2, tiny()), AdamW(strategy.parameters, 0.1))

    md.run(job, size=2)
