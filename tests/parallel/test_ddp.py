"""DDP: equal to one process, at the cost its docstring states, whatever the batch and whoever uses what."""

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training import CHOICES, SMALL_BUCKETS, Chooser, difference, global_batch, tiny, train, train_tiny

import minidist as md
from minidist.errors import GradientError, MismatchError
from minidist.nn import GPT
from minidist.optim import AdamW
from minidist.parallel import ddp as ddp_module
from minidist.parallel.common import update
from minidist.parallel.ddp import DDP
from minidist.parallel.single import Single

BOUND = 1e-10


def run(size: int, **options: Any) -> list[dict[str, Any]]:
    """`train` on `size` threads."""
    return md.run(lambda world: train(world, **options), size=size)


@pytest.fixture(scope="module")
def serial() -> dict[str, Any]:
    """One process, three steps of five sequences."""
    return run(1)[0]


# ------------------------------------------------------------------------------------------- parallel equals serial

@pytest.mark.parametrize("size", [2, 3, 4])
def test_equals_one_process(serial: dict[str, Any], size: int) -> None:
    ranks = run(size)
    assert difference(ranks[0]["weights"], serial["weights"]) < BOUND
    np.testing.assert_allclose(ranks[0]["losses"], serial["losses"], rtol=1e-12)
    assert len({rank["digest"] for rank in ranks}) == 1          # the same bits on all ranks
    assert len({tuple(rank["losses"]) for rank in ranks}) == 1
    assert run(size)[0]["digest"] == ranks[0]["digest"]          # and on a second run


@pytest.mark.parametrize("transport", ["threads-unbuffered", "sockets", "shm", "mpi"])
def test_same_bits_on_every_transport(serial: dict[str, Any], transport: str) -> None:
    over_threads, over_processes = run(3)[0], md.run(train_tiny, {}, {}, size=3, transport=transport)[0]
    assert difference(over_processes["weights"], serial["weights"]) < BOUND
    assert over_processes["digest"] == over_threads["digest"]


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["threads", "threads-unbuffered", "sockets", "shm", "mpi"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_equals_one_process_after_twenty_steps(transport: str, size: int) -> None:
    changes, options = {"context": 16, "width": 16, "layers": 3}, {"steps": 20, "sequences": 9}
    serial, again = (md.run(train_tiny, changes, options, size=count)[0] for count in (1, size))
    ranks = md.run(train_tiny, changes, options, size=size, transport=transport)
    assert difference(ranks[0]["weights"], serial["weights"]) < BOUND
    assert {rank["digest"] for rank in ranks} == {again["digest"]}


any_job = given(size=st.integers(1, 8), options=st.fixed_dictionaries({
    "sequences": st.integers(1, 9), "bucket_bytes": st.sampled_from([1, 500, 4096, 1 << 20]),
    "optimizer": st.sampled_from(["adamw", "adam", "sgd", "rmsprop"]), "clip": st.sampled_from([None, 0.1]),
    "config": st.builds(tiny, tied=st.booleans(), layers=st.just(1), dropout=st.sampled_from([0.0, 0.2]),
                        positions=st.sampled_from(["learned", "rotary"]))}))


@settings(max_examples=12)
@any_job
def test_any_job(size: int, options: dict[str, Any]) -> None:
    """Uneven parts, ranks without a sequence, a bucket a parameter, one bucket for all, a weight used twice."""
    check_job(size, options)


@pytest.mark.soak
@settings(max_examples=300)
@any_job
def test_very_many_jobs(size: int, options: dict[str, Any]) -> None:
    """The same, more often."""
    check_job(size, options)


def check_job(size: int, options: dict[str, Any]) -> None:
    """Ranks equal one process and each other."""
    ranks, serial = run(size, steps=2, **options), run(1, steps=2, **options)[0]
    assert difference(ranks[0]["weights"], serial["weights"]) < BOUND
    np.testing.assert_allclose(ranks[0]["losses"], serial["losses"], rtol=1e-12)
    assert len({rank["digest"] for rank in ranks}) == 1


def test_float32_stays_close(serial: dict[str, Any]) -> None:
    options: dict[str, Any] = {"config": tiny(dtype="float32")}
    ranks, alone = run(3, **options), run(1, **options)[0]
    assert len({rank["digest"] for rank in ranks}) == 1
    # Adam makes steps of lr = 1e-2 of a gradient that is zero but for rounding; the model's largest weight is 1
    assert difference(ranks[0]["weights"], alone["weights"]) < 1e-2


# --------------------------------------------------------------------------------------- the parity test sees the bugs

@pytest.mark.parametrize("bug", ["averages twice", "skips a bucket", "local divisor"])
def test_planted_bugs_break_parity(serial: dict[str, Any], bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without clipping and with SGD: Adam and clipping forgive a wrong scale."""
    options: dict[str, Any] = {"optimizer": "sgd", "clip": None}
    forward, start = DDP.forward, DDP._start_reduce
    if bug == "averages twice":
        monkeypatch.setattr(DDP, "forward", lambda self, part, divisor: forward(self, part, divisor=divisor * 3))
    elif bug == "local divisor":
        monkeypatch.setattr(DDP, "forward", lambda self, part, divisor:
                            forward(self, part, divisor=3 * part.targets.size))
    else:
        monkeypatch.setattr(DDP, "_start_reduce", lambda self, index: start(self, 0))
    wrong = run(3, **options)[0]
    monkeypatch.undo()
    right = run(1, **options)[0]
    assert difference(run(3, **options)[0]["weights"], right["weights"]) < BOUND
    assert not difference(wrong["weights"], right["weights"]) < 1e-6


# ---------------------------------------------------------------------------------------------- unused parameters

def choose(world: Any, *, bucket_bytes: int = 1) -> list[np.ndarray]:
    model = Chooser()
    optimizer = AdamW(model.parameters(), 0.1)
    strategy: Any = Single(model) if world.size == 1 else DDP(model, world, bucket_bytes=bucket_bytes)
    for batch in CHOICES:
        strategy.step((batch, batch), optimizer)
    return [weight.data.copy() for weight in model.weights]


@pytest.mark.parametrize("bucket_bytes", [1, 60, 1 << 20])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_that_use_different_parameters(size: int, bucket_bytes: int) -> None:
    serial = md.run(choose, size=1)[0]
    for weights in md.run(lambda world: choose(world, bucket_bytes=bucket_bytes), size=size):
        np.testing.assert_allclose(weights, serial, rtol=1e-12)


# -------------------------------------------------------------------------------------------------------- what it costs

@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_bytes_and_messages_are_the_formula(size: int) -> None:
    steps, ranks = 2, run(size, steps=2, sequences=7)
    model = GPT(tiny())
    model.initialize(0)
    nbytes = sum(p.data.nbytes for p in model.parameters())
    buckets = len(ddp_module.make_buckets(model.parameters(), SMALL_BUCKETS))
    assert sum(rank["sent"]["dp"]["all_reduce"] for rank in ranks) == steps * 2 * (size - 1) * nbytes
    for rank in ranks:
        assert rank["sent"].keys() == {"dp", "control"} and rank["sent"]["dp"].keys() == {"all_reduce"}
        assert rank["messages"]["dp"]["all_reduce"] == steps * 2 * (size - 1) * buckets
        assert abs(rank["sent"]["dp"]["all_reduce"] - steps * 2 * (size - 1) / size * nbytes) <= steps * buckets * 2 * 8
        assert sum(rank["sent"]["control"].values()) <= steps * 8 * (size - 1)     # one float64, the loss


@pytest.mark.parametrize(("dtype", "size"), [("float32", 1), ("float32", 3), ("float64", 2)])
def test_sixteen_bytes_a_parameter(dtype: str, size: int) -> None:
    """4 + 4 + 8 in float32 with Adam, on one device and on each replica; twice that in float64."""
    for rank in run(size, config=tiny(dtype=dtype)):
        count, itemsize = sum(array.size for array in rank["weights"].values()), np.dtype(dtype).itemsize
        now = [rank["memory"][category]["now"] for category in ("parameters", "gradients", "optimizer")]
        assert now == [itemsize * count, itemsize * count, 2 * itemsize * count]


# -------------------------------------------------------------------------------------------------------------- order

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
        assert len(reduced) > 2 and reduced == [f"all_reduce bucket {i}" for i in range(len(reduced))]
        assert lines.index(reduced[-2]) < lines.index("backward ends")


# ---------------------------------------------------------------------------------------------------------- mistakes

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
    from minidist.parallel.common.replicas import weights_digest

    first, second = np.arange(3, dtype=np.float32), np.ones((2, 2), np.float64)
    expected = hashlib.sha256(first.astype("<f4").tobytes() + second.astype("<f8").tobytes()).hexdigest()
    assert weights_digest({"b": second, "a": first}) == expected
    assert weights_digest({"a": first.astype(">f4"), "b": second}) == expected
