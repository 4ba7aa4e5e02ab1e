"""Ranks that meet seldom and lose one: what they go on with equals one process that replays the
changes."""

from typing import Any

import numpy as np
import pytest
from seldom import replay
from training import global_batch, tiny

import minidist as md
from minidist.errors import PeerLostError
from minidist.parallel.hybrid.hybrid import Plan, Trainer
from minidist.survive import kept_replica
from minidist.survive.kept_replica import KeptReplica

BOUND = 1e-10
LOST = PeerLostError("rank 9 was killed", 9)


class Never:
    """A call that a lost rank has broken off."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        raise LOST


def batch_of(step: int) -> Any:
    return global_batch(step, 7, tiny())


def train(
    world: Any,
    kept: dict[int, KeptReplica],
    processes: list[int],
    until: list[int],
    sums: list[bool] | None,
    plan: dict[str, Any],
    records: list[dict[str, Any]],
) -> np.ndarray:
    """One generation, as a rank of it; the common weights.

    Args: kept: of each process. until: how many steps each rank makes; one that makes more than
    another is alone in
          them. sums: which ranks get the sum of the last meeting, that is broken off (None: the
          last step is whole).
    """
    process = processes[world.rank]
    rank = world.rank
    trainer = Trainer(Plan(dp=world.size, **plan), tiny(), world, seed=3, lr=1e-2)
    mine = kept[process]
    strategy = trainer.strategy
    restored, _ = mine.restore(trainer)
    mine.begin(trainer, len(records))
    if rank == 0:
        records.append(
            {
                "processes": processes,
                "step": trainer.steps_done,
                **(mine.formed if restored else {}),
            }
        )
    together = min(until) - (sums is not None)
    while trainer.steps_done < together:
        trainer.step(batch_of(trainer.steps_done))
    trainer.strategy.settle()
    world.barrier()
    reduce = strategy.scheme.start_all_reduce

    def broken(index: int, bucket: Any) -> Any:
        if not any(sums or ()):
            return Never()
        pending = reduce(index, bucket)
        pending.wait()
        return pending if sums[rank] else Never()

    if min(until) < max(until) or sums is not None:
        strategy.scheme.start_all_reduce = broken
    while trainer.steps_done < until[rank]:
        if sums is None:
            strategy.scalars.start_all_gather = lambda *_, **__: Never()
        try:
            trainer.start_step(batch_of(trainer.steps_done))
        except PeerLostError:
            break
    world.barrier()
    common = strategy.common.copy()
    mine.release(trainer)
    trainer.close()
    return common


def run(
    parts: list[tuple[list[int], list[int], list[bool] | None]],
    plan: dict[str, Any],
    kept: dict[int, KeptReplica] | None = None,
) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
    """Generations one after another: (processes, until, sums); their records, and the last one's
    common weights."""
    kept = kept or {process: KeptReplica(4) for processes, _, _ in parts for process in processes}
    records: list[dict[str, Any]] = []
    for processes, until, sums in parts:
        common = md.run(train, kept, processes, until, sums, plan, records, size=len(processes))
    return records, common


PLAN = {"local_steps": 4, "outer": "nesterov"}
CASES = {
    "between two meetings": ([([0, 1, 2], [6, 6, 6], None), ([0, 2], [12, 12], None)], PLAN),
    "a rank is a step ahead": ([([0, 1, 2], [5, 5, 6], None), ([0, 2], [12, 12], None)], PLAN),
    "the sum has arrived on one": (
        [([0, 1, 2], [8, 8, 8], [False, True, True]), ([0, 2], [12, 12], None)],
        PLAN,
    ),
    "the sum has arrived on none": (
        [([0, 1, 2], [8, 8, 8], [False, False, False]), ([2, 0], [12, 12], None)],
        PLAN,
    ),
    "a new rank between two meetings": (
        [([0, 1, 2], [6, 6, 6], None), ([0, 3, 2], [12] * 3, None)],
        PLAN,
    ),
    "a new rank, and the sum on one": (
        [([0, 1, 2], [8] * 3, [False, True, True]), ([3, 0, 2], [12] * 3, None)],
        PLAN,
    ),
    "it grows after a meeting": ([([0, 1], [8, 8], None), ([0, 1, 2, 3], [12] * 4, None)], PLAN),
    "to one rank": ([([0, 1], [7, 8], None), ([1], [12], None)], PLAN),
    "again and again": (
        [
            ([0, 1, 2], [5, 6, 5], None),
            ([0, 1], [8, 8], [True, False]),
            ([1, 3], [9, 10], None),
            ([3, 1, 4], [12] * 3, None),
        ],
        PLAN,
    ),
    "streaming": (
        [([0, 1, 2], [5, 5, 5], None), ([0, 2], [12, 12], None)],
        {**PLAN, "fragments": 2, "delay": 1, "mix": 0.25},
    ),
    "streaming, the sum on one": (
        [([0, 1, 2], [6] * 3, [False, True, True]), ([0, 3, 2], [12] * 3, None)],
        {**PLAN, "fragments": 2, "mix": 0.25},
    ),
    "streaming, on none": (
        [([0, 1, 2], [6] * 3, [False] * 3), ([0, 2, 3], [12] * 3, None)],
        {**PLAN, "fragments": 2, "mix": 0.25},
    ),
}


def check(case: str, kept: dict[int, KeptReplica] | None = None) -> None:
    parts, plan = CASES[case]
    records, common = run(parts, plan, kept)
    for other in common[1:]:
        np.testing.assert_array_equal(common[0], other)
    options = {name: value for name, value in plan.items() if name not in ("local_steps", "outer")}
    one = replay(records, 12, batch_of, tiny(), every=4, **options)
    np.testing.assert_allclose(common[0], one.common, rtol=0, atol=BOUND)


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES)
def test_what_goes_on_is_the_replay_of_the_changes(case: str) -> None:
    check(case)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("bug", "case"),
    [
        ("the outer state is not handed out", "the sum has arrived on one"),
        ("the outer state is not handed out", "it grows after a meeting"),
        ("a new rank begins with zeros", "a new rank between two meetings"),
        ("a meeting is held again though it counts", "the sum has arrived on one"),
        ("a broken meeting is left out", "the sum has arrived on none"),
        ("its own steps are lost", "between two meetings"),
    ],
)
def test_planted_bugs_in_a_meeting_are_seen(
    bug: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = kept_replica._send_state
    fill = kept_replica._fill
    match bug:
        case "the outer state is not handed out":
            monkeypatch.setattr(
                kept_replica,
                "_send_state",
                lambda world, source, rank, arrays, optimizer: send(
                    world,
                    source,
                    rank,
                    arrays if "Adam" in type(optimizer).__name__ else [],
                    optimizer,
                ),
            )
        case "a new rank begins with zeros":
            monkeypatch.setattr(
                kept_replica,
                "_send_state",
                lambda world, source, rank, arrays, optimizer: send(
                    world,
                    source,
                    rank,
                    [] if "Adam" in type(optimizer).__name__ else arrays,
                    optimizer,
                ),
            )
        case "a meeting is held again though it counts":

            def forget(trainer: Any, kept: Any) -> None:
                fill(trainer, kept)
                trainer.strategy.met = 1

            monkeypatch.setattr(kept_replica, "_fill", forget)
        case "a broken meeting is left out":
            monkeypatch.setattr(kept_replica, "catch_up", lambda strategy: None)
        case "its own steps are lost":

            def drop(trainer: Any, kept: Any) -> None:
                fill(trainer, kept)
                trainer.strategy.own[...] = trainer.strategy.common

            monkeypatch.setattr(kept_replica, "_fill", drop)
    with pytest.raises(AssertionError):
        check(case)


def test_a_run_that_no_rank_has_a_state_of_begins() -> None:
    assert run([([0, 1], [0, 0], None)], PLAN)[0] == [{"processes": [0, 1], "step": 0}]


def test_a_loss_that_never_came_is_the_mean_over_the_rows_that_are_left() -> None:
    marks: list[dict[str, Any]] = [
        {"recent": [[5, 1.0, 0.5], [6, 0.9, 0.5]]},
        {"recent": [[6, 0.3, 0.25]]},
    ]
    assert kept_replica._mean_loss(marks, 6) == pytest.approx(1.2 / 0.75)
    assert kept_replica._mean_loss(marks, 5) == 2.0
    assert np.isnan(kept_replica._mean_loss(marks, 7))
