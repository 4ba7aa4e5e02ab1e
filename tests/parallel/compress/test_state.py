"""What was not sent is state: nothing of it is lost under another plan, and it comes back to the
bit under the same."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make, steps

import minidist as md
from minidist.parallel.hybrid.hybrid import Plan
from minidist.parallel.state.state_map import state_arrays, state_places

CHANGES = {"layers": 2, "width": 12, "heads": 4, "tied": True}  # parts and chunks come out uneven
SCHEME = "4bit:block=16"


def owed(trainer: Any) -> dict[str, np.ndarray]:
    """All that no rank has sent yet, of each whole tensor: added up over the kinds, once where
    ranks hold the same."""
    mine = [
        (place.key, place.name, place.shape, place.runs, np.array(array))
        for place, array in zip(
            state_places(trainer.strategy, trainer.optimizer),
            state_arrays(trainer.strategy, trainer.optimizer, changes=False),
            strict=True,
        )
        if place.kind.split(".")[0] in ("worker", "server")
    ]
    return {key: (name, shape, runs, array) for key, name, shape, runs, array in mine}


def total(ranks: list[Any]) -> dict[str, np.ndarray]:
    """The sum over ranks of `owed`, by whole tensor; numbers of one kind at one place count
    once."""
    kinds: dict[str, tuple[str, np.ndarray]] = {}
    for rank in ranks:
        for key, (name, shape, runs, array) in rank.items():
            whole = kinds.setdefault(key, (name, np.zeros(int(np.prod(shape)))))[1]
            at = 0
            for start, stop in runs:
                whole[start:stop] = array[at : at + stop - start]
                at += stop - start
    sums: dict[str, np.ndarray] = {}
    for name, whole in kinds.values():
        sums[name] = sums.get(name, 0) + whole
    return sums


def changed(
    world: Any, before: dict[str, Any], after: dict[str, Any]
) -> tuple[Any, Any, dict[str, Any]]:
    """Return what is owed before and after a change of the plan, and what the scheme counts."""
    trainer = make(world, {"compress": SCHEME, **before}, CHANGES, {})
    steps(trainer, 3)
    first = owed(trainer)
    trainer.change_plan(Plan(**{"bucket_bytes": 4096, "compress": SCHEME, **after}))
    second = owed(trainer)
    counted = dict(trainer.strategy.data_axis.scheme.counters) if after.get("zero") != 3 else {}
    steps(trainer, 1)
    trainer.check_replicas()
    trainer.close()
    return first, second, counted


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"dp": 4}, {"dp": 4}),  # other buckets, so other chunks
        ({"dp": 4}, {"dp": 2, "tp": 2, "zero": 2}),
        ({"dp": 2, "tp": 2, "sequence_parallel": True}, {"dp": 4, "zero": 1}),
        ({"dp": 4, "zero": 1, "shard": 2}, {"dp": 2, "pp": 2}),
        ({"dp": 2, "pp": 2}, {"dp": 4, "zero": 2, "shard": 2}),
    ],
    ids=lambda plan: ",".join(f"{key}={value}" for key, value in plan.items()),
)
def test_another_plan_owes_as_much(before: dict[str, Any], after: dict[str, Any]) -> None:
    ranks = md.run(changed, before, after, size=4)
    first = total([rank[0] for rank in ranks])
    second = total([rank[1] for rank in ranks])
    assert first.keys() == second.keys()
    assert any(np.abs(array).max() > 0 for array in first.values())
    for name, array in first.items():
        np.testing.assert_allclose(
            second[name], array, rtol=0, atol=1e-15 + 1e-12 * np.abs(array).max(), err_msg=name
        )
    assert ranks[0][2]["steps"] == 3


def test_a_plan_that_keeps_nothing_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    md.run(changed, {"dp": 2}, {"dp": 2, "zero": 3, "compress": "none"}, size=2)
    assert capfd.readouterr().err == (
        "minidist: what compress=4bit has not sent yet is left out: this plan keeps no residuals\n"
    )


@pytest.mark.soak  # test_another_plan_owes_as_much divides residuals
def test_fewer_ranks_go_on_from_a_checkpoint_of_more(tmp_path: Path) -> None:
    def save(world: Any) -> Any:
        trainer = make(world, {"dp": 3, "compress": SCHEME}, CHANGES, {})
        steps(trainer, 2)
        trainer.save(tmp_path / "saved")
        kept = owed(trainer)
        trainer.close()
        return kept

    def load(world: Any) -> Any:
        trainer = make(world, {"dp": 2, "zero": 1, "compress": SCHEME}, CHANGES, {"seed": 9})
        trainer.load(tmp_path / "saved")
        kept = owed(trainer)
        trainer.close()
        return kept

    first, second = (total(md.run(job, size=size)) for job, size in ((save, 3), (load, 2)))
    for name, array in first.items():
        np.testing.assert_allclose(
            second[name], array, rtol=0, atol=1e-15 + 1e-12 * np.abs(array).max(), err_msg=name
        )
