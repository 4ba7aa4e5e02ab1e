"""DDP and ZeRO hide most of communication; without prefetch, or in one bucket, little.

By order: between the start of a collective and the wait for it a block begins to compute, which no
other program changes. And, in the soak tests, by seconds, over links that take their time: each
block sleeps on its way forward and back.
"""

import time
from collections.abc import Callable
from typing import Any

import pytest
from training import global_batch, tiny

import minidist as md
from minidist.comm.calls.async_call import CallWorker, PendingCall
from minidist.comm.transports.throttled import delayed
from minidist.nn import GPT
from minidist.observe.overlap import measure
from minidist.observe.timeline import Timeline
from minidist.optim import SGD
from minidist.parallel.data.ddp import DDP
from minidist.parallel.zero.gradient_shards import GradientShards
from minidist.parallel.zero.replica import ParameterArrivals
from minidist.parallel.zero.zero1 import Zero1
from minidist.parallel.zero.zero2 import Zero2
from minidist.parallel.zero.zero3 import Zero3

# seconds a block
LAYERS = 16
FORWARD = 0.005
BACKWARD = 0.010
CONFIG = tiny(layers=LAYERS, width=16)
BLOCK = 8 * (12 * 16 * 16 + 13 * 16)  # bytes
BYTE = 0.003 / BLOCK  # seconds: half of a block's weights, on each of 2 ranks, take 1.5 ms


STRATEGIES = [
    (DDP, {"bucket_bytes": BLOCK}),
    (Zero1, {"bucket_bytes": BLOCK}),
    (Zero2, {"bucket_bytes": BLOCK}),
    (Zero3, {}),
    (Zero3, {"ahead": 2}),
]


# ----------------------------------------------------------------------------------------- by order


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, dict[str, Any]], list[float]]:
    """A function of strategy and options: of the bytes of each rank's second step, the share that
    hides by order."""
    # of each rank: collectives begun and waited for, and None for a block
    lines: list[list[Any]] = [[], []]
    submit = CallWorker.submit
    wait = PendingCall.wait

    def submitted(self: CallWorker, call: Any) -> PendingCall:
        pending = submit(self, call)
        lines[call.rank].append(("begun", pending))
        return pending

    def waited(self: PendingCall) -> Any:
        lines[self.call.rank].append(("waited", self))
        return wait(self)

    monkeypatch.setattr(CallWorker, "submit", submitted)
    monkeypatch.setattr(PendingCall, "wait", waited)

    def job(world: Any, stage: Any, options: dict[str, Any]) -> float:
        model = GPT(CONFIG)
        mine = lines[world.rank]
        model.initialize(0)
        strategy = stage(model, world, **options)
        for block in model.blocks:
            block.register_forward_pre_hook(lambda module, args: mine.append(None))
            block.register_backward_pre_hook(lambda module: mine.append(None))
        optimizer = SGD(strategy.parameters, 0.1)
        mine.clear()
        for step in range(2):
            second = len(mine)
            strategy.step(global_batch(step, 2, CONFIG), optimizer)
        nbytes = {
            line[1]: line[1].call.nbytes
            for line in mine[second:]
            if line and line[0] == "waited" and line[1].call.axis == "world"
        }
        return sum(
            nbytes[call]
            for call in nbytes
            if None in mine[mine.index(("begun", call)) : mine.index(("waited", call))]
        ) / sum(nbytes.values())

    return lambda stage, options: md.run(job, stage, options, size=2)


@pytest.mark.sampled
@pytest.mark.parametrize(("stage", "options"), STRATEGIES)
def test_a_block_computes_while_four_fifths_of_bytes_are_under_way(
    stage: Any, options: dict[str, Any], order: Any
) -> None:
    assert min(order(stage, options)) >= 0.8


def test_without_prefetch_no_block_computes_while_weights_come(order: Any) -> None:
    """Only sums of gradients are under way then."""
    assert max(order(Zero3, {"ahead": 0})) < 0.5


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [DDP, Zero2])
def test_no_block_computes_while_one_bucket_is_under_way(stage: Any, order: Any) -> None:
    assert max(order(stage, {"bucket_bytes": 1 << 30})) < 0.2


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("stage", "chapter", "name"),
    [
        (DDP, DDP, "_start_reduce"),
        (Zero2, GradientShards, "start"),
        (Zero2, ParameterArrivals, "start"),
        (Zero3, GradientShards, "start"),
    ],
)
def test_who_waits_for_what_it_starts_is_seen(
    stage: Any, chapter: Any, name: str, order: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = getattr(chapter, name)

    def and_waits(self: Any, *args: Any) -> None:
        start(self, *args)
        if chapter is DDP:
            self._pending[-1].wait()
        elif chapter is GradientShards:
            self.take_sum()
        else:
            self.wait_for_all()

    monkeypatch.setattr(chapter, name, and_waits)
    assert max(order(stage, {} if stage is Zero3 else {"bucket_bytes": BLOCK})) < 0.8


# --------------------------------------------------------------------------------------- by seconds


def share(world: Any, stage: Any, options: dict[str, Any]) -> float:
    """The hidden share of the second step on this rank."""
    model = GPT(CONFIG)
    timeline = Timeline(world.rank)
    model.initialize(0)
    with delayed(world, alpha=50e-6, beta=BYTE) as slow:
        timeline.follow(slow.ledger)
        strategy = stage(model, slow, recorder=timeline, **options)
        for block in model.blocks:
            block.register_forward_hook(lambda module, args, result: time.sleep(FORWARD))
            block.register_backward_pre_hook(lambda module: time.sleep(BACKWARD))
        optimizer = SGD(strategy.parameters, 0.1)
        for step in range(2):
            with timeline.span("step", step=step):
                strategy.step(global_batch(step, 2, CONFIG), optimizer)
    return measure(timeline, steps=[1]).share


@pytest.mark.soak
@pytest.mark.parametrize(("stage", "options"), STRATEGIES)
def test_four_fifths_of_communication_are_hidden(stage: Any, options: dict[str, Any]) -> None:
    """In the best of five runs: other programs can only take from it."""
    hidden = 0.0
    for _ in range(5):
        hidden = max(hidden, min(md.run(share, stage, options, size=2)))
        if hidden >= 0.8:
            break
    assert hidden >= 0.8


@pytest.mark.soak
def test_without_prefetch_the_gathers_are_not() -> None:
    """Only sums of gradients can hide then, and each gather stands in their way."""
    for hidden in md.run(share, Zero3, {"ahead": 0}, size=2):
        assert hidden < 0.5


@pytest.mark.soak
@pytest.mark.parametrize("stage", [DDP, Zero2])
def test_one_bucket_hides_little(stage: Any) -> None:
    """All gradients travel when backward has ended; the weights come in one piece, which the first
    layer waits for."""
    for hidden in md.run(share, stage, {"bucket_bytes": 1 << 30}, size=2):
        assert hidden < 0.2
