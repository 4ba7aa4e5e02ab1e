"""Offload with other axes and with hybrid sharding: one process's weights, the bits of the plan
without, every byte."""

import inspect
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from plans import BOUND, check, sent_by_axis, train
from planted import Bug, check_caught
from training import difference, global_batch, tiny

import minidist as md
from minidist.device import account
from minidist.device.account import MemoryAccount
from minidist.errors import DiskError, MemoryLimitError, MismatchError, PlanError
from minidist.nn import MixtureConfig
from minidist.parallel.hybrid.hybrid import Plan, Trainer
from minidist.parallel.memory.offload_disk import OnDisk, RunOnDisk
from minidist.parallel.zero.gradient_shards import GradientShards
from minidist.parallel.zero.shards import ZeroAxis

MOE = {"layers": 2, "mixture": MixtureConfig(experts=4, top_k=2)}
# parts and shards come out uneven
HARD = {"layers": 3, "heads": 3, "width": 12, "vocabulary": 13, "context": 7}

CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"layers": 3}, {"tp": 2, "pp": 2, "offload": "optimizer", "microbatches": 3}),
    (
        {**HARD, "tied": True},
        {"tp": 3, "dp": 2, "zero": 3, "offload": "all", "sequence_parallel": True},
    ),
    (
        {"layers": 3, "tied": True},
        {"pp": 2, "dp": 2, "zero": 3, "offload": "all", "microbatches": 2},
    ),
    ({"layers": 2}, {"dp": 4, "zero": 2, "shard": 2, "offload": "optimizer", "accumulate": 2}),
    (MOE, {"ep": 2, "dp": 2, "zero": 3, "offload": "all"}),
    # the soak takes what follows, too
    (
        {**HARD, "tied": True},
        {"pp": 3, "zero": 1, "offload": "optimizer", "schedule": "1f1b", "microbatches": 4},
    ),
    ({**HARD, "dropout": 0.2}, {"cp": 3, "zero": 3, "offload": "all"}),
    (
        {**HARD, "context": 8},
        {"cp": 3, "dp": 2, "zero": 2, "offload": "optimizer", "attention": "all-to-all"},
    ),
    (
        {"layers": 3, "heads": 4, "kv_heads": 1, "tied": True},
        {"tp": 4, "dp": 2, "zero": 3, "shard": 1, "offload": "all"},
    ),
    (
        {"layers": 4, "tied": True},
        {"pp": 2, "dp": 2, "zero": 2, "offload": "optimizer", "schedule": "zb-v"},
    ),
    (
        {"layers": 3},
        {"pp": 2, "dp": 2, "zero": 2, "offload": "optimizer", "schedule": "zb-h1", "shard": 1},
    ),
    (
        {"layers": 5},
        {
            "pp": 2,
            "dp": 3,
            "zero": 3,
            "offload": "all",
            "schedule": "interleaved",
            "keep_gathered": True,
        },
    ),
    ({"layers": 2}, {"dp": 6, "zero": 1, "shard": 3, "offload": "optimizer", "accumulate": 3}),
    ({"layers": 2}, {"dp": 6, "zero": 3, "shard": 2, "offload": "all", "accumulate": 2}),
    ({"layers": 2}, {"dp": 6, "zero": 3, "shard": 3, "offload": "optimizer"}),
    (
        {**MOE, "heads": 4, "tied": True},
        {"ep": 2, "tp": 2, "pp": 2, "zero": 2, "offload": "optimizer", "sequence_parallel": True},
    ),
    ({**MOE, "context": 7}, {"ep": 2, "cp": 2, "pp": 2, "zero": 3, "offload": "all"}),
    (
        {"layers": 4, "heads": 4, "tied": True, "dropout": 0.1},
        {
            "dp": 2,
            "pp": 2,
            "cp": 2,
            "tp": 2,
            "zero": 3,
            "shard": 2,
            "offload": "all",
            "sequence_parallel": True,
            "microbatches": 3,
            "checkpoint_blocks": "all",
            "accumulate": 2,
        },
    ),
    (
        {"layers": 4, "heads": 4, "tied": True},
        {
            "dp": 2,
            "pp": 2,
            "cp": 2,
            "tp": 2,
            "zero": 2,
            "offload": "optimizer",
            "sequence_parallel": True,
        },
    ),
]


def name_of(plan: Any) -> str:
    return ",".join(f"{key}={value}" for key, value in plan.items()) if "offload" in plan else ""


def check_case(
    changes: dict[str, Any], plan: dict[str, Any], **options: Any
) -> list[dict[str, Any]]:
    """Parity; the bits of the same plan without offload; bytes between ranks and between memories
    by the formulas."""
    ranks = check(changes, plan, **options)
    without = md.run(
        train, changes, {**options, "plan": {**plan, "offload": "none"}}, size=len(ranks)
    )
    assert (ranks[0]["digest"], ranks[0]["losses"]) == (without[0]["digest"], without[0]["losses"])
    assert (
        sent_by_axis(ranks) == ranks[0]["formula"]["axes"]
        if "axes" in ranks[0]["formula"]
        else True
    )
    for rank in ranks:
        assert rank["offload"]["moved_bytes"] == rank["offload"]["moved_formula"]
    return ranks


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(
    ("changes", "plan"),
    [
        pytest.param(*case, marks=[pytest.mark.soak] if number >= 5 else [])
        for number, case in enumerate(CASES)
    ],
    ids=name_of,
)
def test_any_axis_beside_an_offload(changes: dict[str, Any], plan: dict[str, Any]) -> None:
    check_case(changes, plan)


@pytest.mark.soak
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(("changes", "plan"), CASES, ids=name_of)
def test_in_mixed_precision(changes: dict[str, Any], plan: dict[str, Any], precision: str) -> None:
    """The same bits as without offload; and every byte."""
    options = {"plan": {**plan, "precision": precision}, "steps": 3}
    size = Plan(**plan).size
    there, without = (
        md.run(
            train,
            {**changes, "dtype": "float32"},
            {**options, "plan": {**options["plan"], **home}},
            size=size,
        )
        for home in ({}, {"offload": "none"})
    )
    assert [rank["digest"] for rank in there] == [rank["digest"] for rank in without]
    assert there[0]["losses"] == without[0]["losses"]
    assert all(rank["offload"]["moved_bytes"] == rank["offload"]["moved_formula"] for rank in there)


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["threads-unbuffered", "tcp", "shm", "mpi"])
@pytest.mark.parametrize(("changes", "plan"), [CASES[0], CASES[1], CASES[8]], ids=name_of)
def test_on_every_transport(changes: dict[str, Any], plan: dict[str, Any], transport: str) -> None:
    (serial,) = md.run(train, changes, {"steps": 20}, size=1)
    ranks = md.run(
        train, changes, {"steps": 20, "plan": plan}, size=Plan(**plan).size, transport=transport
    )
    assert difference(ranks[-1]["weights"], serial["weights"]) < BOUND
    assert len({(rank["digest"], *rank["losses"]) for rank in ranks}) == 1


# ---------------------------------------------------------------------------------- what lies where

DEEP = {"width": 16, "heads": 4, "vocabulary": 16, "context": 8, "dtype": "float32"}


def held(
    world: Any, plan: dict[str, Any], limit: int | None = None, layers: int = 8
) -> dict[str, Any]:
    """Return what a rank of a deep model holds, and its digest."""
    config = tiny(**DEEP, layers=layers)
    with account.use(MemoryAccount()) as memory:
        trainer = Trainer(Plan(**plan, device_memory=limit), config, world, lr=1e-2, seed=3)
        memory.reset_peak()
        for step in range(2):
            trainer.step(global_batch(step, 4, config))
        found = {
            "peak": memory.peak,
            "now": memory.now,
            "host": trainer.store.host.peak,
            "disk": trainer.store.disk_bytes(),
            "numbers": sum(p.size for p in trainer.model.parameters()),
            "digest": trainer.weights_sha256(),
            "whole": sum(array.nbytes for array in trainer.state_dict().values()),
        }
        if plan.get("zero") == 3:
            axis: Any = trainer.strategy.data_axis
            found["unit"] = max(unit.nbytes for unit in axis.units)
        trainer.close()
        return found


@pytest.mark.soak
def test_a_rank_of_three_axes_holds_what_is_at_work() -> None:
    """Two units of weights and three of gradients on the device; buffers on the host; 16 bytes a
    number on disk."""
    plan = {"dp": 2, "pp": 2, "tp": 2, "zero": 3, "microbatches": 2, "checkpoint_blocks": "all"}
    without = md.run(held, plan, size=8)
    for rank, free in zip(md.run(held, {**plan, "offload": "all"}, size=8), without, strict=True):
        assert rank["digest"] == free["digest"]
        assert (
            rank["now"]["parameters"] < 100
            and rank["peak"]["optimizer"] == 0 == rank["now"]["gradients"]
        )
        assert rank["peak"]["parameters"] <= 2 * rank["unit"] + 100
        assert rank["peak"]["gradients"] <= 3 * rank["unit"]
        assert rank["disk"] >= 16 * rank["numbers"] // 2 - 64 and rank["host"]["optimizer"] == 0
        lasting = sum(free["now"][kind] for kind in ("parameters", "gradients", "optimizer"))
        assert rank["peak"]["total"] <= free["peak"]["total"] - lasting + 5 * rank["unit"]


def test_a_limit_holds_beside_other_axes() -> None:
    """State that alone is over the limit trains under it, to the bits that it gets without; a tiny
    one is refused."""
    plan = {"pp": 2, "tp": 2, "zero": 3, "microbatches": 2, "checkpoint_blocks": "all"}
    free = md.run(held, plan, None, 4, size=4)
    limit = 16 * max(rank["numbers"] for rank in free) * 3 // 4
    with pytest.raises(
        MemoryLimitError, match=r"do not fit under the limit .* offload more \(offload\)"
    ):
        md.run(held, plan, limit, 4, size=4)
    ranks = md.run(held, {**plan, "offload": "all"}, limit, 4, size=4)
    assert all(
        rank["peak"]["total"] <= limit and rank["digest"] == free[0]["digest"] for rank in ranks
    )
    # which is gathered on the host, for state_dict
    assert all(rank["whole"] > limit for rank in ranks)
    with pytest.raises(MemoryLimitError, match="two units at work"):
        md.run(held, {**plan, "offload": "all"}, 12_000, 4, size=4)


def test_the_optimizer_leaves_a_device_that_shares_its_weights_with_no_other() -> None:
    """tp=2, pp=2: weights and three buckets on the device; 16 bytes a number on the host."""
    for rank in md.run(
        held,
        {"tp": 2, "pp": 2, "offload": "optimizer", "microbatches": 2, "bucket_bytes": 2048},
        None,
        4,
        size=4,
    ):
        assert (rank["now"]["gradients"], rank["peak"]["optimizer"]) == (0, 0)
        assert rank["now"]["parameters"] == 4 * rank["numbers"]
        assert rank["peak"]["gradients"] <= 3 * 4096
        assert rank["host"]["parameters"] == rank["host"]["gradients"] == 4 * rank["numbers"]
        assert rank["host"]["optimizer"] == 8 * rank["numbers"]


@pytest.mark.soak  # tests/parallel/memory/test_offload.py has a full disk
def test_too_small_a_disk_is_told_with_the_need_of_the_ranks_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 bytes a number in float64: of a stage's tensor shard on two ranks, half."""
    monkeypatch.setattr(
        shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**6, 0, 5000)
    )
    plan = Plan(dp=2, pp=2, tp=2, zero=3, offload="all")
    config = tiny(layers=8)
    parts = md.run(lambda world: numbers_of(world, config), size=4)
    with pytest.raises(
        DiskError, match=f"needs ({'|'.join(f'{16 * part:,}' for part in parts)}) bytes in"
    ):
        md.run(lambda world: Trainer(plan, config, world, offload_dir=tmp_path), size=8)


def numbers_of(world: Any, config: Any) -> int:
    trainer = Trainer(Plan(pp=2, tp=2), config, world)
    return sum(p.size for p in trainer.model.parameters())


# ---------------------------------------------------------------------------- the order of the step


class Counting(OnDisk):
    """OnDisk that notes of each read of weights whether it had begun before."""

    def __init__(self, **options: Any) -> None:
        super().__init__(buffers=8, **options)
        self.wanted: list[tuple[str, bool]] = []

    def weights(self, flat: Any, place: Any) -> Any:
        run = self.files[flat]
        self.wanted.append((run.record.name, run.coming is not None))
        return super().weights(flat, place)


def test_weights_stream_in_the_order_of_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """gpipe, 3 microbatches: the unit that the next microbatch begins with is on its way while the
    last one computes.

    Only where a direction begins, or turns, is there nothing to read it behind; and of two small
    units at the end of a backward one alone is read ahead.
    """

    def job(world: Any) -> list[tuple[str, bool]]:
        store = Counting(folder=None)
        monkeypatch.setattr(
            "minidist.parallel.hybrid.hybrid.make_store", lambda plan, folder, **options: store
        )
        trainer = Trainer(
            Plan(pp=2, zero=3, offload="all", schedule="gpipe", microbatches=3),
            tiny(layers=8),
            world,
        )
        batch = global_batch(0, 4, tiny(layers=8))
        trainer.step(batch)
        store.wanted = []
        trainer.step(batch)
        trainer.close()
        return store.wanted

    first = md.run(job, size=2, transport="tcp")[0]
    names = ["tokens", "positions", *(f"blocks.{layer}" for layer in range(4))]
    order = [name.split(" ")[0] for name, _ in first]
    assert order == 3 * names + 3 * names[::-1]
    begins = [number for number, (_, ahead) in enumerate(first) if not ahead]
    assert begins == [0, 1, 2, 18, 23, 29, 35], [first[number] for number in begins]


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"cp": 2, "tp": 2, "offload": "optimizer"},
            "would keep and update the same state 2 times; use zero=1, 2 or 3",
        ),
        (
            {"pp": 2, "offload": "all"},
            "streams the units of ZeRO-3, and the plan has zero=0; use zero=3",
        ),
        (
            {"pp": 2, "offload": "optimizer", "schedule": "pipedream"},
            "use offload=none, or schedule=1f1b",
        ),
        (
            {"dp": 4, "zero": 2, "shard": 2, "offload": "optimizer", "compress": "8bit"},
            "leave one of the three out",
        ),
    ],
)
def test_what_cannot_be_is_one_line(options: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(**options)
    assert says in str(caught.value) and "\n" not in str(caught.value)


# --------------------------------------------------------------------------- the tests see the bugs


def into_a_copy(right: Any, self: Any, sums: Any) -> Any:
    """What is written to the gradients while they are in memory is lost."""
    return right(self, sums.copy())


def noted_once(right: Any, self: Any, flat: Any, sums: Any) -> None:
    """The squares are noted when a sum goes down, and not again when it has grown."""
    if inspect.stack()[2].function != "gradients":  # of the caller of note_squares
        right(self, flat, sums)


def summed_each_pass(right: Any, self: Any) -> None:
    """Each pass is summed over the copies, not the step alone."""
    right(self)
    for index, flat in enumerate(self.flats):
        if self.sharing.has_copies(flat):
            with self.store.gradients([flat]) as (shard,):
                self.sharing.start_sum_of_copies(index, shard, "too early")
                self.sharing.wait_for_copies()


def options_of(case: int) -> dict[str, Any]:
    """The model and the plan of one of CASES."""
    changes, plan = CASES[case]
    return {"changes": changes, "plan": plan}


BUGS = [
    Bug(
        "copies not summed",
        ZeroAxis,
        "sum_stored",
        lambda right, self: None,
        options_of(3),
        raises=MismatchError,
    ),
    Bug("sums over tp not kept", RunOnDisk, "show", into_a_copy, options_of(1)),
    Bug("the norm of the sums before", RunOnDisk, "note_squares", noted_once, options_of(1)),
    Bug("each pass summed over copies", GradientShards, "finish", summed_each_pass, options_of(3)),
    Bug(
        "copies not summed on disk", ZeroAxis, "sum_stored", lambda right, self: None, options_of(8)
    ),
]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bugs(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    check_caught(bug, partial(check, optimizer="sgd", clip=0.05), monkeypatch)
