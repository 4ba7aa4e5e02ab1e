"""Asynchronous servers and workers after a loss: what each goes on with, against the replay of the
servers' records."""

from typing import Any

import numpy as np
import pytest
from training import global_batch, tiny

import minidist as md
from minidist.nn import GPT
from minidist.optim import AdamW
from minidist.parallel.data.bounded_staleness import ShardState, Update
from minidist.parallel.data.replay_updates import replay
from minidist.parallel.hybrid.hybrid import Plan, Trainer
from minidist.survive import kept_shards
from minidist.survive.kept_shards import KeptShards

PLAN = {"strategy": "parameter-server", "asynchronous": True, "staleness": None}
ROUNDS = {**PLAN, "local_steps": 3, "outer": "nesterov"}


def batch_of(step: int) -> Any:
    return global_batch(step, 6, tiny())


def state(strategy: Any, optimizer: Any) -> dict[str, Any]:
    """Copies of a rank's keys, its optimizer's state and its place."""
    return {
        "weights": [vector.copy() for shard in strategy.shards for vector in shard.weights],
        "state": [array.copy() for slot in optimizer.slots for array in slot.state.values()],
        "counts": [slot.steps for slot in optimizer.slots],
        "pushes": strategy.pushes,
        "versions": [*strategy.versions],
        "made": getattr(strategy, "made", None),
        "service": strategy.service and strategy.service.version,
    }


def train(
    world: Any,
    kept: dict[int, KeptShards],
    processes: list[int],
    until: list[int],
    plan: dict[str, Any],
    found: list[dict[str, Any]],
) -> dict[str, Any]:
    """One generation, as a rank of it. Args: kept: of each process; until: the step that each
    worker pauses after; or all have made all. Returns: the state that it began with, and that at
    its end."""
    trainer = Trainer(Plan(dp=world.size, **plan), tiny(), world, seed=3, lr=1e-2, clip=None)
    mine = kept[processes[world.rank]]
    strategy = trainer.strategy
    restored, _ = mine.restore(trainer)
    optimizer = strategy.outer if "local_steps" in plan and strategy.serves else trainer.optimizer
    before = state(strategy, optimizer)
    mine.begin(trainer, len(found))
    if strategy.serves:
        trainer.step(batch_of(0))
        assert strategy.paused == (until[0] < 12)
    else:
        while trainer.steps_done < until[world.rank]:
            trainer.step(batch_of(trainer.steps_done))
        if until[world.rank] < 12:
            mine.leave(trainer)
        else:
            strategy.finish()
    after = state(strategy, optimizer) | {
        "record": [*strategy.record],
        "copies": {**strategy.copies},
    }
    if restored and world.rank == 0:
        found.append(mine.formed)
    mine.release(trainer)
    trainer.close()
    return {"before": before, "after": after}


def run(
    parts: list[tuple[list[int], list[int]]], plan: dict[str, Any], every: int = 5
) -> tuple[list[Any], list[Any]]:
    """Generations one after another, (processes, until); what each rank of each had, and what they
    agreed on."""
    kept = {process: KeptShards(every) for processes, _ in parts for process in processes}
    found: list[dict[str, Any]] = []
    return [
        md.run(train, kept, processes, until, plan, found, size=len(processes))
        for processes, until in parts
    ], found


def replayed(record: list[Update], start: ShardState | None, workers: int) -> np.ndarray:
    """The weights that a server ends with, whose record this is, and which began as `start`."""
    model = GPT(tiny())
    optimizers = list[Any]()
    model.initialize(3)

    def optimizer(pieces: Any) -> Any:
        made = AdamW(pieces, 1e-2)
        if start is not None:
            arrays = [array for slot in made.slots for array in slot.state.values()]
            for array, had in zip(arrays, start.state, strict=True):
                array[...] = had
            for slot, count in zip(made.slots, start.counts, strict=True):
                slot.steps = count
        optimizers.append(made)
        return made

    if start is not None:
        at = 0
        for p in model.parameters():
            p.data[...] = start.weights[0][at : at + p.size].reshape(p.shape)
            at += p.size
        record = [
            update._replace(versions=(update.versions[0] - start.version,)) for update in record
        ]
    replay(model, [record], batch_of, optimizer, workers=workers)
    return np.concatenate([np.ravel(p.data) for p in model.parameters()])


def test_workers_come_and_go_and_the_record_goes_on() -> None:
    """Worker 1 of three is lost; its place is taken by process 4, which begins at the step of the
    worker ahead."""
    parts = [([0, 1, 2, 3], [4, 5, 7]), ([0, 4, 2, 3], [12, 12, 12])]
    (first, second), found = run(
        [(parts[0][0], [4, 5, 7, 0]), (parts[1][0], [12, 12, 12, 12])], PLAN
    )
    assert found == [{"step": 7, "made": [4, None, 7, None], "versions": [16]}]
    assert [rank["before"]["pushes"] for rank in second] == [4, 7, 7, 0]
    server = second[3]["after"]
    assert (
        server["record"][:16] == first[3]["after"]["record"] and server["service"] == 16 + 8 + 5 + 5
    )
    np.testing.assert_allclose(
        server["weights"][0], replayed(server["record"], None, 3), rtol=0, atol=1e-12
    )


def check_lost_server() -> None:
    (first, second), found = run([([0, 1, 2, 3], [5, 5, 6, 0]), ([0, 1, 2, 9], [12] * 4)], PLAN)
    copies = [rank["after"]["copies"][0] for rank in first[:3] if rank["after"]["copies"]]
    newest = max(copies, key=lambda copy: copy.version)
    assert 16 - 5 <= newest.version == found[0]["versions"][0] == second[3]["before"]["service"]
    begun = second[3]["before"]
    np.testing.assert_array_equal(begun["weights"][0], newest.weights[0])
    for ours, theirs in zip(begun["state"], newest.state, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert begun["counts"] == newest.counts == [newest.version] * len(newest.counts)
    for worker in second[:3]:  # all have pulled what the server has
        np.testing.assert_array_equal(worker["before"]["weights"][0], newest.weights[0])
    server = second[3]["after"]
    np.testing.assert_allclose(
        server["weights"][0], replayed(server["record"], newest, 3), rtol=0, atol=1e-12
    )


def test_a_lost_server_comes_back_from_a_worker_s_copy() -> None:
    check_lost_server()


def test_any_worker_that_has_pushed_can_give_a_lost_server_back() -> None:
    """The server is lost before its second copy is due, and with it all workers but one, whichever
    that is."""
    (first, second), found = run(
        [([0, 1, 2, 3], [2, 2, 2, 0]), ([7, 8, 2, 9], [12] * 4)], PLAN, every=50
    )
    copies = [rank["after"]["copies"][0] for rank in first[:3]]
    assert all(copy.version <= 6 for copy in copies)
    assert found[0]["versions"] == [copies[2].version] and found[0]["made"] == [None, None, 2, None]
    np.testing.assert_array_equal(second[3]["before"]["weights"][0], copies[2].weights[0])


@pytest.mark.soak  # test_workers_come_and_go_and_the_record_goes_on, and the lost server
def test_servers_share_the_keys_and_roles_change() -> None:
    """Two servers; one is lost and the job shrinks: a worker becomes a server, and the other goes
    on."""
    plan = {**PLAN, "servers": 2}
    (first, second), found = run(
        [([0, 1, 2, 3, 4], [5, 5, 6, 0, 0]), ([0, 1, 2, 4], [12] * 4)], plan
    )
    # process 4 was the second server, and is
    before = first[4]["after"]
    after = second[3]["before"]
    assert after["service"] == before["service"] == 16
    np.testing.assert_array_equal(after["weights"][0], before["weights"][0])
    assert found[0]["versions"][0] <= 16 == found[0]["versions"][1]
    assert second[2]["before"]["service"] == found[0]["versions"][0]
    ends = [rank["after"]["weights"] for rank in second]  # workers have both shards, in this order
    for worker in ends[:2]:
        np.testing.assert_array_equal(worker[0], ends[2][0])
        np.testing.assert_array_equal(worker[1], ends[3][0])


def test_a_worker_with_local_steps_goes_on_in_the_middle_of_its_round() -> None:
    (first, second), found = run([([0, 1, 2], [4, 5, 0]), ([0, 7, 2], [12] * 3)], ROUNDS)
    mine = second[0]["before"]
    was = first[0]["after"]
    assert (mine["made"], mine["pushes"], mine["counts"]) == (4, 1, was["counts"]) and mine[
        "counts"
    ][0] == 4
    for key in ("weights", "state"):
        for ours, theirs in zip(mine[key], was[key], strict=True):
            np.testing.assert_array_equal(ours, theirs)
    # a whole number of rounds
    assert (second[1]["before"]["made"], second[1]["before"]["pushes"]) == (6, 2)
    np.testing.assert_array_equal(
        second[1]["before"]["weights"][0], second[2]["before"]["weights"][0]
    )
    for ours, theirs in zip(second[2]["before"]["state"], first[2]["after"]["state"], strict=True):
        np.testing.assert_array_equal(ours, theirs)  # the outer momentum


def test_without_a_copy_there_is_no_state() -> None:
    def rank(world: Any, kept: KeptShards) -> bool:
        trainer = Trainer(Plan(dp=2, **PLAN), tiny(), world, seed=3)
        restored, _ = kept.restore(trainer)
        trainer.strategy.group.barrier()
        trainer.close()
        return restored

    assert md.run(rank, KeptShards(), size=2) == [False, False]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "bug", ["moments are not handed over", "workers do not pull", "an old copy is taken"]
)
def test_planted_bugs_of_servers_are_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    match bug:
        case "moments are not handed over":
            monkeypatch.setattr(kept_shards, "_fill_optimizer", lambda *_: None)
        case "workers do not pull":
            monkeypatch.setattr(kept_shards.ParameterServer, "state_replaced", lambda self: None)
        case "an old copy is taken":
            holder = kept_shards._holder
            monkeypatch.setattr(
                kept_shards,
                "_holder",
                lambda marks, server: holder(
                    [
                        mark
                        and [
                            *mark[:2],
                            [[number, -version, own] for number, version, own in mark[2]],
                            mark[3],
                        ]
                        for mark in marks
                    ],
                    server,
                ),
            )
    with pytest.raises((AssertionError, md.errors.MinidistError)):
        check_lost_server()
