"""A plan run for real, on ranks that are threads, beside each of its ranks run alone on arrays
without data."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import minidist as md
from minidist.autograd.ops import experts
from minidist.comm.calls.async_call import Pending
from minidist.comm.group import Group
from minidist.device import account
from minidist.device.backend import beside
from minidist.nn import GPTConfig, moe
from minidist.parallel.hybrid.plan import Plan
from minidist.parallel.memory.transfer_lanes import Move, TransferLane
from minidist.simulate.one_rank import run_rank
from minidist.simulate.trace import RankTrace

STEPS = 2
Counts = dict[tuple[str, ...], tuple[int, int]]


@dataclass
class Measured:
    """Of one rank: bytes and messages by (phase, axis, verb, algorithm), peaks of device and host,
    bytes moved."""

    sent: Counts
    peak: dict[str, int]
    host: dict[str, int]
    moved: dict[str, int]


def sent_of(rows: list[dict[str, Any]]) -> Counts:
    """A ledger's rows as a table."""
    return {
        tuple(row[key] for key in ("phase", "axis", "verb", "algorithm")): (
            row["nbytes"],
            row["messages"],
        )
        for row in rows
    }


def batch_of(config: GPTConfig, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Random ids."""
    ids = np.random.default_rng(0).integers(0, config.vocabulary, (rows, config.context + 1))
    return ids[:, :-1], ids[:, 1:]


def really(plan: Plan, config: GPTConfig, rows: int, *, device: str = "cpu") -> list[Measured]:
    """Every rank of the plan, trained for STEPS steps."""
    batch = batch_of(config, rows)

    def train(world: Group) -> Measured:
        with account.use(account.MemoryAccount()) as memory:
            trainer = md.Trainer(plan, config, world, device=device)
            for _ in range(STEPS):
                trainer.step(batch)
            peak = memory.peak
            host = trainer.store.host.peak
            moved = dict(trainer.store.traffic.step)
            trainer.close()  # a last gather may still be on its way
        return Measured(sent_of(world.ledger.rows()), peak, host, moved)

    return md.run(train, size=plan.size)


def alone(
    plan: Plan, config: GPTConfig, rows: int, rank: int, *, device_kind: str = "cpu"
) -> RankTrace:
    """One rank of the plan on arrays without data."""
    return run_rank(
        plan,
        config,
        rank,
        rows=rows,
        steps=STEPS,
        device_kind=device_kind,
        batch=batch_of(config, rows),
    )


class AtOnce(Pending):
    """A call that its start has carried out; done() is as that of a rank alone, which does not know
    when it ends."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def wait(self) -> Any:
        return self.result

    def done(self) -> bool:
        return False


def move_at_once(lane: TransferLane, what: str, nbytes: int, work: Callable[[], Any]) -> Move:
    """TransferLane.start without a thread."""
    lane.traffic.count(lane.source, lane.target, nbytes)
    future: Future[Any] = Future()
    future.set_result(work())
    return Move(what, future)


def one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real ranks do as ranks alone where they could do otherwise.

    A started collective is carried out at once: a worker's thread would choose the moment, and so
    whether the workspace of the call lies beside what the rank holds then. So is a move between
    memories: what goes down is held until it is there. Mixtures choose experts evenly, whatever
    their gates say.
    """
    monkeypatch.setattr(Group, "_start", lambda self, call: AtOnce(self._run(call)))
    monkeypatch.setattr(TransferLane, "start", move_at_once)
    monkeypatch.setattr(
        moe,
        "top_positions",
        lambda scores, k: beside(experts.drawn_positions(scores.shape, k), scores),
    )
