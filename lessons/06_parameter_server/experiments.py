"""Run the jobs that lesson 06's tables, figure and break-its share: workers and servers, some slow
or lost."""

import os
import signal
import time
from functools import partial
from typing import Any

import numpy as np

import minidist as md
from minidist.comm.group import Group
from minidist.lessons.lab import alone, held_out_loss, new_model, rule_batch, weights
from minidist.nn import GPTConfig
from minidist.observe.timeline import Timeline
from minidist.optim import Adam
from minidist.parallel.data.bounded_staleness import Update
from minidist.parallel.data.ddp import DDP
from minidist.parallel.data.parameter_server import ParameterServer
from minidist.parallel.data.replay_updates import replay

CONFIG = GPTConfig(vocabulary=31, context=8, layers=1, width=16, heads=2, dtype="float64")
SEQUENCES = 12
RATE = 1e-2


def batch(step: int, sequences: int = SEQUENCES) -> tuple[np.ndarray, np.ndarray]:
    """Return the global batch of a step."""
    return rule_batch(CONFIG, step, sequences)


HELD_OUT = batch(10_000, 64)
"""A batch that is not trained on."""


def serial(steps: int, optimizer: Any = Adam) -> np.ndarray:
    """Return the weights of one process."""
    return alone(new_model(CONFIG), partial(optimizer, lr=RATE), map(batch, range(steps)))


def serial_loss(steps: int) -> float:
    """Return the held-out loss of one process after some steps."""
    model = new_model(CONFIG)
    alone(model, partial(Adam, lr=RATE), map(batch, range(steps)))
    return held_out_loss(model, HELD_OUT)


def train(
    group: Group,
    *,
    steps: int,
    slow: dict[int, float] | None = None,
    dies: dict[int, int] | None = None,
    strategy: Any = ParameterServer,
    optimizer: Any = Adam,
    lr: float = RATE,
    **options: Any,
) -> dict[str, Any]:
    """Train on one rank of a job; return its weights, the ends of its steps, its spans, and a
    server's record.

    Args:    slow: seconds that a rank sleeps before each of its steps; dies: the step in which a rank
             ends.
             options: of the strategy.
    """
    timeline = Timeline(group.rank)
    model = new_model(CONFIG)
    server = strategy(model, group, recorder=timeline, **options)
    rule = optimizer(server.parameters, lr)
    group.barrier()
    begin = time.perf_counter()
    ends = []
    losses = []
    for step in range(steps):
        if (dies or {}).get(group.rank) == step:
            die(group)
        if slow and group.rank in slow and not getattr(server, "serves", False):
            with timeline.span("asleep"):
                time.sleep(slow[group.rank])
        losses.append(server.step(batch(step), rule))
        ends.append(time.perf_counter() - begin)
    if hasattr(server, "finish"):
        server.finish()
    serves = getattr(server, "serves", False)
    return {
        "weights": None if serves else weights(model),
        "losses": losses,
        "ends": ends,
        "held_out": None if serves else held_out_loss(model, HELD_OUT),
        "serves": serves,
        "spans": [
            [
                span.name,
                span.start - begin,
                span.stop - begin,
                span.details.get("worker"),
                span.details.get("stale"),
            ]
            for span in timeline.spans
        ],
        "record": [list(update) for update in getattr(server, "record", [])],
        "lost": {
            worker: str(error).splitlines()[0]
            for worker, error in getattr(server, "lost", {}).items()
        },
    }


def die(group: Group) -> None:
    """End this rank: a process is killed, a thread raises."""
    if group.transport.name.startswith("threads"):
        raise ArithmeticError("this rank ends here, on purpose")
    os.kill(os.getpid(), signal.SIGKILL)


def job(
    workers: int, *, servers: int = 1, transport: str = "threads", **options: Any
) -> list[dict[str, Any]]:
    """Run `train` on new ranks; return each rank's result, None for a rank that was lost."""
    return md.run(
        lambda world: train(world, servers=servers, **options),
        size=workers + servers,
        transport=transport,
    )


def replayed(ranks: list[dict[str, Any]], workers: int) -> np.ndarray:
    """Return the weights after the same updates in one process."""
    records = [
        [Update(worker, step, tuple(versions), lr) for worker, step, versions, lr in rank["record"]]
        for rank in ranks[workers:]
    ]
    model = new_model(CONFIG)
    replay(model, records, batch, lambda pieces: Adam(pieces, RATE), workers=workers)
    return weights(model)


def on_a_clock(
    steps: int, seconds: list[float], bound: int | None
) -> tuple[list[Update], list[float]]:
    """Return an asynchronous server's updates, and when it makes each, if worker w takes
    `seconds[w]` for every step.

    A worker reads the weights when its next step may begin: at once, or when it is no more than
    `bound` steps ahead.
    """
    updates = list[Update]()
    ends = list[float]()
    done = [0] * len(seconds)
    read = [0] * len(seconds)
    busy = dict[int, float]()
    now = 0.0
    while len(updates) < steps * len(seconds):
        for worker, count in enumerate(done):
            if (
                worker not in busy
                and count < steps
                and (bound is None or count - min(done) <= bound)
            ):
                busy[worker] = now + seconds[worker]
                read[worker] = len(updates)
        now, worker = min((end, worker) for worker, end in busy.items())
        del busy[worker]
        updates.append(Update(worker, done[worker], (read[worker],), RATE))
        ends.append(now)
        done[worker] += 1
    return updates, ends


def loss_after(updates: list[Update], workers: int) -> float:
    """Return the held-out loss of the weights that one process makes by these updates."""
    model = new_model(CONFIG)
    replay(model, [updates], batch, lambda pieces: Adam(pieces, RATE), workers=workers)
    return held_out_loss(model, HELD_OUT)


def traffic(workers: int, servers: int = 1) -> dict[str, int]:
    """Return the bytes of one synchronous step: sent and received by the server with the most keys,
    and by a rank of a ring.

    The ring has as many ranks as there are workers.
    """

    def step(world: Group) -> tuple[int, int, int]:
        model = new_model(CONFIG)
        server = ParameterServer(model, world, servers=servers)
        before = sum(world.ledger.sent_bytes().get("world", {}).values())
        server.step(batch(0), Adam(server.parameters, RATE))
        own = sum(shard.nbytes for shard in server.shards)
        return (
            sum(world.ledger.sent_bytes().get("world", {}).values()) - before,
            own,
            int(server.serves),
        )

    def ring(world: Group) -> int:
        model = new_model(CONFIG)
        ddp = DDP(model, world)
        ddp.step(batch(0), Adam(ddp.parameters, RATE))
        return sum(world.ledger.sent_bytes().get("world", {}).values())

    ranks = md.run(step, size=workers + servers)
    sent = max(nbytes for nbytes, _, serves in ranks if serves)
    return {
        "sent": sent,
        "received": max(own for _, own, serves in ranks if serves) * workers,
        "pushed": sum(nbytes for nbytes, _, serves in ranks if not serves),
        "given": sum(nbytes for nbytes, _, serves in ranks if serves),
        "model": sum(p.data.nbytes for p in new_model(CONFIG).parameters()),
        "ring": max(md.run(ring, size=workers)),
    }


def staleness(rank: dict[str, Any]) -> list[tuple[int, int]]:
    """Return (worker, updates that others made since it read its weights) for each of a server's
    updates."""
    return [(worker, stale) for name, _, _, worker, stale in rank["spans"] if name == "update"]
