"""DDP: equal to one process, at the cost its docstring states, whatever the batch and whoever uses
what."""

import hashlib
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import Bug, check_caught
from training import (
    CHOICES,
    SMALL_BUCKETS,
    Chooser,
    difference,
    global_batch,
    tiny,
    train,
)

import minidist as md
from minidist.autograd import ops
from minidist.autograd.tensor import Parameter, tensor
from minidist.comm.collectives.ring import STRETCH_BYTES
from minidist.errors import ConfigError, GradientError, MismatchError
from minidist.nn import GPT, Module
from minidist.optim import SGD, AdamW
from minidist.parallel.data import ddp as ddp_module
from minidist.parallel.data.ddp import DDP
from minidist.parallel.step import step as update
from minidist.parallel.step.single import Single

BOUND = 1e-10


def run(size: int, **options: Any) -> list[dict[str, Any]]:
    """`train` on `size` threads."""
    return md.run(lambda world: train(world, **options), size=size)


# --------------------------------------------------------------------------- parallel equals serial
# tests/parallel/test_parity.py has whole trainings on fixed sizes, over every transport


any_job = given(
    size=st.integers(1, 8),
    options=st.fixed_dictionaries(
        {
            "sequences": st.integers(1, 9),
            "bucket_bytes": st.sampled_from([1, 500, 4096, 1 << 20]),
            "optimizer": st.sampled_from(["adamw", "adam", "sgd", "rmsprop"]),
            "clip": st.sampled_from([None, 0.1]),
            "config": st.builds(
                tiny,
                tied=st.booleans(),
                layers=st.just(1),
                dropout=st.sampled_from([0.0, 0.2]),
                positions=st.sampled_from(["learned", "rotary"]),
            ),
        }
    ),
)


@settings(max_examples=3)
@any_job
def test_any_job(size: int, options: dict[str, Any]) -> None:
    """Uneven parts, ranks without a sequence, a bucket a parameter, one bucket for all, a weight
    used twice."""
    check_equal(size, steps=2, **options)


@pytest.mark.soak
@settings(max_examples=300)
@any_job
def test_very_many_jobs(size: int, options: dict[str, Any]) -> None:
    """The same, more often."""
    check_equal(size, steps=2, **options)


def check_equal(size: int, **options: Any) -> None:
    """Ranks equal one process and each other."""
    ranks = run(size, **options)
    serial = run(1, **options)[0]
    assert difference(ranks[0]["weights"], serial["weights"]) < BOUND
    np.testing.assert_allclose(ranks[0]["losses"], serial["losses"], rtol=1e-12)
    assert len({rank["digest"] for rank in ranks}) == 1


def test_float32_stays_close() -> None:
    options: dict[str, Any] = {"config": tiny(dtype="float32")}
    ranks = run(3, **options)
    alone = run(1, **options)[0]
    assert len({rank["digest"] for rank in ranks}) == 1
    # Adam makes steps of lr = 1e-2 of a gradient that is zero but for rounding; the model's largest
    # weight is 1
    assert difference(ranks[0]["weights"], alone["weights"]) < 1e-2


# -------------------------------------------------------------------- the parity test sees the bugs


BUGS = [
    Bug(
        "averages twice",
        DDP,
        "forward",
        lambda right, self, part, divisor: right(self, part, divisor=divisor * 3),
    ),
    Bug("skips a bucket", DDP, "_start_reduce", lambda right, self, index: right(self, 0)),
    Bug(
        "local divisor",
        DDP,
        "forward",
        lambda right, self, part, divisor: right(self, part, divisor=3 * part.targets.size),
    ),
]


@pytest.mark.sampled
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bugs_break_parity(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without clipping and with SGD: Adam and clipping forgive a wrong scale."""
    check_caught(bug, partial(check_equal, 3, steps=2, optimizer="sgd", clip=None), monkeypatch)


# -------------------------------------------------------------------------------- unused parameters


def choose(world: Any, *, bucket_bytes: int = 1) -> list[np.ndarray]:
    model = Chooser()
    optimizer = AdamW(model.parameters(), 0.1)
    strategy: Any = (
        Single(model) if world.size == 1 else DDP(model, world, bucket_bytes=bucket_bytes)
    )
    for batch in CHOICES:
        strategy.step((batch, batch), optimizer)
    return [weight.data.copy() for weight in model.weights]


@pytest.mark.sampled
@pytest.mark.parametrize("bucket_bytes", [1, 60, 1 << 20])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_that_use_different_parameters(size: int, bucket_bytes: int) -> None:
    serial = md.run(choose, size=1)[0]
    for weights in md.run(lambda world: choose(world, bucket_bytes=bucket_bytes), size=size):
        np.testing.assert_allclose(weights, serial, rtol=1e-12)


class Chain(Module):
    """y = x·w0·w1·…, declared in the order of use, or the other way round; the weights from `used`
    on are not used."""

    def __init__(self, *, used: int = 4, reverse: bool = False) -> None:
        weights = [Parameter(np.eye(2) * (1.0 + 0.1 * i) + 0.01 * i) for i in range(6)]
        self.weights = weights[::-1] if reverse else weights
        self.used = used
        self.reverse = reverse
        self.assign_names()

    def forward(self, x: Any) -> Any:
        for weight in (self.weights[::-1] if self.reverse else self.weights)[: self.used]:
            x = x @ weight
        return x

    def loss(self, inputs: np.ndarray, targets: np.ndarray, divisor: int) -> Any:
        y = self(tensor(inputs))
        return ops.sum(y * y) * (1.0 / divisor)


ROWS = [(np.arange(6.0).reshape(3, 2) * (step + 1) / 10, np.zeros((3, 2))) for step in range(4)]


def train_chain(
    world: Any,
    *,
    accumulate: int = 1,
    steps: int = 4,
    used: int = 4,
    reverse: bool = False,
    **options: Any,
) -> tuple[list[list[str]], list[np.ndarray], list[int]]:
    """Of each step which gradients came and which buckets set out, in order; the weights; bytes
    sent in each step."""
    model = Chain(used=used, reverse=reverse)
    log = []
    strategy: Any = (
        Single(model) if world.size == 1 else DDP(model, world, bucket_bytes=64, **options)
    )
    optimizer = AdamW(strategy.parameters, 0.1)
    sent = []
    for parameter in model.parameters():
        parameter.hooks.insert(0, lambda parameter: log[-1].append(parameter.name))
    if world.size > 1:
        start = strategy._bucket_order.start
        strategy._bucket_order.start = lambda index: (
            log[-1].append(f"bucket {index}"),
            start(index),
        )
    for batch in ROWS[:steps]:
        log.append([])
        before = sum(world.ledger.sent_bytes().get("world", {}).values())
        strategy.step(batch, optimizer, accumulate=accumulate)
        sent.append(sum(world.ledger.sent_bytes().get("world", {}).values()) - before)
    return log, [weight.data.copy() for weight in model.weights], sent


def test_an_unused_parameter_keeps_no_bucket_waiting() -> None:
    """Buckets of two weights each: 0 has the unused ones, and sets out before any gradient is
    there."""
    for log, _, _ in md.run(train_chain, size=2):
        assert log[0] == [
            "bucket 0",
            "weights.3",
            "weights.2",
            "bucket 1",
            "weights.1",
            "weights.0",
            "bucket 2",
        ]


@pytest.mark.parametrize(("accumulate", "size"), [(1, 2), (2, 2), (2, 5)])
def test_an_unused_parameter_can_be_an_error(accumulate: int, size: int) -> None:
    """It names the rank and the parameters; ranks 3 and 4 without a row (5 ranks, 3 rows) have made
    no mistake."""

    def job(world: Any) -> None:
        says = (
            f"DDP rank {world.rank} of {size}: the loss does not depend on 'weights.5', 'weights.4'"
        )
        with pytest.raises(GradientError, match=says):
            train_chain(world, unused="error", accumulate=accumulate, steps=1)

    if size < 4:
        md.run(job, size=size)
    else:
        with pytest.raises(
            GradientError, match=r"DDP rank [012] of 5: the loss does not depend on 'weights.5'"
        ):
            md.run(
                lambda world: train_chain(world, unused="error", accumulate=accumulate, used=5),
                size=size,
            )
        md.run(
            lambda world: train_chain(world, unused="error", accumulate=accumulate, used=6),
            size=size,
        )
    with pytest.raises(ConfigError, match="unused='ignore'; choose one of zero, error"):
        md.run(lambda world: DDP(Chain(), world, unused="ignore"), size=1)


def test_a_weight_that_is_frozen_later_is_not_missed() -> None:
    def job(world: Any) -> None:
        model = Chain(used=6)
        strategy = DDP(model, world, bucket_bytes=64, unused="error")
        optimizer = AdamW(strategy.parameters, 0.1)
        strategy.step(ROWS[0], optimizer)
        model.weights[5].requires_grad = False
        strategy.step(ROWS[1], optimizer)

    md.run(job, size=2)


def test_a_weight_of_an_earlier_pass_is_used() -> None:
    """With unused='error' the passes of a step count together."""

    def job(world: Any) -> None:
        model = Chooser()
        strategy = DDP(model, world, unused="error")
        rows = np.array([[1], [2], [3], [4]] * world.size)
        strategy.step((rows, rows), AdamW(strategy.parameters, 0.1), accumulate=4)

    md.run(job, size=2)


@pytest.mark.sampled
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("reverse", [False, True])
def test_static_buckets_follow_the_first_step(size: int, reverse: bool) -> None:
    """Declared against the order of use nothing overlaps in step 1; from step 2 on all does; unused
    ones stay home."""
    serial = md.run(lambda world: train_chain(world, reverse=reverse), size=1)[0][1]
    names = [f"weights.{5 - i if reverse else i}" for i in (3, 2, 1, 0)]
    ranks = md.run(lambda world: train_chain(world, reverse=reverse, static=True), size=size)
    for step, weights_sent in enumerate((6, 4, 4, 4)):
        assert sum(sent[step] for _, _, sent in ranks) == 2 * (size - 1) * 32 * weights_sent
    for rank, (log, weights, _) in enumerate(ranks):
        np.testing.assert_allclose(weights, serial, rtol=1e-12)
        if rank < 3:  # three rows
            assert log[0].index("bucket 0") == (4 if reverse else 0)
            assert log[1] == log[3] == [*names[:2], "bucket 0", *names[2:], "bucket 1"]
        else:
            assert log[1] == ["bucket 0", "bucket 1"]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "changes", [{}, {"tied": True}, {"activation": "silu", "norm": "rms"}], ids=str
)
def test_a_plan_needs_no_static(changes: dict[str, Any]) -> None:
    """A GPT completes all its gradients, module by module, in the order in which buckets are
    cut."""
    config = tiny(**changes)

    def job(world: Any, static: bool) -> list[str]:
        model = GPT(config)
        model.initialize(0)
        strategy = DDP(model, world, static=static, bucket_bytes=1)
        optimizer = AdamW(strategy.parameters, 0.1)
        for step in range(2):
            strategy.step(global_batch(step, 4, config), optimizer)
        names = [
            p.name.rpartition(".")[0] for bucket in strategy.buckets for p in bucket.parameters
        ]
        assert len(names) == len(list(model.parameters()))
        return names

    declared, completed = (md.run(job, static, size=2)[0] for static in (False, True))
    assert declared == completed


def test_static_refuses_another_graph() -> None:
    def job(world: Any) -> None:
        model = Chain()
        strategy = DDP(model, world, static=True)
        optimizer = AdamW(strategy.parameters, 0.1)
        strategy.step(ROWS[0], optimizer)
        strategy.step(ROWS[1], optimizer)
        model.used = 6
        with pytest.raises(
            GradientError, match=r"'weights\.5' has a gradient now, but had none in the first step"
        ):
            strategy.step(ROWS[2], optimizer)

    md.run(job, size=2)


def test_static_agrees_where_ranks_use_different_parameters() -> None:
    """Rank 0's order first, then what others alone used: the same buckets everywhere, and
    parity."""

    def job(world: Any, static: bool) -> tuple[list[np.ndarray], list[list[str]]]:
        model = Chooser()
        strategy: Any = (
            Single(model) if world.size == 1 else DDP(model, world, bucket_bytes=1, static=static)
        )
        optimizer = AdamW(strategy.parameters, 0.1)
        for _ in range(3):
            strategy.step((CHOICES[0], CHOICES[0]), optimizer)
        return (
            [weight.data.copy() for weight in model.weights],
            [[p.name for p in bucket.parameters] for bucket in getattr(strategy, "buckets", [])],
        )

    serial = md.run(job, False, size=1)[0][0]
    for weights, buckets in md.run(job, True, size=3):
        np.testing.assert_allclose(weights, serial, rtol=1e-12)
        assert sorted(buckets) == [["weights.0"], ["weights.1"], ["weights.2"], ["weights.3"]]
        assert buckets[2:] == [["weights.2"], ["weights.3"]]


def test_the_last_steps_gradients_are_not_added_to() -> None:
    def job(world: Any) -> None:
        model = GPT(tiny())
        model.initialize(0)
        strategy = DDP(model, world)
        batch = global_batch(0, 2, tiny())
        for last in (False, True):  # the passes of one step
            strategy.backward(
                strategy.forward(strategy.part_of(batch), divisor=batch[1].size), last=last
            )
        with pytest.raises(
            GradientError, match=r"gradient of 'head.weight' is still there.*optimizer\.zero_grad"
        ):
            strategy.backward(strategy.forward(strategy.part_of(batch), divisor=batch[1].size))
        model.zero_grad()
        strategy.backward(strategy.forward(strategy.part_of(batch), divisor=batch[1].size))

    md.run(job, size=2)


def test_frozen_weights_stay_and_are_not_sent() -> None:
    def job(world: Any) -> tuple[bool, int, int]:
        model = GPT(tiny())
        model.initialize(0)
        model.tokens.weight.requires_grad = False
        before = model.tokens.weight.data.copy()
        strategy = DDP(model, world)
        strategy.step(global_batch(0, 4, tiny()), AdamW(strategy.parameters, 0.1))
        return (
            np.array_equal(before, model.tokens.weight.data),
            sum(bucket.data.size for bucket in strategy.buckets),
            sum(p.size for p in model.parameters()) - before.size,
        )

    for same, reduced, learning in md.run(job, size=2):
        assert same and reduced == learning


# ------------------------------------------------------------------------------------ what it costs


@pytest.mark.sampled
@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_bytes_and_messages_are_the_formula(size: int) -> None:
    steps = 2
    ranks = run(size, steps=2, sequences=7)
    model = GPT(tiny())
    model.initialize(0)
    nbytes = sum(p.data.nbytes for p in model.parameters())
    buckets = len(ddp_module.make_buckets(model.parameters(), SMALL_BUCKETS))
    assert (
        sum(rank["sent"]["dp"]["all_reduce"] for rank in ranks) == steps * 2 * (size - 1) * nbytes
    )
    for rank in ranks:
        assert rank["sent"].keys() == {"dp", "control"} and rank["sent"]["dp"].keys() == {
            "all_reduce"
        }
        assert rank["messages"]["dp"]["all_reduce"] == steps * 2 * (size - 1) * buckets
        assert (
            abs(rank["sent"]["dp"]["all_reduce"] - steps * 2 * (size - 1) / size * nbytes)
            <= steps * buckets * 2 * 8
        )
        # of each rank its loss and the digests of its batch
        assert sum(rank["sent"]["control"].values()) == steps * (8 + 16) * (size - 1)


class Wide(Module):
    """One weight of more than two stretches of a ring (collectives/ring.py), and a small one."""

    def __init__(self) -> None:
        self.weights = [Parameter(np.ones(2 * STRETCH_BYTES // 8 + 1)), Parameter(np.ones(3))]
        self.assign_names()

    def forward(self, inputs: np.ndarray) -> Any:
        return (ops.sum(self.weights[0]) + ops.sum(self.weights[1])) * float(inputs.sum())

    def loss(self, inputs: np.ndarray, targets: np.ndarray, divisor: int) -> Any:
        return self(inputs) * (1.0 / divisor)


@pytest.mark.sampled
@pytest.mark.parametrize("size", [2, 3])
def test_a_large_bucket_goes_round_in_stretches(size: int) -> None:
    """2(P-1) messages for each 4 MiB of a bucket: 3 stretches and 1 here; bytes as for small
    buckets."""

    def job(world: Any) -> tuple[int, int, int]:
        strategy = DDP(Wide(), world)
        ids = np.ones((size, 1), np.int64)
        strategy.step((ids, ids), SGD(strategy.parameters, 0.1))
        rows = [row for row in world.ledger.rows() if row["verb"] == "all_reduce"]
        return (
            sum(row["messages"] for row in rows),
            sum(row["nbytes"] for row in rows),
            sum(bucket.data.nbytes for bucket in strategy.buckets),
        )

    ranks = md.run(job, size=size)
    assert [messages for messages, _, _ in ranks] == [2 * (size - 1) * (3 + 1)] * size
    assert sum(sent for _, sent, _ in ranks) == 2 * (size - 1) * ranks[0][2]


@pytest.mark.parametrize(("dtype", "size"), [("float32", 1), ("float32", 3), ("float64", 2)])
def test_sixteen_bytes_a_parameter(dtype: str, size: int) -> None:
    """4 + 4 + 8 in float32 with Adam, on one device and on each replica; twice that in float64."""
    for rank in run(size, config=tiny(dtype=dtype)):
        count = sum(array.size for array in rank["weights"].values())
        itemsize = np.dtype(dtype).itemsize
        now = [
            rank["memory"][category]["now"] for category in ("parameters", "gradients", "optimizer")
        ]
        assert now == [itemsize * count, itemsize * count, 2 * itemsize * count]


# -------------------------------------------------------------------------------------------- order


class Notebook:
    """A recorder that remembers the order of what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def span(self, name: str, category: str = "compute", **details: Any) -> Any:
        book = self

        class Span:
            def __enter__(self) -> None:
                book.lines.append(f"{name} begins")

            def __exit__(self, *error: object) -> None:
                book.lines.append(f"{name} ends")

        return Span()

    def announce(self, axis: str, name: str) -> None:
        self.lines.append(name)


def test_buckets_set_out_in_order_during_backward() -> None:
    def job(world: Any) -> list[str]:
        model = GPT(tiny())
        model.initialize(0)
        book = Notebook()
        strategy = DDP(model, world, bucket_bytes=SMALL_BUCKETS, recorder=book)
        strategy.step(global_batch(0, 4, tiny()), AdamW(strategy.parameters, 0.1))
        return book.lines

    for lines in md.run(job, size=2):
        reduced = [line for line in lines if line.startswith("all_reduce")]
        assert len(reduced) > 2 and reduced == [
            f"all_reduce bucket {i}" for i in range(len(reduced))
        ]
        assert lines.index(reduced[-2]) < lines.index("backward ends")


# ----------------------------------------------------------------------------------------- mistakes


def test_replicas_that_start_different_are_refused() -> None:
    def job(world: Any) -> str:
        model = GPT(tiny())
        model.initialize(seed=world.rank // 2)
        with pytest.raises(MismatchError) as caught:
            DDP(model, world)
        return str(caught.value)

    for rank, message in enumerate(md.run(job, size=3)):
        assert f"rank {rank} of 3" in message and "ranks [2] differ" in message


def test_backward_behind_its_back_is_refused() -> None:
    def job(world: Any) -> None:
        model = GPT(tiny())
        model.initialize(0)
        DDP(model, world)
        inputs, targets = global_batch(0, 2, tiny())
        with pytest.raises(GradientError, match="DDP.backward"):
            model.loss(inputs, targets, targets.size).backward()

    md.run(job, size=2)


def test_parts_are_array_splits() -> None:
    ids = np.arange(14).reshape(7, 2)
    for size in range(1, 10):
        for rank, expected in enumerate(np.array_split(ids, size)):
            part = update.part_of((ids, ids + 1), size=size, rank=rank)
            np.testing.assert_array_equal(part.inputs, expected)
            np.testing.assert_array_equal(part.targets, expected + 1)
            assert not len(expected) or part.first == expected[0, 0] // 2


def test_digest_is_over_names_in_order_little_endian() -> None:
    from minidist.parallel.step.replicas import weights_digest

    first = np.arange(3, dtype=np.float32)
    second = np.ones((2, 2), np.float64)
    expected = hashlib.sha256(
        first.astype("<f4").tobytes() + second.astype("<f8").tobytes()
    ).hexdigest()
    assert weights_digest({"b": second, "a": first}) == expected
    assert weights_digest({"a": first.astype(">f4"), "b": second}) == expected
