"""Sums in slices, the most urgent first: the same training as DDP's, in another order; and sooner,
as predicted."""

import threading
import time
from typing import Any

import numpy as np
import pytest
from training import difference, global_batch, tiny

import minidist as md
from minidist.comm.cost.link_model import LinkCost
from minidist.comm.transports.throttled import delayed
from minidist.errors import ConfigError
from minidist.nn import GPT
from minidist.observe.step_record import record_step
from minidist.observe.timeline import Timeline
from minidist.observe.what_if import Change, predict
from minidist.optim import SGD, AdamW
from minidist.parallel.data.ddp import DDP
from minidist.parallel.data.sliced_ddp import SlicedDDP

CONFIG = tiny()
SMALL = {"bucket_bytes": 1500, "slice_bytes": 400}


def trained(world: Any, stage: Any, options: dict[str, Any], accumulate: int = 1) -> dict[str, Any]:
    """Weights, losses, slices in order and sent bytes of three steps."""
    model = GPT(CONFIG)
    model.initialize(3)
    strategy = stage(model, world, **options)
    optimizer = AdamW(strategy.parameters, 1e-2)
    orders = []
    before = world.ledger.sent_bytes("step").get("world", {}).get("all_reduce", 0)
    losses = []
    for step in range(3):
        with world.ledger.during("step"):
            losses.append(
                strategy.step(global_batch(step, 5, CONFIG), optimizer, accumulate=accumulate)
            )
        if isinstance(strategy, SlicedDDP):
            strategy.settle()  # all of it, the next step would wait for its own alone
        orders.append(list(getattr(strategy, "order", [])))
    weights = {name: array.copy() for name, array in strategy.state_dict().items()}
    strategy.check_replicas(world)
    sent = world.ledger.sent_bytes("step")["world"]["all_reduce"] - before
    return {
        "weights": weights,
        "losses": losses,
        "orders": orders,
        "sent": sent,
        "steps": {slot.steps for slot in optimizer.slots},
    }


@pytest.mark.sampled
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("priority", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_it_trains_as_ddp(size: int, priority: bool, accumulate: int) -> None:
    ours = md.run(trained, SlicedDDP, {**SMALL, "priority": priority}, accumulate, size=size)
    plain = md.run(trained, DDP, {"bucket_bytes": 1500}, accumulate, size=size)
    assert difference(ours[0]["weights"], plain[0]["weights"]) < 1e-12
    assert ours[0]["losses"] == pytest.approx(plain[0]["losses"], rel=1e-12)
    assert sum(rank["sent"] for rank in ours) == sum(rank["sent"] for rank in plain)
    assert ours[0]["steps"] == {3}  # each tensor was updated once a step
    for rank in ours[1:]:
        assert all(
            np.array_equal(rank["weights"][name], ours[0]["weights"][name])
            for name in rank["weights"]
        )
        assert rank["orders"] == ours[0]["orders"]


class HeldLink:
    """A group on which the first all-reduce sets out at once, and the others when `opened` is
    set."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.opened = threading.Event()
        self.first = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def start_all_reduce(self, *args: Any, **options: Any) -> Any:
        held = not self.first
        self.first = False
        assert not held or self.opened.wait(20)
        return self.group.start_all_reduce(*args, **options)


class HeldDDP(SlicedDDP):
    """One slice sets out as soon as the last layer is ready; the others wait until backward has
    ended."""

    def _start_reduce(self, index: int) -> None:
        super()._start_reduce(index)
        deadline = time.monotonic() + 20
        while not self.order and time.monotonic() < deadline:
            time.sleep(0.001)


def slices_sent(world: Any) -> list[tuple[int, int]]:
    model = GPT(tiny(layers=4))
    model.initialize(0)
    strategy = HeldDDP(model, world, bucket_bytes=8 * 900, slice_bytes=1500)
    strategy._sums = link = HeldLink(strategy._sums)
    strategy.step(global_batch(0, 2, tiny(layers=4)), SGD(strategy.parameters, 0.1))
    link.opened.set()
    strategy.settle()
    return strategy.order


def test_an_urgent_slice_passes_those_that_wait() -> None:
    orders = md.run(slices_sent, size=2)
    assert orders[0] == orders[1] and len(set(orders[0])) == len(orders[0])
    last = max(urgency for urgency, _ in orders[0])
    assert orders[0][0] == (last, 0)  # the first to be ready is the last layer
    # the second is chosen when the queue is still short
    assert orders[0][2:] == sorted(orders[0][2:])
    # the first layer has passed what was ready before it
    assert orders[0][2] == (0, 0) and orders[0][-1][0] == last


@pytest.mark.parametrize("priority", [True, False])
def test_a_rank_that_fails_ends_the_others_at_once(priority: bool) -> None:
    """Rank 1 fails between two steps, while slices are on their way or about to be."""

    def job(world: Any) -> None:
        model = GPT(CONFIG)
        model.initialize(0)
        strategy = SlicedDDP(model, world, **SMALL, priority=priority)
        optimizer = SGD(strategy.parameters, 0.1)
        for step in range(3):
            if step == 2 and world.rank == 1:
                raise ValueError("rank 1 fails")
            strategy.step(global_batch(step, 4, CONFIG), optimizer)

    begun = time.monotonic()
    with pytest.raises(ValueError, match="rank 1 fails"):
        md.run(job, size=2)
    assert time.monotonic() - begun < 20


def test_clip_is_refused_and_a_slice_without_a_number() -> None:
    def job(world: Any, clip: float | None, nbytes: int) -> None:
        model = GPT(CONFIG)
        model.initialize(0)
        strategy = SlicedDDP(model, world, slice_bytes=nbytes)
        strategy.step(global_batch(0, 2, CONFIG), SGD(strategy.parameters, 0.1), clip=clip)

    with pytest.raises(ConfigError, match="clip needs the norm of the whole gradient"):
        md.run(job, 1.0, 4096, size=1)
    with pytest.raises(
        ConfigError, match="slice_bytes=7; a slice has at least one number, 8 bytes"
    ):
        md.run(job, None, 7, size=1)


# ------------------------------------------------------------------------------ a run, as predicted

SLEEPING = tiny(layers=6, width=16)
# seconds: of a block, asleep, and of the sum of its gradients
FORWARD = 0.040
BACKWARD = 0.080
SUM = 0.100
BLOCK = 8 * (12 * 16 * 16 + 13 * 16)  # bytes
ALPHA = 50e-6
SLICES = 4


def cycles(world: Any, priority: bool) -> Timeline:
    """Five times a backward and the next forward, each under the name of a step."""
    model = GPT(SLEEPING)
    timeline = Timeline(world.rank)
    model.initialize(0)
    with delayed(world, alpha=ALPHA, beta=SUM / BLOCK) as slow:
        timeline.follow(slow.ledger, waits=True)
        strategy = SlicedDDP(
            model,
            slow,
            bucket_bytes=BLOCK,
            slice_bytes=BLOCK // SLICES,
            priority=priority,
            recorder=timeline,
        )
        for block in model.blocks:
            block.register_forward_hook(lambda module, args, result: time.sleep(FORWARD))
            block.register_backward_pre_hook(lambda module: time.sleep(BACKWARD))
        optimizer = SGD(strategy.parameters, 0.1)
        batch = global_batch(0, 2, SLEEPING)
        strategy.begin_step()
        share = strategy.forward(strategy.part_of(batch), divisor=batch[1].size)
        for step in range(5):
            with timeline.span("step", step=step):
                strategy.backward(share)
                strategy.update(optimizer, lr=None, clip=None)
                strategy.begin_step()
                share = strategy.forward(strategy.part_of(batch), divisor=batch[1].size)
        strategy.settle()
    return timeline


@pytest.mark.soak
def test_priorities_save_what_a_record_without_them_predicts() -> None:
    """Within 10 %, in the best of four pairs: other programs lengthen either."""
    link = LinkCost("delayed", 2, ALPHA, 0.0, SUM / BLOCK, 0.0, 0.0)
    off = 1.0
    for _ in range(4):
        (in_turn, told) = median_of(False, link)
        ran = median_of(True, link)[0]
        print(
            f"\nin turn {1e3 * in_turn:.1f} ms, by urgency predicted {1e3 * told:.1f}, ran "
            f"{1e3 * ran:.1f}"
        )
        off = min(off, abs(told / ran - 1))
        if off <= 0.1 and ran < 0.95 * in_turn:
            break
    assert off <= 0.1
    assert ran < 0.95 * in_turn


def median_of(priority: bool, link: LinkCost) -> tuple[float, float]:
    """Seconds of the middle cycle of five, and what it is predicted to take by urgency."""
    timelines = md.run(cycles, priority, size=2)
    records = sorted(
        (record_step(timelines, step) for step in range(1, 5)), key=lambda record: record.seconds
    )
    return records[1].seconds, predict(records[1], Change(priority=True), link)
