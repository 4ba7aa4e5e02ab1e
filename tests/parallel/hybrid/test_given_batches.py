"""Test what ranks give a Trainer: compared on every plan; own sequences; batches that cannot be."""

from typing import Any

import numpy as np
import pytest
from plans import BOUND
from training import difference, global_batch, tiny

import minidist as md
from minidist.data import rank_batch
from minidist.data.rank_batch import rows_of_all
from minidist.errors import (
    ConfigError,
    DtypeError,
    MinidistError,
    MismatchError,
    PlanError,
    ShapeError,
)
from minidist.nn import GPTConfig, MixtureConfig
from minidist.parallel.hybrid.hybrid import Plan, Trainer

EXPERTS = {"mixture": MixtureConfig(experts=4, top_k=2)}
SERVERS = {"strategy": "parameter-server"}
PLANS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dp": ({"dp": 3}, {}),
    "accumulate": ({"dp": 2, "accumulate": 2}, {}),
    "zero-1": ({"dp": 2, "zero": 1}, {}),
    "zero-2": ({"dp": 2, "zero": 2}, {}),
    "zero-3": ({"dp": 2, "zero": 3}, {}),
    "tp": ({"tp": 2}, {}),
    "sequence": ({"dp": 2, "tp": 2, "sequence_parallel": True}, {}),
    "cp": ({"dp": 2, "cp": 2}, {}),
    "pp": ({"dp": 2, "pp": 2, "microbatches": 2}, {}),
    "ep": ({"ep": 2}, EXPERTS),
    "dp, ep": ({"dp": 2, "ep": 2}, EXPERTS),
    "pipedream": ({"dp": 2, "pp": 2, "schedule": "pipedream", "microbatches": 2}, {"tied": False}),
    "servers": ({"dp": 3, **SERVERS}, {}),
    "asynchronous": ({"dp": 3, "asynchronous": True, **SERVERS}, {}),
    "local steps": ({"dp": 2, "local_steps": 2}, {}),
    "asynchronous local steps": ({"dp": 3, "asynchronous": True, "local_steps": 2, **SERVERS}, {}),
    "offload": ({"dp": 2, "zero": 2, "offload": "optimizer"}, {}),
    "disk": ({"dp": 2, "zero": 3, "offload": "all"}, {}),
    "top-k": ({"dp": 2, "compress": "top-k:density=0.5"}, {}),
    "three axes": ({"dp": 2, "pp": 2, "tp": 2, "zero": 1, "microbatches": 2}, {}),
}

ONE_PROCESS = ({}, {})
WHOSE_ROWS_MATTER = ("pipedream", "local steps", "top-k")
"""Plans whose numbers depend on which rank has which rows."""


def trainer_of(world: Any, name: str) -> Trainer:
    options, changes = PLANS.get(name, ONE_PROCESS)
    plan = Plan(**options)
    clip = None if plan.schedule == "pipedream" or plan.compress != "none" else 0.5
    return Trainer(plan, config_of(name), world, lr=1e-2, clip=clip, seed=3)


def config_of(name: str) -> GPTConfig:
    return tiny(dropout=0.1, **PLANS.get(name, ONE_PROCESS)[1])


def size_of(name: str) -> int:
    return Plan(**PLANS.get(name, ONE_PROCESS)[0]).size


def readers_of(name: str) -> int:
    plan = Plan(**PLANS[name][0])
    return plan.dp * plan.ep if plan.composed else plan.workers


def odd_rank(name: str) -> int:
    """The last rank that reads rows."""
    return (
        Plan(**PLANS[name][0]).workers - 1 if PLANS[name][0].get("strategy") else size_of(name) - 1
    )


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


# ---------------------------------------------------------------------------- the same on all ranks


def steps_with_another(world: Any, name: str, first: int, change: Any) -> str:
    """Return what a rank says where one rank passes another batch from step `first` on."""
    trainer = trainer_of(world, name)
    try:
        for step in range(first + 2):  # with local steps two make a round
            batch = global_batch(step, 6, trainer.config)
            odd = world.rank == odd_rank(name) and step >= first
            trainer.step(change(batch) if odd else batch)
        trainer.survivors()
    except MinidistError as error:
        return said(error)
    finally:
        trainer.close()
    return "nothing"


def other_numbers(batch: Any) -> Any:
    return tuple((ids + 1) % 11 for ids in batch)


def other_targets(batch: Any) -> Any:
    return batch[0], other_numbers(batch)[1]


def fewer_rows(batch: Any) -> Any:
    return tuple(ids[:4] for ids in batch)


def shorter_rows(batch: Any) -> Any:
    return tuple(ids[:, :5] for ids in batch)


def other_dtype(batch: Any) -> Any:
    return tuple(ids.astype(np.int32) for ids in batch)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "first"), [*((name, 2) for name in PLANS), ("dp", 0), ("asynchronous", 0)]
)
def test_a_rank_that_passes_another_batch_is_named(name: str, first: int) -> None:
    """By every rank, with the same words; weights of all ten plans went apart without a word."""
    found = md.run(steps_with_another, name, first, other_numbers, size=size_of(name))
    assert len({*found}) == 1
    assert found[0].startswith(
        f"MismatchError: rank {odd_rank(name)}: the batch's inputs and targets differ from "
        "rank 0's; pass every rank the same global batch"
    )


@pytest.mark.parametrize("name", ["sequence", "three axes"])
def test_a_rank_between_others_is_named(name: str) -> None:
    """Two ranks of tp cannot know which of them differs from the others; all together do."""

    def rank(world: Any) -> str:
        trainer = trainer_of(world, name)
        with pytest.raises(MismatchError) as error:
            for step in range(3):
                batch = global_batch(step, 6, trainer.config)
                trainer.step(other_numbers(batch) if world.rank == 2 and step == 1 else batch)
        return f"{trainer.steps_done} {error.value}"

    found = md.run(rank, size=size_of(name))
    assert len({*found}) == 1
    assert found[0].startswith("1 rank 2: the batch's inputs and targets differ from rank 0's")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_targets, "the batch's targets differ from"),
        (fewer_rows, "have another shape or dtype than"),
        (shorter_rows, "have another shape or dtype than"),
        (other_dtype, "have another shape or dtype than"),
    ],
)
@pytest.mark.parametrize("name", ["zero-3", "pp", "servers", "local steps"])
def test_what_differs_is_told_before_a_message_does_not_fit(
    name: str, change: Any, words: str
) -> None:
    found = md.run(steps_with_another, name, 0, change, size=size_of(name))
    assert len({*found}) == 1 and found[0].startswith("MismatchError: rank ") and words in found[0]


@pytest.mark.parametrize("name", ["dp", "zero-3", "pp"])
def test_the_first_batch_is_compared_before_weights_move(name: str) -> None:
    def rank(world: Any) -> bool:
        trainer = trainer_of(world, name)
        before = trainer.state_dict()
        batch = global_batch(0, 6, trainer.config)
        with pytest.raises(MismatchError):
            trainer.step(other_numbers(batch) if world.rank == odd_rank(name) else batch)
        return difference(trainer.state_dict(), before) == 0

    assert all(md.run(rank, size=size_of(name)))


def test_what_is_compared_counts_as_control_alone() -> None:
    """16 bytes a rank beside each loss, with tp beside each norm, and 48 ahead of the first
    step."""

    def rank(world: Any, name: str) -> tuple[int, int]:
        trainer = trainer_of(world, name)
        made = sum(world.ledger.sent_bytes()["control"].values())
        for step in range(3):
            trainer.step(global_batch(step, 6, trainer.config))
        steps = sum(world.ledger.sent_bytes("step")["control"].values())
        return int(steps), int(sum(world.ledger.sent_bytes()["control"].values()) - made - steps)

    for name, others in (("dp", 2), ("tp", 1)):
        sent = others * 3 * (8 + 16), others * 48
        assert md.run(rank, name, size=size_of(name)) == [sent] * size_of(name)


def test_tp_without_a_norm_compares_in_some_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_batch, "EVERY", 3)

    def rank(world: Any) -> tuple[int, str]:
        trainer = Trainer(Plan(tp=2), tiny(), world, clip=None)
        with pytest.raises(MismatchError) as error:
            for step in range(9):
                batch = global_batch(step, 4, trainer.config)
                trainer.step(other_numbers(batch) if world.rank and step >= 4 else batch)
        return trainer.steps_done, str(error.value)

    found = md.run(rank, size=2)
    assert found[0] == found[1] and found[0][0] == 6
    assert found[0][1].startswith("rank 1: the batch's inputs and targets differ from rank 0's")


def test_evaluate_compares_its_batches() -> None:
    def rank(world: Any) -> str:
        trainer = trainer_of(world, "dp")
        batches = [global_batch(step, 4, trainer.config) for step in range(2)]
        trainer.evaluate(batches)
        with pytest.raises(MismatchError) as error:
            trainer.evaluate([batches[0], batches[world.rank // 2]])
        return str(error.value)

    found = md.run(rank, size=3)
    assert len({*found}) == 1 and found[0].startswith(
        "rank 2: digest of the batches to evaluate is "
    )


# -------------------------------------------------------------------------------- each rank its own


def own_rows(batch: Any, trainer: Trainer, rows: list[int]) -> Any:
    """The rows of a global batch that a rank passes by itself; a server passes none."""
    group, readers = trainer.strategy.readers(trainer.world)
    start, stop = (
        (sum(rows[: group.rank]), sum(rows[: group.rank + 1])) if group.rank < readers else (0, 0)
    )
    return tuple(ids[start:stop] for ids in batch)


def train_by_rows(
    world: Any, name: str, rows: list[int], local: bool
) -> tuple[dict[str, np.ndarray], list[float]]:
    trainer = trainer_of(world, name)
    losses = []
    for step in range(2):
        batch = global_batch(step, sum(rows), trainer.config)
        losses.append(
            trainer.step(own_rows(batch, trainer, rows), local=True)
            if local
            else trainer.step(batch)
        )
    weights = trainer.state_dict()
    trainer.close()
    return weights, losses


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name, (plan, _) in PLANS.items()
        for kind in ("even", "uneven")
        if not plan.get("asynchronous")
        and (kind == "even" or readers_of(name) > 1 and name not in WHOSE_ROWS_MATTER)
    ],
)
def test_own_sequences_are_the_global_batch(name: str, kind: str) -> None:
    """With dropout, and any numbers of sequences; to the bit where array_split cuts so."""
    readers = readers_of(name)
    batch = global_batch(0, 7, config_of(name))
    rows = (
        rows_of_all(batch, readers) if kind == "even" else [3 * reader for reader in range(readers)]
    )
    ours, theirs = (
        md.run(train_by_rows, name, rows, local, size=size_of(name)) for local in (True, False)
    )
    for weights, losses in ours:
        assert difference(weights, theirs[0][0]) < (BOUND if kind != "even" else 1e-300)
        assert losses == ours[0][1]
        np.testing.assert_allclose(losses, theirs[0][1], rtol=1e-12)


def test_one_process_has_all_sequences() -> None:
    def rank(world: Any, local: bool) -> float:
        trainer = trainer_of(world, "one process")
        return trainer.step(global_batch(0, 3, trainer.config), local=local)

    assert md.run(rank, True, size=1) == md.run(rank, False, size=1)


def refusals(world: Any, name: str, given: Any) -> str:
    """Return what a rank says of the own sequences that `given(trainer, rank)` makes; weights
    stay."""
    trainer = trainer_of(world, name)
    before = trainer.state_dict() if not trainer.strategy.asynchronous else {}
    try:
        with pytest.raises(MinidistError) as error:
            trainer.step(given(trainer, world.rank), local=True)
        if before:
            assert difference(trainer.state_dict(), before) == 0
    finally:
        trainer.close()
    return said(error.value)


def whole(trainer: Trainer, rank: int) -> Any:
    return global_batch(0, 4, trainer.config)


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        (
            "servers",
            whole,
            "ConfigError: rank 2 is a parameter server, which reads no rows, but it passes 4",
        ),
        (
            "asynchronous",
            whole,
            "PlanError: step: local=True needs the number of all ranks' tokens",
        ),
        (
            "asynchronous local steps",
            whole,
            "PlanError: step: local=True needs the number of all ranks' tokens",
        ),
        (
            "dp",
            lambda trainer, rank: tuple(ids[:0] for ids in whole(trainer, rank)),
            "ShapeError: step: no rank passes a sequence",
        ),
        (
            "dp",
            lambda trainer, rank: tuple(ids[:, : 6 - rank // 2] for ids in whole(trainer, rank)),
            "MismatchError: rank 2 passes sequences of 5 tokens, rank 0 of 6",
        ),
        (
            "three axes",
            lambda trainer, rank: tuple((ids + (rank == 6)) % 11 for ids in whole(trainer, rank)),
            "MismatchError: rank 6: the batch's inputs and targets differ from rank 4's; ranks "
            "along pp",
        ),
        (
            "local steps",
            lambda trainer, rank: tuple(ids[:rank] for ids in whole(trainer, rank)),
            "ConfigError: local steps: rank 0 has no row of the batch",
        ),
    ],
)
def test_own_sequences_that_do_not_go_together(name: str, given: Any, words: str) -> None:
    found = md.run(refusals, name, given, size=size_of(name))
    assert len({*found}) == 1 and found[0].startswith(words)


def test_some_pass_their_own_and_some_all() -> None:
    def rank(world: Any) -> str:
        trainer = trainer_of(world, "dp")
        with pytest.raises(MismatchError) as error:
            trainer.step(global_batch(0, 4, trainer.config), local=world.rank == 1)
        return str(error.value)

    found = md.run(rank, size=3)
    assert len({*found}) == 1
    assert found[0].startswith(
        "rank 1 passes its own sequences (local=True), rank 0 the global batch; pass every rank"
    )


# --------------------------------------------------------------------------- batches that cannot be

IDS = np.zeros((4, 6), np.int64)
CANNOT_BE: dict[str, tuple[Any, type[MinidistError], str]] = {
    "no sequence": (
        (IDS[:0], IDS[:0]),
        ShapeError,
        r"the batch has no sequence, its shape is \(0, 6\)",
    ),
    "no token": ((IDS[:, :0], IDS[:, :0]), ShapeError, r"have no token, their shape is \(4, 0\)"),
    "no dim": ((IDS[0, 0], IDS[0, 0]), DtypeError, "inputs are of type int64, not an array"),
    "an array without dims": (
        (IDS[0, 0, ...], IDS[0, 0, ...]),
        ShapeError,
        r"inputs have shape \(\)",
    ),
    "one dim": (
        (IDS[0], IDS[0]),
        ShapeError,
        r"inputs have shape \(6,\); pass \(sequences, tokens\)",
    ),
    "three dims": ((IDS[None], IDS[None]), ShapeError, r"inputs have shape \(1, 4, 6\)"),
    "lists": ((IDS.tolist(), IDS.tolist()), DtypeError, "inputs are of type list, not an array"),
    "floats": ((IDS * 1.0, IDS), DtypeError, "inputs have dtype float64"),
    "bools": ((IDS > 0, IDS > 0), DtypeError, "inputs have dtype bool"),
    "texts": ((IDS, IDS.astype(str)), DtypeError, "targets have dtype <U21"),
    "objects": ((IDS, IDS.astype(object)), DtypeError, "targets have dtype object"),
    "fewer targets": ((IDS, IDS[:3]), ShapeError, r"inputs have shape \(4, 6\), targets \(3, 6\)"),
    "too long": (
        (np.tile(IDS, 2), np.tile(IDS, 2)),
        ShapeError,
        "sequences of 12 tokens are longer than the context",
    ),
    "an array": (IDS, ShapeError, r"a batch is a pair \(inputs, targets\), but got ndarray"),
    "nothing": (None, ShapeError, "but got NoneType"),
    "three parts": ((IDS, IDS, IDS), ShapeError, "but got tuple of 3"),
}


@pytest.mark.parametrize("name", [*PLANS, "one process"])
def test_batches_that_cannot_be(name: str) -> None:
    """In one line, of the promised type, on every rank, by step and by evaluate."""

    def rank(world: Any) -> list[str]:
        trainer = trainer_of(world, name)
        found = []
        for batch, kind, words in CANNOT_BE.values():
            for call in (
                (lambda batch=batch: trainer.step(batch)),
                (lambda batch=batch: trainer.evaluate([batch])),
            ):
                if trainer.strategy.asynchronous and len(found) % 2:
                    found.append("")  # a worker that evaluates has made its last step
                    continue
                with pytest.raises(kind, match=words) as error:
                    call()
                found.append(str(error.value))
        assert trainer.steps_done == 0
        if not trainer.strategy.asynchronous:
            with pytest.raises(ShapeError, match="evaluate: there is no batch"):
                trainer.evaluate([])
        trainer.close()
        return found

    ranks = md.run(rank, size=size_of(name))
    assert all(each == ranks[0] for each in ranks)
    assert not any("\n" in line for line in ranks[0])


@pytest.mark.parametrize("name", ["one process", "dp", "zero-3", "pp", "local steps", "servers"])
def test_an_empty_batch_moves_no_weight(name: str) -> None:
    def rank(world: Any) -> bool:
        trainer = trainer_of(world, name)
        trainer.step(global_batch(0, 4, trainer.config))
        before = trainer.state_dict()
        with pytest.raises(ShapeError, match="step: the batch has no sequence"):
            trainer.step((IDS[:0], IDS[:0]))
        return difference(trainer.state_dict(), before) == 0

    assert all(md.run(rank, size=size_of(name)))


# ---------------------------------------------------------------------------------------- arguments


def make_with(world: Any, of_rank: Any) -> str:
    arguments = of_rank(world.rank)
    config = tiny(**arguments.pop("config", {}))
    plan = Plan(**{"dp": world.size, **arguments.pop("plan", {})})
    try:
        Trainer(plan, config, world, **arguments).close()
    except MinidistError as error:
        return said(error)
    return "nothing"


@pytest.mark.parametrize(
    ("of_rank", "words"),
    [
        (lambda rank: {"lr": 1e-3 * (1 + (rank == 2))}, "rank 2: lr is 0.002, rank 0 has 0.001"),
        (lambda rank: {"lr": 1e-3 * (1 + (rank == 0))}, "rank 0: lr is 0.002, rank 1 has 0.001"),
        (lambda rank: {"seed": rank}, "rank 1: seed is 1, rank 0 has 0; ranks 2 differ too"),
        (lambda rank: {"clip": None if rank == 1 else 1.0}, "rank 1: clip is None, rank 0 has 1"),
        (
            lambda rank: {"optimizer": "sgd" if rank == 1 else "adam"},
            "rank 1: optimizer is 'sgd', rank 0 has 'adam'",
        ),
        (
            lambda rank: {"optimizer_options": {"betas": (0.9, 0.99 if rank == 1 else 0.95)}},
            "rank 1: optimizer option betas is (0.9, 0.99), rank 0 has (0.9, 0.95)",
        ),
        (
            lambda rank: {"optimizer_options": {"weight_decay": 0.3} if rank == 1 else {}},
            "rank 1: optimizer option weight_decay is 0.3, rank 0 has none given",
        ),
        (
            lambda rank: {"lr_schedule": "cosine", "steps": 9 + rank // 2},
            "rank 2: steps is 10, rank 0 has 9",
        ),
        (
            lambda rank: {"config": {"dropout": 0.1 * (rank == 1)}},
            "rank 1: config dropout is 0.1, rank 0 has 0",
        ),
        (
            lambda rank: {"config": {"mixture": MixtureConfig(experts=3, top_k=1 + rank // 2)}},
            "rank 2: config mixture top_k is 2, rank 0 has 1",
        ),
        (lambda rank: {"plan": {"zero": rank // 2}}, "rank 2: plan zero is 1, rank 0 has 0"),
        (
            lambda rank: {"plan": {"dp": 1, "tp": 3} if rank else {}},
            "rank 0: plan dp is 3, rank 1 has 1; plan tp differ",
        ),
    ],
)
def test_arguments_that_differ_by_rank(of_rank: Any, words: str) -> None:
    found = md.run(make_with, of_rank, size=3)
    assert len({*found}) == 1 and found[0].startswith(f"MismatchError: {words}")


def test_another_plan_for_one_rank() -> None:
    def rank(world: Any) -> str:
        trainer = trainer_of(world, "dp")
        with pytest.raises(MismatchError) as error:
            trainer.change_plan(Plan(dp=3, zero=1 + world.rank // 2))
        trainer.step(global_batch(0, 4, trainer.config))  # it has stayed as it was
        return str(error.value)

    assert {*md.run(rank, size=3)} == {
        "rank 2: plan zero is 2, rank 0 has 1; give every rank the same"
    }


def test_an_argument_that_cannot_work_is_told_as_itself() -> None:
    def rank(world: Any) -> None:
        with pytest.raises(PlanError):
            Trainer(Plan(dp=2), tiny(), world)
        with pytest.raises(ConfigError, match="unknown optimizer"):
            Trainer(Plan(dp=3), tiny(), world, optimizer="none")

    md.run(rank, size=3)
