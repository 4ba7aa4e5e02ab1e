"""The pipeline: equal to one process under every schedule, at the cost and with the memory its
docstring states."""

import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import STAGED, differ, train_stages
from planted import Bug, check_caught
from training import difference, global_batch, tiny

import minidist as md
from minidist.comm.transports.throttled import delayed
from minidist.device import account
from minidist.errors import ScheduleError, ShardError
from minidist.nn import GPT
from minidist.observe.timeline import Timeline
from minidist.optim import SGD, AdamW
from minidist.parallel.pipeline import pipeline as pipeline_module
from minidist.parallel.pipeline import stages as stages_module
from minidist.parallel.pipeline.executor import Executor
from minidist.parallel.pipeline.instructions import COMPUTES, Schedule
from minidist.parallel.pipeline.pipeline import Pipeline
from minidist.parallel.pipeline.schedule_checker import (
    Clock,
    ComputeSpan,
    Times,
    broken,
    check,
    clock_of,
    computes_of,
    peak_held,
)
from minidist.parallel.pipeline.schedules import (
    ORDERS,
    UPDATING,
    V_SHAPED,
    make_schedule,
    stages_a_rank,
)
from minidist.parallel.precision.mixed_precision import LossScale, MixedPrecision
from minidist.parallel.step import step as step_module
from minidist.parallel.step.single import Single
from minidist.parallel.step.step import Part

BOUND = 1e-10
SCHEDULES = [name for name in ORDERS if name not in UPDATING]


@pytest.fixture(scope="module")
def serial() -> dict[str, Any]:
    """One process, three steps of five sequences."""
    return md.run(train_stages, "single", STAGED, size=1)[0]


# --------------------------------------------------------------------------- parallel equals serial
# tests/parallel/test_parity.py has whole trainings on fixed sizes, over every transport


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_the_first_stage_may_be_frozen_between_two_steps(name: str) -> None:
    config = tiny(layers=2)

    def job(world: Any, size: int) -> Any:
        model = GPT(config)
        if size == 1:
            model.initialize(3)
            strategy: Any = Single(model)
        else:
            strategy = Pipeline(model, world, make_schedule(name, size, 4), seed=3)
        optimizer = SGD(strategy.parameters, 0.1)
        strategy.step(global_batch(0, 4, config), optimizer)
        for path, weight in model.named_parameters():
            weight.requires_grad = not path.startswith(("tokens", "positions", "blocks.0"))
        strategy.step(global_batch(1, 4, config), optimizer)
        return strategy.state_dict()

    alone = md.run(job, 1, size=1)[0]
    assert difference(md.run(job, 2, size=2)[0], alone) < BOUND


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, size) for name in SCHEDULES for size in (2, 3)),
        ("gpipe", 1),
        ("interleaved", 1),
        ("zb-h1", 5),
        ("zb-v", 1),
        ("dualpipe-v", 1),
    ],
)
def test_equals_one_process(serial: dict[str, Any], name: str, size: int) -> None:
    """Microbatches of two rows and of one; weights at both ends; layers that do not divide."""
    ranks = md.run(train_stages, name, STAGED, size=size)
    assert differ(ranks[0], serial) < BOUND
    assert len({tuple(rank["losses"]) for rank in ranks}) == 1
    twice = size > 1 and name not in V_SHAPED  # the table is at both ends
    assert sum(len(rank["own"]) for rank in ranks) == len(serial["weights"]) + twice


any_job = given(
    size=st.integers(1, 5),
    name=st.sampled_from(SCHEDULES),
    microbatches=st.integers(1, 7),
    sequences=st.integers(1, 9),
    accumulate=st.integers(1, 3),
    chunks=st.integers(1, 3),
    changes=st.fixed_dictionaries(
        {
            "layers": st.integers(3, 7),
            "tied": st.booleans(),
            "dropout": st.sampled_from([0.0, 0.2]),
            "positions": st.sampled_from(["learned", "rotary"]),
            "norm": st.sampled_from(["layer", "rms"]),
        }
    ),
)


@settings(max_examples=3)
@any_job
def test_any_job(
    size: int,
    name: str,
    microbatches: int,
    sequences: int,
    accumulate: int,
    chunks: int,
    changes: dict[str, Any],
) -> None:
    """Fewer microbatches than stages, fewer rows than microbatches, a stage without a layer at an
    end."""
    check_job(size, name, microbatches, sequences, accumulate, chunks, changes)


@pytest.mark.soak
@settings(max_examples=150)
@any_job
def test_very_many_jobs(
    size: int,
    name: str,
    microbatches: int,
    sequences: int,
    accumulate: int,
    chunks: int,
    changes: dict[str, Any],
) -> None:
    """The same, more often."""
    check_job(size, name, microbatches, sequences, accumulate, chunks, changes)


def check_job(
    size: int,
    name: str,
    microbatches: int,
    sequences: int,
    accumulate: int,
    chunks: int,
    changes: dict[str, Any],
) -> None:
    """Every rank equals one process."""
    options: dict[str, Any] = {"sequences": sequences, "steps": 2, "accumulate": accumulate}
    several = chunks if name == "interleaved" and size * chunks <= changes["layers"] + 2 else None
    size = min(size, (changes["layers"] + 2) // stages_a_rank(name, several))
    alone = md.run(lambda world: train_stages(world, "single", changes, **options), size=1)[0]
    for rank in md.run(
        lambda world: train_stages(
            world, name, changes, microbatches=microbatches, chunks=several, **options
        ),
        size=size,
    ):
        assert differ(rank, alone) < BOUND


@pytest.mark.sampled
@pytest.mark.parametrize("layers", [[0, 1, 5], [3, 3, 0], [1, 4, 1]])
def test_uneven_splits(serial: dict[str, Any], layers: list[int]) -> None:
    ranks = md.run(lambda world: train_stages(world, "1f1b", STAGED, layers=layers), size=3)
    assert differ(ranks[0], serial) < BOUND
    held = [
        len({name.split(".")[1] for name in rank["own"] if name.startswith("blocks.")})
        for rank in ranks
    ]
    assert held == layers


# -------------------------------------------------------------------- the parity test sees the bugs


def first_row_forgotten(right: Any, part: Part, count: int) -> list[Part]:
    """Each microbatch draws the dropout of the batch's first rows."""
    return [Part(micro.inputs, micro.targets, 0) for micro in right(part, count)]


BUGS = [
    Bug("table not summed", Pipeline, "sum_ends", lambda right, self: None),
    Bug("table counted twice", Pipeline, "counts", lambda right, self, parameter: True),
    Bug("own norm", step_module, "add_squares", lambda right, group, share, batch: share),
    Bug("first row forgotten", pipeline_module, "micro_parts", first_row_forgotten),
    Bug(
        "microbatch divisor",
        stages_module.Stages,
        "forward",
        lambda right, self, stage, x, *, targets, divisor, key: right(
            self, stage, x, targets=targets, divisor=4 * targets.size, key=key
        ),
    ),
    Bug(
        "weights' half forgotten",
        stages_module.StagePass,
        "backward_weights",
        lambda right, self, stage, microbatch: None,
        {"name": "zb-h1"},
    ),
]


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bugs_break_parity(
    serial: dict[str, Any], bug: Bug, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(name: str = "1f1b") -> None:
        assert differ(md.run(train_stages, name, STAGED, size=3)[0], serial) < BOUND

    check_caught(bug, check, monkeypatch)


def in_half_precision(world: Any, name: str, dtype: str, scale: float) -> dict[str, Any]:
    """Masters, losses and skipped steps after three steps in float16, or bfloat16."""
    config = tiny(dtype=dtype, layers=4, tied=True)
    precision = (
        MixedPrecision("fp16", loss_scale=LossScale(scale))
        if dtype == "float16"
        else MixedPrecision("bf16")
    )
    model = GPT(config)
    if name == "single":
        model.initialize(3)
        strategy: Any = Single(model, precision=precision)
    else:
        strategy = Pipeline(
            model, world, make_schedule(name, world.size, 4), seed=3, precision=precision
        )
    optimizer = AdamW(strategy.parameters, 1e-3)
    losses = [
        strategy.step(
            global_batch(step, 8, config),
            optimizer,
            clip=0.5,
            accumulate=4 if name == "single" else 1,
        )
        for step in range(3)
    ]
    return {"weights": strategy.state_dict(), "losses": losses, "skipped": precision.skipped}


@pytest.mark.sampled
@pytest.mark.parametrize(("dtype", "scale"), [("bfloat16", 1.0), ("float16", 2.0**22)])
def test_half_precision(dtype: str, scale: float) -> None:
    """The result is as near to one process as rounding lets it be; all stages skip a step together
    where one overflows."""
    alone = md.run(in_half_precision, "single", dtype, scale, size=1)[0]
    ranks = md.run(in_half_precision, "zb-h1", dtype, scale, size=3)
    assert {rank["skipped"] for rank in ranks} == {alone["skipped"]} and (alone["skipped"] > 0) == (
        scale > 2**20
    )
    # Adam's step is lr = 1e-3 whatever the gradient's size, and rounding may turn the sign of one
    # near zero
    assert difference(ranks[0]["weights"], alone["weights"]) < 3 * 2e-3
    np.testing.assert_allclose(ranks[0]["losses"], alone["losses"], rtol=1e-2)


@pytest.mark.parametrize("name", ["zb-h1", "interleaved"])
def test_evaluation_is_the_forwards_alone(name: str) -> None:
    """The loss of one process, without dropout; nothing is kept, no weight has a gradient; training
    goes on."""
    config = tiny(layers=6, dropout=0.5)
    alone = GPT(config)
    batch = global_batch(0, 5, config)
    alone.initialize(3)
    expected = alone.eval().loss(*batch, 1.0).item()

    def job(world: Any) -> float:
        pipeline = Pipeline(GPT(config), world, make_schedule(name, world.size, 4), seed=3)
        share = pipeline.evaluate(Part(*batch, first=0), divisor=1)
        assert all(weight.grad is None for weight in pipeline.weights) and pipeline.model.training
        modules = list(pipeline.model.modules())
        modules[-1].training = False
        pipeline.evaluate(Part(*batch, first=0), divisor=1)
        assert [module.training for module in modules] == [*[True] * (len(modules) - 1), False]
        assert account.current().now["activations"] <= 2 * batch[0].base.nbytes
        return share

    shares = md.run(job, size=3)
    assert shares[:2] == [0.0, 0.0] and shares[2] == pytest.approx(expected, rel=1e-12)


# ------------------------------------------------------------------------------------ what it costs


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "size", "tied"),
    [
        *((name, 3, False) for name in SCHEDULES),
        ("1f1b", 1, True),
        ("1f1b", 2, True),
        ("interleaved", 2, True),
        ("zb-v", 2, True),
    ],
)
def test_bytes_are_the_formula(name: str, size: int, tied: bool) -> None:
    steps = 2
    changes = {"layers": 6, "tied": tied}
    config = tiny(**changes)
    ranks = md.run(
        lambda world: train_stages(world, name, changes, steps=steps, sequences=7), size=size
    )
    v_shaped = name in V_SHAPED  # its middle boundary is on the last rank
    boundaries = size * stages_a_rank(name) - 1 - v_shaped if size > 1 else 0
    sent = sum(rank["sent"].get("world", {}).get("send", 0) for rank in ranks)
    assert sent == steps * 2 * boundaries * 7 * config.context * config.width * 8
    table = sum(rank["sent"].get("world", {}).get("all_reduce", 0) for rank in ranks)
    assert table == (
        steps * 2 * config.vocabulary * config.width * 8
        if tied and size > 1 and not v_shaped
        else 0
    )
    for rank in ranks:
        assert rank["sent"].keys() <= {"world", "control"}
        # loss and norm
        assert rank["sent"]["control"] == {"all_gather": steps * 2 * 8 * (size - 1)}


def activations(world: Any, name: str, microbatches: int, layers: int = 6) -> tuple[int, int]:
    """Peak bytes of activations in a step whose microbatches have two rows each; what stays."""
    config = tiny(layers=layers)
    pipeline = Pipeline(GPT(config), world, make_schedule(name, world.size, microbatches), seed=3)
    batch = tuple(np.tile(ids, (microbatches, 1)) for ids in global_batch(0, 2, config))
    # arrays of their own: the account counts a view's owner
    batches = [np.array(ids) for ids in batch]
    optimizer = SGD(pipeline.parameters, 1e-2)
    memory = account.current()
    pipeline.step((batches[0], batches[1]), optimizer)
    memory.reset_peak()
    pipeline.step((batches[0], batches[1]), optimizer)
    ids = batches[0].nbytes if world.rank != 1 else 0  # inputs at one end, targets at the other
    return memory.peak["activations"] - ids, memory.now["activations"] - ids


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
def test_activations_are_those_of_the_microbatches_held(name: str) -> None:
    """To the byte: a peak with k held is that with one, and k - 1 times what each adds; the ids of
    the batch apart."""
    one = md.run(activations, "gpipe", 1, size=3)
    two = md.run(activations, "gpipe", 2, size=3)
    held = peak_held(make_schedule(name, 3, 5))
    for rank, (peak, left) in enumerate(md.run(activations, name, 5, size=3)):
        each = two[rank][0] - one[rank][0]
        assert peak == one[rank][0] + (held[rank] - 1) * each
        assert left == 0


@pytest.mark.soak
def test_zero_bubble_holds_no_more_than_1f1bs_first_stage() -> None:
    """Rank by rank: what a microbatch keeps there, times the microbatches that 1F1B's first stage
    holds."""
    one, two, zero = (
        md.run(activations, name, m, size=3)
        for name, m in (("gpipe", 1), ("gpipe", 2), ("zb-h1", 6))
    )
    for rank in range(3):
        each = two[rank][0] - one[rank][0]
        assert zero[rank][0] <= one[rank][0] + (3 - 1) * each


@pytest.mark.soak
def test_v_schedules_hold_equally_much_on_every_rank() -> None:
    """ZB-V as much as 1F1B's first stage, which holds most there; DualPipe-V an activation of a
    stage more."""
    one, v, dual = (
        [peak for peak, _ in md.run(activations, name, 7, 12, size=3)]
        for name in ("1f1b", "zb-v", "dualpipe-v")
    )
    assert one[0] > 1.4 * one[1] > 1.9 * one[2]
    assert v == pytest.approx([one[0]] * 3, rel=0.05)
    assert dual == pytest.approx([one[0] * 7 / 6] * 3, rel=0.05)


# ----------------------------------------------------------------------------------- time and order


class Sleeper:
    """Stages that sleep: `unit` seconds forward, twice that backward or once for each half."""

    def __init__(self, stages: int, unit: float) -> None:
        self.stages = stages
        self.unit = unit

    def skips(self, microbatch: int) -> bool:
        return False

    def room(self, receive: Any) -> None:
        return None

    def forward(self, stage: int, microbatch: int, x: Any) -> Any:
        assert (x is None) == (stage == 0) and (
            x is None or x.tolist() == [stage - 1, microbatch, 0]
        )
        time.sleep(self.unit)
        return None if stage == self.stages - 1 else np.array([stage, microbatch, 0])

    def backward(self, stage: int, microbatch: int, dy: Any, *, whole: bool) -> Any:
        assert (dy is None) == (stage == self.stages - 1) and (
            dy is None or dy.tolist() == [stage + 1, microbatch, 1]
        )
        time.sleep(self.unit * (1 + whole))
        return None if stage == 0 else np.array([stage, microbatch, 1])

    def backward_weights(self, stage: int, microbatch: int) -> None:
        time.sleep(self.unit)


def sleep_through(world: Any, schedule: Schedule, unit: float) -> list[list[Any]] | None:
    """Every rank's computes on rank 0, as what can travel between processes."""
    timeline = Timeline(world.rank)
    executor = Executor(schedule, world, recorder=timeline)
    world.barrier()
    executor.run(Sleeper(schedule.stages, unit))
    timelines = timeline.collect(world)
    return (
        None
        if timelines is None
        else [
            [
                span.rank,
                span.instruction.word,
                span.instruction.stage,
                span.instruction.microbatch,
                span.start,
                span.stop,
            ]
            for span in computes_of(timelines)
        ]
    )


def slept(schedule: Schedule, unit: float, transport: str = "threads") -> list[ComputeSpan]:
    """The spans of a run of stages that sleep."""
    kinds = {kind.word: kind for kind in COMPUTES}
    return [
        ComputeSpan(rank, kinds[word](stage, microbatch), start, stop)
        for rank, word, stage, microbatch, start, stop in md.run(
            sleep_through, schedule, unit, size=schedule.ranks, transport=transport
        )[0]
    ]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "transport"),
    [
        *((name, "threads-unbuffered") for name in SCHEDULES),
        ("interleaved", "tcp"),
        ("zb-h1", "shm"),
    ],
)
def test_the_measured_timeline_is_the_schedule(name: str, transport: str) -> None:
    """Each message is the right one (the sleepers look), every dependency holds, each rank computes
    in its order."""
    schedule = make_schedule(name, 3, 4)
    spans = slept(schedule, 0.0, transport)
    assert not broken(spans)
    for rank in range(3):
        assert [span.instruction for span in spans if span.rank == rank] == schedule.computes(rank)


def nearest_bubble(
    schedule: Schedule, ideal: float, *, unit: float, bound: float, transport: str = "threads"
) -> float:
    """Of stages that sleep. Several runs, for a machine with other work wakes them late; a worker
    that waits where it must not is late in all of them.
    """
    nearest = 1.0
    for _ in range(8):
        bubble = Clock(schedule.ranks, tuple(slept(schedule, unit, transport))).bubble
        nearest = min(nearest, bubble, key=lambda value: abs(value - ideal))
        if abs(nearest - ideal) < bound:
            break
    return nearest


# of seconds: by default test_the_measured_timeline_is_the_schedule holds the order
@pytest.mark.soak
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_measured_bubble_is_the_ideal_one(name: str) -> None:
    schedule = make_schedule(name, 3, 3)
    ideal = clock_of(schedule, Times()).bubble
    assert abs(nearest_bubble(schedule, ideal, unit=0.006, bound=0.05) - ideal) < 0.05


class Together(Sleeper):
    """Two stages; who receives is at work on a message until the other works on the next but one.
    `alone`: on which nobody was within `limit` seconds.
    """

    def __init__(self, microbatches: int, limit: float) -> None:
        super().__init__(2, 0.0)
        self.microbatches = microbatches
        self.limit = limit
        self.begun: set[tuple[str, int, int]] = set()
        self.alone: list[tuple[str, int]] = []
        self.changed = threading.Condition()

    def at_work(
        self, what: str, stage: int, microbatch: int, other: tuple[str, int, int] | None
    ) -> None:
        with self.changed:
            self.begun.add((what, stage, microbatch))
            self.changed.notify_all()
            if other is not None and not self.changed.wait_for(
                lambda: other in self.begun, self.limit
            ):
                self.alone.append((what, microbatch))

    def forward(self, stage: int, microbatch: int, x: Any) -> Any:
        last = stage == 0 or microbatch + 2 >= self.microbatches
        self.at_work("forward", stage, microbatch, None if last else ("forward", 0, microbatch + 2))
        return super().forward(stage, microbatch, x)

    def backward(self, stage: int, microbatch: int, dy: Any, *, whole: bool) -> Any:
        last = stage == 1 or microbatch < 2
        self.at_work(
            "backward", stage, microbatch, None if last else ("backward", 1, microbatch - 2)
        )
        return super().backward(stage, microbatch, dy, whole=whole)


def wait_for_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake that both tests below must see."""
    start = Executor._start_send
    monkeypatch.setattr(
        Executor, "_start_send", lambda self, send: (start(self, send), self._end_sends(wait=True))
    )


@pytest.mark.parametrize("sends", ["on the side", "waiting"])
def test_a_rank_works_on_while_nobody_takes_what_it_sent(
    sends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over links on which a message has left when it is taken, and who computes takes none."""
    if sends == "waiting":
        wait_for_what_is_sent(monkeypatch)
    stages = Together(5, 20.0 if sends == "on the side" else 0.1)
    schedule = make_schedule("gpipe", 2, 5)
    md.run(
        lambda world: Executor(schedule, world).run(stages), size=2, transport="threads-unbuffered"
    )
    alone = (
        []
        if sends == "on the side"
        else [*(("forward", m) for m in (0, 1, 2)), *(("backward", m) for m in (4, 3, 2))]
    )
    assert stages.alone == alone


@pytest.mark.soak  # of seconds
@pytest.mark.parametrize("sends", ["on the side", "waiting"])
def test_activations_travel_while_the_next_microbatch_is_computed(
    sends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message is on its way as long as a forward takes: in the clock's time; or, if a rank waited
    for what it sends, another forward for each of five microbatches.
    """
    unit = 0.02
    schedule = make_schedule("gpipe", 2, 5)
    if sends == "waiting":
        wait_for_what_is_sent(monkeypatch)

    def job(world: Any) -> float:
        with delayed(world, alpha=0.0, beta=unit / np.zeros(3, int).nbytes) as slow:
            executor = Executor(schedule, slow)
            world.barrier()
            begin = time.perf_counter()
            executor.run(Sleeper(schedule.stages, unit))
            return time.perf_counter() - begin

    taken = 9.0
    ideal = unit * clock_of(schedule, Times(message=1.0)).length
    for _ in range(5 if sends == "on the side" else 1):  # other programs can only add to it
        taken = min(taken, max(md.run(job, size=2)))
        if taken < ideal + 2.5 * unit:
            break
    assert (taken < ideal + 2.5 * unit) == (sends == "on the side")


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["threads", "tcp"])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 6), (4, 4), (4, 8)])
@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("gpipe", lambda p, m: (p - 1) / (m + p - 1)),
        ("1f1b", lambda p, m: (p - 1) / (m + p - 1)),
        ("interleaved", lambda p, m: (p - 1) / (2 * m + p - 1)),
        ("zb-h1", lambda p, m: (p - 1) / (3 * m + p - 1)),
    ],
)
def test_the_measured_bubble_is_the_formulas(
    name: str, formula: Any, p: int, m: int, transport: str
) -> None:
    """The nearest two formulas, interleaved and zb-h1 of p = 4, m = 8, are more than twice the
    bound apart."""
    ideal = formula(p, m)
    nearest = nearest_bubble(
        make_schedule(name, p, m), ideal, unit=0.04, bound=0.02, transport=transport
    )
    assert abs(nearest - ideal) < 0.02


# ----------------------------------------------------------------------------------------- mistakes


def test_what_cannot_work_is_refused_before_anything_runs() -> None:
    def job(world: Any, size: int, layers: list[int] | None) -> None:
        Pipeline(GPT(tiny(layers=2)), world, make_schedule("1f1b", size, 4), seed=0, layers=layers)

    with pytest.raises(ScheduleError, match="is for 3 ranks, and the group has 2; make it for 2"):
        md.run(job, 3, None, size=2)
    with pytest.raises(ShardError, match="must add up to 2"):
        md.run(job, 2, [2, 2], size=2)
    with pytest.raises(ShardError, match="use at most 4"):
        md.run(job, 5, None, size=5)


def test_a_schedule_must_be_checked_before_it_runs() -> None:
    right = make_schedule("1f1b", 2, 2)
    unchecked = Schedule(right.name, right.ranks, right.microbatches, right.chunks, right.lists)
    assert (
        unchecked == right and not unchecked.checked and right.checked and check(unchecked).checked
    )
    with pytest.raises(
        ScheduleError, match=r"schedule 1f1b was not checked, .* pass what schedule_checker.check"
    ):
        md.run(lambda world: Executor(unchecked, world), size=2)
