"""Grades exercise 07: ranks as threads train a small GPT with your functions; one process is the
answer key."""

import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.console import size_text
from minidist.grading import Mistake, Result, expect, judge, sent_since, totals
from minidist.launch import run
from minidist.lessons.checking import LIMIT, on_ranks, parity
from minidist.lessons.lab import alone, difference, new_model, random_batch, weights
from minidist.lessons.late_group import LateGroup
from minidist.nn import GPTConfig
from minidist.optim import SGD
from minidist.parallel.data.ddp import plain_ddp
from minidist.parallel.step.step import part_of

CONFIG = GPTConfig(vocabulary=11, context=4, layers=2, width=8, heads=2, dtype="float64")
# Sequences of ranks 0, 1, 2 in every batch. They are uneven, as in an epoch's last batch.
SEQUENCES = (3, 1, 2)
BUCKET = 2048
EPOCHS = 2
BATCHES = 3

CUT_FROM = (plain_ddp,)
ANSWERS = {
    3: "reversed(range(len(sizes)))",
    4: """
        self.missing[number] -= 1
        if not self.missing[number]:
            self.start(number)
       """,
    5: """
        for handle in self.pending:
            handle.wait()
        self.pending = []
        self.missing = [len(bucket) for bucket in self.buckets]
       """,
    6: """
        for batch in batches:
            local_loss(model, batch).backward()
            synchronizer.finish()
            optimizer.step()
            optimizer.zero_grad()
       """,
}
"""The right code of the holes beyond the plain version."""
FAULTS = {
    "late": (
        "none in finish()",
        "{found} on rank {rank}",
        "started when backward was over",
        "so nothing overlaps with it: start a bucket when its last gradient is final: "
        "section 3.2 (holes 4 and 5)",
    ),
    "behind": (
        "each starts with its own last gradient",
        "{found} of {buckets} later on rank {rank}",
        "started too late",
        "a bucket that is complete waits for nothing: the rest of backward can "
        "hide its sum: section 3.2 (hole 4)",
    ),
    "stood": (
        "no wait in ready()",
        "{found} on rank {rank}",
        "backward stands still until the sum is there",
        "so nothing overlaps with it: the waits belong into finish(): section 3.2 (hole 4)",
    ),
    "forgotten": (
        "finish() waits for all",
        "{found} all-reduces not waited for on rank {rank}",
        "not waited for",
        "the sums may not be there yet when finish() returns: section 3.2 (hole 5)",
    ),
    "left": (
        "no handle left after finish()",
        "{found} on rank {rank}",
        "the handles are not forgotten",
        "they would pile up, and each finish() would wait for those of all steps before it (hole 5)",
    ),
}
"""{what `_one_backward` counts: (target, measured, mistake, advice) if it is not 0}"""


_on_ranks = partial(on_ranks, target="every rank returns", mistake="the ranks wait for each other")


def grade(exercise: ModuleType) -> Iterator[Result]:
    """Check the plain loop, the buckets, one backward, then whole training runs."""
    for size in (2, 3):
        yield _plain(size, run(_run_plain, exercise, size=size, limit=LIMIT))
    yield _order(exercise.assign_buckets([40, 10, 30, 20], 50))
    for size in (2, 3):
        ranks = _on_ranks(
            _one_backward,
            exercise,
            size=size,
            task=f"one backward on {size} ranks ends",
            advice="start each bucket once in each backward: section 3.2",
        )
        yield _final(size, ranks)
        yield _gradients(size, ranks)
        yield _traffic(size, ranks)
    yield _training(
        _on_ranks(
            _train,
            exercise,
            size=3,
            task=f"{EPOCHS} epochs on 3 ranks end",
            advice="every rank synchronises in every batch: section 5 (hole 6)",
        )
    )


# -------------------------------------------------------------------------------- what the ranks do


def _batch(step: int, rank: int, size: int) -> SimpleNamespace:
    """Return this rank's part of the global batch of one step."""
    starts = np.cumsum((0, *SEQUENCES[:size]))
    whole = np.random.default_rng(step).integers(
        0, CONFIG.vocabulary, (starts[-1], CONFIG.context + 1)
    )
    mine = whole[starts[rank] : starts[rank + 1]]
    return SimpleNamespace(
        inputs=mine[:, :-1], targets=mine[:, 1:], global_tokens=whole[:, 1:].size
    )


def _whole_batch(step: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the global batch of one step in one piece."""
    parts = [_batch(step, rank, size) for rank in range(size)]
    return np.concatenate([part.inputs for part in parts]), np.concatenate(
        [part.targets for part in parts]
    )


def _run_plain(group: Group, exercise: ModuleType) -> np.ndarray:
    """Run the student's plain loop; return the weights."""
    model = new_model(CONFIG)
    exercise.plain_ddp(
        model,
        SGD(list(model.parameters()), lr=0.1),
        group,
        [random_batch(CONFIG, step, group.size + 1) for step in range(BATCHES)],
    )
    return weights(model)


def _watched(exercise: ModuleType, group: Group, model: Any) -> Any:
    """Return the student's Synchronizer, which notes what it does wrong.

    It notes which buckets start too early or too late, and how each backward ends.
    """

    class Watched(exercise.Synchronizer):  # type: ignore[name-defined]
        def __init__(self) -> None:
            self.came: dict[int, int] = {}
            self.begun: set[int] = set()
            self.early: list[tuple[int, int, int]] = []
            self.behind: list[int] = []  # buckets that were complete, and did not start then
            self.started = self.finished = self.forgotten = self.late = self.left = self.stood = 0
            self.ending = False
            super().__init__(LateGroup(group), list(model.parameters()), BUCKET)

        def ready(self, number: int, parameter: Any) -> None:
            self.came[number] = self.came.get(number, 0) + 1
            waits = self.group.waits
            super().ready(number, parameter)
            self.stood += self.group.waits > waits
            # ready() may have called finish(), which resets the counts.
            came = self.came.get(number, 0)
            if came == len(self.buckets[number]) and number not in self.begun:
                self.behind.append(number)

        def start(self, number: int) -> None:
            self.started += 1
            self.begun.add(number)
            self.late += self.ending
            if self.came.get(number, 0) < len(self.buckets[number]):
                self.early.append((number, self.came.get(number, 0), len(self.buckets[number])))
            super().start(number)

        def finish(self) -> None:
            self.finished += 1
            self.ending = True
            super().finish()
            self.ending = False
            self.came.clear()
            self.begun.clear()
            self.forgotten += self.group.land()
            self.left += len(self.pending)

    return Watched()


def _one_backward(group: Group, exercise: ModuleType) -> dict[str, Any]:
    """Run one backward with the student's Synchronizer; return gradients, starts and traffic."""
    model = new_model(CONFIG)
    batch = _batch(0, group.rank, group.size)
    synchronizer = _watched(exercise, group, model)
    before = totals(group.ledger)
    model.loss(batch.inputs, batch.targets, divisor=batch.global_tokens).backward()
    synchronizer.finish()
    return {
        "gradients": _flat(parameter.grad for parameter in model.parameters()),
        "early": synchronizer.early,
        "started": synchronizer.started,
        "forgotten": synchronizer.forgotten,
        "late": synchronizer.late,
        "left": synchronizer.left,
        "behind": len(synchronizer.behind),
        "stood": synchronizer.stood,
        "buckets": [flat.nbytes for flat in synchronizer.flat],
        "sent": sent_since(group.ledger, before),
    }


def _train(group: Group, exercise: ModuleType) -> dict[str, Any]:
    """Run the student's whole training loop; return the weights and the counts."""
    model = new_model(CONFIG)
    synchronizer = _watched(exercise, group, model)
    epochs = [
        [_batch(epoch * BATCHES + step, group.rank, group.size) for step in range(BATCHES)]
        for epoch in range(EPOCHS)
    ]
    exercise.train(model, SGD(list(model.parameters()), lr=0.1), synchronizer, epochs)
    return {
        "weights": weights(model),
        "finished": synchronizer.finished,
        "started": synchronizer.started,
        "buckets": len(synchronizer.buckets),
    }


def _flat(arrays: Any) -> np.ndarray:
    """Return the arrays end to end. A missing gradient becomes a NaN, which equals nothing."""
    return np.concatenate(
        [np.full(1, np.nan) if array is None else np.array(array).ravel() for array in arrays]
    )


# --------------------------------------------------------------------------- against the answer key


def _plain(size: int, ranks: list[np.ndarray]) -> Result:
    """Check the weights after the plain loop against those of one process.

    Wrong weights are compared with those that known mistakes give.
    """
    mean_of_means = (
        "a mean of means weighs a rank's few tokens as much as another's many; "
        "divide every rank's sum by the tokens of all: read section 4 again (hole 1)"
    )

    def both() -> bool:
        wrong = _plain_serial(size, local=True, scale=1 / size)
        return difference(ranks[0], wrong) < 1e-9

    return parity(
        f"plain_ddp on {size} ranks, weights after {BATCHES} steps",
        _plain_serial(size),
        ranks,
        "the replicas agree on wrong weights",
        "over which tokens is the loss a mean, and what is done with the ranks' gradients? section 4 "
        "(holes 1 and 2)",
        known={
            "divided by local tokens": Mistake(
                lambda: _plain_serial(size, local=True), mean_of_means
            ),
            "averaged twice": Mistake(
                lambda: _plain_serial(size, scale=1 / size),
                "what the loss was divided by counts all ranks already: section 4 (holes 1 and 2)",
            ),
            "not divided": Mistake(
                lambda: _plain_serial(size, scale=(size + 1) * CONFIG.context),
                "a loss of more tokens would be larger: section 4 (hole 1)",
            ),
            "divided by sequences, not by tokens": Mistake(
                lambda: _plain_serial(size, scale=CONFIG.context),
                "the loss is a mean over tokens: section 4 (hole 1)",
            ),
            "nothing was learned": Mistake(
                lambda: weights(new_model(CONFIG)),
                "the weights are those before the first step: section 1 (hole 2)",
            ),
        },
        signs={
            "divided by local tokens": Mistake(both, mean_of_means),
            "the replicas drifted apart": Mistake(
                np.max([np.abs(mine - ranks[0]).max() for mine in ranks]) > 1e-10,
                "each rank updated with another gradient: is every p.grad the same on all ranks? "
                "section 4 (hole 2)",
            ),
        },
    )


def _plain_serial(size: int, *, local: bool = False, scale: float = 1.0) -> np.ndarray:
    """Return the weights of one process after the global batches.

    With `local`, the loss of each part is divided by the part's own tokens.
    """
    model = new_model(CONFIG)
    optimizer = SGD(list(model.parameters()), lr=0.1)
    for step in range(BATCHES):
        batch = random_batch(CONFIG, step, size + 1)
        for rank in range(size):
            part = part_of(batch, size=size, rank=rank)
            model.loss(
                part.inputs, part.targets, part.targets.size if local else batch[1].size
            ).backward()
        optimizer.step(None, scale)
        optimizer.zero_grad()
    return weights(model)


def _serial_gradients(size: int) -> np.ndarray:
    """Return the gradients of one process on the global batch."""
    model = new_model(CONFIG)
    inputs, targets = _whole_batch(0, size)
    model.loss(inputs, targets, divisor=targets.size).backward()
    return _flat(parameter.grad for parameter in model.parameters())


def _serial_weights(size: int) -> np.ndarray:
    """Return the weights after training in one process on the global batches."""
    batches = [_whole_batch(step, size) for step in range(EPOCHS * BATCHES)]
    return alone(new_model(CONFIG), partial(SGD, lr=0.1), batches)


def _without_zeroing(size: int) -> np.ndarray:
    """Return the weights if gradients are never set to zero.

    After a step every rank has the sum over the ranks, and the next step sums it again.
    """
    model = new_model(CONFIG)
    parameters = list(model.parameters())
    optimizer = SGD(parameters, lr=0.1)
    for step in range(EPOCHS * BATCHES):
        inputs, targets = _whole_batch(step, size)
        model.loss(inputs, targets, divisor=targets.size).backward()
        optimizer.step()
        for parameter in parameters:
            parameter.grad = size * np.asarray(parameter.grad)
    return weights(model)


def _order(buckets: list[list[int]]) -> Result:
    """Check that the buckets begin with the last parameter, which backward reaches first."""
    return expect(
        "buckets of 40, 10, 30, 20 bytes at most 50",
        [[3, 2], [1, 0]],
        buckets,
        "wrong buckets",
        "backward finishes the last layer's gradients first; a bucket that waits for the first "
        "layer cannot overlap with anything: read section 3.1 again (hole 3)",
        known={
            "buckets in forward order": [[0, 1], [2, 3]],
            "the first parameter is in no bucket": [[3, 2], [1]],
            "the last parameter is in no bucket": [[0, 1], [2]],
        },
    )


def _final(size: int, ranks: list[dict[str, Any]]) -> Result:
    """Check that each bucket leaves once, and not before its last gradient is final."""
    task = f"{size} ranks, buckets start when complete"
    for rank, figures in enumerate(ranks):
        if figures["early"]:
            number, came, needed = figures["early"][0]
            return Result(
                task,
                False,
                f"bucket {number} starts after {needed} gradients",
                f"rank {rank}: after {came}",
                "reduced before the gradient is final",
                "the bucket's other gradients are still the last step's: read section 3.2 again "
                "(hole 4)",
            )
        if figures["started"] != len(figures["buckets"]):
            return Result(
                task,
                False,
                f"{len(figures['buckets'])} all-reduces",
                f"{figures['started']} on rank {rank}",
                "a bucket was not started once",
                "start it when its last gradient is final: section 3.2 (hole 4)",
            )
        for counted, (target, measured, mistake, advice) in FAULTS.items():
            if found := figures[counted]:
                said = measured.format(found=found, buckets=len(figures["buckets"]), rank=rank)
                return Result(task, False, target, said, mistake, advice)
    return Result(
        task,
        True,
        f"{len(ranks[0]['buckets'])} all-reduces, none early",
        f"{len(ranks[0]['buckets'])} all-reduces, none early",
    )


def _gradients(size: int, ranks: list[dict[str, Any]]) -> Result:
    """Check the synchronised gradient against one process's gradient of the global mean loss."""
    task = f"{size} ranks, gradients"
    target = _serial_gradients(size)
    for rank, figures in enumerate(ranks):
        mine = figures["gradients"]
        fits = mine.shape == target.shape
        error = float(np.abs(mine - target).max() / np.abs(target).max()) if fits else float("nan")
        if error < 1e-12:
            continue
        averaged = fits and np.allclose(mine, target / size, rtol=1e-9, atol=1e-12)
        return judge(
            task,
            False,
            "those of one process",
            f"off by {error:.0%} on rank {rank}",
            "wrong gradients",
            "after finish() every bucket holds the sum over the ranks, no more: section 4 "
            "(holes 1 and 5)",
            signs={
                "averaged twice": Mistake(
                    averaged,
                    f"the gradients are {size} times too small: the loss is divided by the global "
                    "token count already, so they are summed, not averaged: section 4 (hole 5)",
                )
            },
        )
    return Result(task, True, "those of one process, to 1e-12", "those of one process, to 1e-12")


def _traffic(size: int, ranks: list[dict[str, Any]]) -> Result:
    """Check the traffic: on each rank 2(P-1) messages per bucket, and the bytes of all ranks.

    All ranks together send 2(P-1) times the gradient bytes.
    """
    buckets = ranks[0]["buckets"]
    return expect(
        f"{size} ranks, traffic",
        (size * 2 * (size - 1) * len(buckets), 2 * (size - 1) * sum(buckets)),
        tuple(sum(figures["sent"][part] for figures in ranks) for part in (0, 1)),
        "wrong traffic",
        "each bucket is summed once by a ring: read section 3.4 again",
        show=lambda sent: f"{sent[0]} messages, {size_text(sent[1])}",
    )


def _training(ranks: list[dict[str, Any]]) -> Result:
    """Check that after several epochs all replicas are equal, and equal to one process."""
    steps = EPOCHS * BATCHES
    size = len(ranks)
    target = _serial_weights(size)
    drift = np.max([difference(figures["weights"], ranks[0]["weights"]) for figures in ranks])
    error = np.max([difference(figures["weights"], target) for figures in ranks])
    task = f"{size} ranks, {EPOCHS} epochs of {BATCHES} batches"
    finished = ranks[0]["finished"]
    if finished != steps:
        return judge(
            task,
            False,
            f"{steps} synchronisations",
            f"{finished}; the replicas drifted apart by {drift:.1e}",
            "not synchronised at every batch",
            "between two updates every replica must have the same gradient (N0:416): section 5 "
            "(hole 6)",
            signs={"synchronised once an epoch": finished == EPOCHS},
        )
    started = ranks[0]["started"]
    all_of_them = finished * ranks[0]["buckets"]
    if started < all_of_them:
        return Result(
            task,
            False,
            f"{all_of_them} all-reduces",
            f"{started}",
            "not ready for the next backward",
            "no bucket is complete in the second backward: what does ready() count from then? section "
            "3.2 (hole 5)",
        )
    if not error < 1e-10:
        return judge(
            task,
            False,
            "the weights of one process",
            f"off by {error:.1e}, replicas apart by {drift:.1e}",
            "the replicas agree on wrong weights",
            "what must be there when the optimizer steps, and what must be gone when the next "
            "backward begins? section 2 (hole 6)",
            signs={
                "the replicas drifted apart": drift > 1e-10,
                "nothing was learned": difference(ranks[0]["weights"], weights(new_model(CONFIG)))
                < 1e-10,
                "old gradients are summed again with the new ones": lambda: (
                    difference(ranks[0]["weights"], _without_zeroing(size)) < 1e-9
                ),
            },
        )
    return Result(
        task, True, "the weights of one process, to 1e-10", "the weights of one process, to 1e-10"
    )


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "07", *sys.argv[1:]]))
