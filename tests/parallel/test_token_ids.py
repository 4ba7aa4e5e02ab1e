"""Token ids as users bring them: of any integer dtype, and refused alike on every plan."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from helpers import run
from training import difference, global_batch, tiny

from minidist.errors import DtypeError, ShapeError
from minidist.nn import MixtureConfig
from minidist.parallel.hybrid.hybrid import Plan, Trainer

PLANS: dict[str, dict[str, Any]] = {
    "ZeRO-3": {"dp": 2, "zero": 3},
    "pipeline": {"pp": 2},
    "ring": {"cp": 2},
    "all-to-all": {"cp": 2, "attention": "all-to-all"},
    "experts": {"ep": 2},
    "tensor": {"tp": 2},
    "uneven tensor": {"tp": 3},
    "sequence": {"tp": 2, "sequence_parallel": True},
    "pipeline × tensor": {"pp": 2, "tp": 2},
}
DTYPES = [f"{order}{kind}{size}" for size in (1, 2, 4, 8) for kind in "iu" for order in "<>"]
SMALL = ("<u1", "<i1", ">u2")
VOCABULARY = 300  # more than a byte counts
ALL_IN_RANGE = 128  # an id that an int8 holds


def train(world: Any, plan: dict[str, Any], batch: Any) -> dict[str, Any]:
    """One step, the evaluation of its batch, and the weights; with experts if the plan has them."""
    mixture = MixtureConfig(experts=2, top_k=1) if "ep" in plan else None
    config = tiny(vocabulary=VOCABULARY, heads=3, width=12, mixture=mixture)
    trainer = Trainer(Plan(**plan), config, world, optimizer="sgd", lr=0.1, seed=1)
    result = {
        "loss": trainer.step(batch),
        "evaluation": trainer.evaluate([batch]),
        "weights": trainer.state_dict(),
    }
    trainer.close()
    return result


def batch_of(largest: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of ids up to `largest`, some of which need all bits of their dtype."""
    return global_batch(0, 4, tiny(vocabulary=largest))


@cache
def serial(largest: int, experts: bool) -> dict[str, Any]:
    """One process, with ids of NumPy's own integers."""
    (result,) = run(train, {"ep": 1} if experts else {}, batch_of(largest), size=1)
    return result


def every_dtype() -> Iterator[Any]:
    """Yield each plan with each dtype. The default run takes small dtypes, in which ids overflow,
    on every plan, and each other dtype on some."""
    for number, (name, plan) in enumerate(PLANS.items()):
        for place, dtype in enumerate(DTYPES):
            usual = dtype in SMALL or place % len(PLANS) == number
            marks = () if usual else pytest.mark.soak
            yield pytest.param(plan, dtype, marks=marks, id=f"{name}-{dtype}")


@pytest.mark.parametrize("plan,dtype", list(every_dtype()))
def test_every_integer_dtype_means_the_same_numbers(plan: dict[str, Any], dtype: str) -> None:
    holds_all = np.iinfo(dtype).max >= VOCABULARY
    for largest in (ALL_IN_RANGE, VOCABULARY) if holds_all else (ALL_IN_RANGE,):
        alone = serial(largest, "ep" in plan)
        inputs, targets = batch_of(largest)
        batch = inputs.astype(dtype), targets.astype(dtype)
        for ours in run(train, plan, batch, size=Plan(**plan).size):
            assert abs(ours["loss"] - alone["loss"]) < 1e-12
            assert abs(ours["evaluation"] - alone["evaluation"]) < 1e-12
            assert difference(ours["weights"], alone["weights"]) < 1e-12


WRONG = {
    "above the vocabulary": (VOCABULARY, "int64", ShapeError),
    "far above it": (5000, "uint16", ShapeError),
    "negative": (-1, "int8", ShapeError),
    "bool": (1, "bool", DtypeError),
    "float": (1, "float64", DtypeError),
}


@pytest.mark.sampled
@pytest.mark.parametrize("where", ["inputs", "targets"])
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("plan", [{}, *PLANS.values()], ids=["one process", *PLANS])
def test_what_is_no_id_of_the_vocabulary_is_refused(
    plan: dict[str, Any], wrong: Any, where: str
) -> None:
    """With the error of one process, also on a plan in which only some ranks look at the id."""
    value, dtype, error = wrong
    inputs, targets = batch_of(100)
    bad = (inputs if where == "inputs" else targets).astype(dtype)
    bad[-1, -1] = value
    batch = (bad, targets) if where == "inputs" else (inputs, bad)
    with pytest.raises(
        error, match="outside the vocabulary|a table of 300 rows|integers, not|as integers"
    ):
        run(train, plan, batch, size=Plan(**plan).size)
