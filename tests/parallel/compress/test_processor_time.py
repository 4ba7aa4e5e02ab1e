"""Compression pays over 1 Gbit/s: each scheme takes less processor time than the bytes that it
saves would take.

1-bit has the codec of `sign` and is not in the table; `adaptive` sends what its link bears.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest

from minidist.bench.compress.command import FULL
from minidist.comm.calls.async_call import Pending
from minidist.comm.group import Group
from minidist.device.allocator import tune_allocator
from minidist.nn import GPT
from minidist.parallel.compress.compress import scheme_of
from minidist.parallel.data.buckets import BUCKET_BYTES
from minidist.parallel.step.scheme import GradientRun

GIGABIT = 1e9 / 8  # bytes a second
# steps
WARM = 2
TIMED = 5
TEXTS = (
    "fp16",
    "bf16",
    "8bit",
    "8bit:rounding=stochastic",
    "8bit:book=dynamic",
    "4bit",
    "4bit:book=dynamic",
    "top-k",
    "threshold:value=3e-3",
    "random-k",
    "sign",
    "sign:majority=yes",
    "powersgd",
    "predict",
    "predict:codec=8bit",
    "predict:codec=sign",
)


class Arrived(Pending):
    """A call that has ended."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def wait(self) -> Any:
        return self.result

    def done(self) -> bool:
        return True


class EqualRanks:
    """A group of four whose other ranks send what this one sends: no time passes in the calls.
    sent: bytes."""

    def __init__(self) -> None:
        self.size = 4
        self.rank = 1
        self.id = 0
        self.sent = 0

    def start_all_to_all(self, parts: Sequence[np.ndarray], algorithm: str) -> Arrived:
        self.sent += sum(part.nbytes for part in parts) - parts[self.rank].nbytes
        return Arrived([parts[self.rank]] * self.size)

    def start_all_gather(self, part: np.ndarray, algorithm: str) -> Arrived:
        self.sent += (self.size - 1) * part.nbytes
        return Arrived(np.concatenate([part] * self.size))

    def start_all_reduce(self, array: np.ndarray, out: np.ndarray, algorithm: str) -> Arrived:
        self.sent += 2 * (self.size - 1) * array.nbytes // self.size
        out[...] = array * self.size
        return Arrived(out)


def buckets_of(model: GPT, limit: int) -> Iterator[list[Any]]:
    """The parameters of a bucket each."""
    bucket: list[Any] = []
    for parameter in model.parameters():
        if bucket and sum(p.data.nbytes for p in bucket) + parameter.data.nbytes > limit:
            yield bucket
            bucket = []
        bucket.append(parameter)
    yield bucket


def cost_of(text: str, model: GPT) -> tuple[float, int]:
    """(processor seconds, sent bytes) of a step of one rank: the least of five after the warm-up,
    because other programs slow a processor down."""
    group = EqualRanks()
    buckets = list(buckets_of(model, BUCKET_BYTES))
    scheme = scheme_of(text)
    scheme.attach(
        [GradientRun.whole(bucket, cast(Group, group), "all_reduce") for bucket in buckets]
    )
    random = np.random.default_rng(0)
    seconds = []
    sent = 0
    for _ in range(WARM + TIMED):
        arrays = [
            (1e-3 * random.standard_normal(run.size)).astype(np.float32) for run in scheme.runs
        ]
        before = group.sent
        begun = time.process_time()
        scheme.begin_step()
        for pending in [
            scheme.start_all_reduce(index, array) for index, array in enumerate(arrays)
        ]:
            pending.wait()
        seconds.append(time.process_time() - begun)
        sent = group.sent - before
    return min(seconds[WARM:]), sent


@pytest.mark.soak
def test_each_scheme_costs_less_than_it_saves() -> None:
    """Four ranks, 3.2 million numbers; a core for each rank. `-s` prints the table."""
    tune_allocator()
    model = GPT(FULL.config())
    model.initialize(seed=0)
    plain, whole = cost_of("none", model)
    print(f"\n{'scheme':26}{'sent MB':>9}{'saved ms':>10}{'costs ms':>10}")
    late = []
    for text in TEXTS:
        seconds, sent = cost_of(text, model)
        saved = (whole - sent) / GIGABIT
        cost = seconds - plain
        print(f"{text:26}{sent / 1e6:9.2f}{1e3 * saved:10.1f}{1e3 * cost:10.1f}")
        late += [text] if cost > saved else []
    assert whole == 2 * 3 * sum(p.data.nbytes for p in model.parameters()) // 4
    assert not late
