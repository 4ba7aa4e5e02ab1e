"""The exchange in two phases: what it computes, what it sends, and that it runs behind backward."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from summing import SHAPES, expected_bytes, gradients, sum_by
from training import SMALL_BUCKETS, global_batch, tiny

import minidist as md
from minidist.comm.calls.async_call import Pending
from minidist.comm.chunks import bounds
from minidist.nn import GPT
from minidist.optim import SGD
from minidist.parallel.compress.compress import scheme_of
from minidist.parallel.compress.two_phase import RandomStream
from minidist.parallel.data.ddp import DDP
from minidist.parallel.step.replicas import weights_digest
from minidist.parallel.zero.zero1 import Zero1
from minidist.parallel.zero.zero2 import Zero2

VERBS = ["all_reduce", "reduce_scatter"]
N = sum(math.prod(shape) for shape in SHAPES)
BYTES = {
    "fp16": lambda m: 2 * m,
    "bf16:feedback=yes": lambda m: 2 * m,
    "8bit": lambda m: 4 * math.ceil(m / 128) + m,
    "4bit": lambda m: 4 * math.ceil(m / 128) + math.ceil(m / 2),
    "8bit:block=6": lambda m: 4 * math.ceil(m / 6) + m,
    "4bit:block=10,rounding=stochastic": lambda m: 4 * math.ceil(m / 10) + math.ceil(m / 2),
}


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["float32", "float64"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("text", BYTES)
def test_bytes_are_the_formula(text: str, verb: str, size: int, kind: str) -> None:
    """(P-1) × the bytes of all chunks, in each phase."""
    chunks = sum(BYTES[text](stop - start) for start, stop in pairwise(bounds(N, size)))
    wanted = (2 if verb == "all_reduce" else 1) * (size - 1) * chunks
    assert sum_by(text, size, verb=verb, kind=kind, steps=2).bytes_on() == 2 * wanted
    assert expected_bytes(text, size, verb, kind=kind) == wanted


def reference(text: str, size: int, steps: int) -> np.ndarray:
    """The published exchange in one process, rank by rank and chunk by chunk: the sums of all
    steps."""
    codec: Any = scheme_of(text).codec  # type: ignore[attr-defined]
    edges = list(pairwise(bounds(N, size)))
    given = [gradients(rank, steps, N) for rank in range(size)]
    worker = np.zeros((size, N))
    server = np.zeros(N)
    results = []

    def sent(values: np.ndarray, stream: str) -> np.ndarray:
        return codec.decode(
            codec.encode(values, RandomStream(stream, 0, 0)), len(values), values.dtype
        )

    for step in range(steps):
        result = np.empty(N)
        for number, (start, stop) in enumerate(edges):
            total = np.zeros(stop - start)
            for rank in range(size):
                due = given[rank][step, start:stop] + worker[rank, start:stop]
                arrived = sent(due, f"p0/worker/{rank}/{number}/{step + 1}")
                worker[rank, start:stop] = due - arrived
                total += arrived
            total += server[start:stop]
            result[start:stop] = sent(total, f"p0/server/{number}/{number}/{step + 1}")
            server[start:stop] = total - result[start:stop]
        results.append(result)
    return np.array(results)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "text",
    ["8bit", "4bit:book=dynamic", "fp16:feedback=yes", "4bit:rounding=stochastic,feedback=yes"],
)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_it_is_the_published_exchange(text: str, size: int) -> None:
    np.testing.assert_array_equal(sum_by(text, size, steps=5).results[0], reference(text, size, 5))


# ------------------------------------------------------------------------------------ in a strategy


def train(
    world: Any, kind: Any, text: str, log: list[str] | None = None
) -> tuple[str, dict[str, int]]:
    """Digest of the weights after three steps, and the bytes sent for gradients and weights."""
    model = GPT(tiny())
    model.initialize(3)
    scheme = scheme_of(text)
    strategy = kind(model, world, scheme=scheme, bucket_bytes=SMALL_BUCKETS)
    if log is not None and world.rank == 0:
        listen(scheme, log)
    optimizer = SGD(strategy.parameters, 0.1)
    with world.ledger.during("step"):
        for step in range(3):
            strategy.step(global_batch(step, 5, tiny()), optimizer)
    return weights_digest(strategy.state_dict()), world.ledger.sent_bytes("step").get("world", {})


def listen(scheme: Any, log: list[str]) -> None:
    """Note each start, how many exchanges are in their first phase then, and each wait."""
    start = scheme.start_all_reduce
    under_way = list[Any]()

    def noted(index: int, bucket: np.ndarray) -> Pending:
        pending = start(index, bucket)
        under_way.append(pending)
        log.append(f"start, {sum(each._first is not None for each in under_way)} in phase 1")
        wait = pending.wait
        pending.wait = lambda: (log.append("wait"), wait())[1]
        return pending  # type: ignore[no-any-return]

    scheme.start_all_reduce = noted


@pytest.mark.sampled
@pytest.mark.parametrize("text", ["8bit", "4bit:rounding=stochastic", "fp16"])
def test_both_stages_of_zero_make_the_same_bits(text: str) -> None:
    one, two = (md.run(train, kind, text, size=3) for kind in (Zero1, Zero2))
    assert {digest for digest, _ in (*one, *two)} == {one[0][0]}
    assert one[0][1] == two[0][1]


def test_all_buckets_set_out_before_the_first_is_waited_for() -> None:
    log: list[str] = []
    md.run(lambda world: train(world, DDP, "8bit", log), size=3)
    buckets = log.count("wait") // 3
    assert buckets > 3
    assert log == (["start, 1 in phase 1"] * buckets + ["wait"] * buckets) * 3


def test_a_group_of_one_keeps_its_gradients() -> None:
    plain, compressed = (md.run(train, DDP, text, size=1)[0][0] for text in ("none", "4bit"))
    assert plain == compressed
