"""Grades exercise 15: ranks as threads train a small GPT with your gradients; one process is the
answer key."""

import gc
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.grading import Mistake, Result, expect, judge, named, sent_since, totals
from minidist.lessons import zero_lab as lab
from minidist.lessons.checking import on_ranks, parity, replicas
from minidist.lessons.lab import new_model, weights
from minidist.lessons.late_group import LateGroup
from minidist.nn import GPTConfig
from minidist.optim import SGD
from minidist.parallel.data.buckets import cut
from minidist.parallel.step.flat import Flat
from minidist.parallel.step.step import micro_parts, part_of
from minidist.parallel.zero.zero2 import plain_zero2

CONFIG = GPTConfig(vocabulary=13, context=5, layers=2, width=8, heads=2, dtype="float64")
BUCKET = 2048
STEPS = 3
PASSES = 2
RATE = 0.3

CUT_FROM = (plain_zero2,)
ANSWERS = {
    3: "self.group.start_reduce_scatter(gradient, out=chunk)",
    4: """
        while len(self.flying) > 1:
            self.land()
       """,
    5: """
        handle.wait()
        run.shard += chunk
       """,
    6: "self.flying.pop(0)",
    7: """
        while self.flying:
            self.land()
       """,
}
"""The right code of the holes beyond the plain version."""


def grade(exercise: ModuleType) -> Iterator[Result]:
    """Check the plain loop, then two passes per step on two and on three ranks.

    Of a step the check looks at sums in flight, gradients that are alive, weights and bytes.
    """
    for size in (2, 3):
        yield from _plain(exercise, size)
    for size in (2, 3):
        ranks = on_ranks(
            _train,
            exercise,
            size=size,
            task=f"{STEPS} steps on {size} ranks",
            advice="every run sets out once a backward: section 1",
        )
        yield _ended(size, ranks)
        yield _alive(size, ranks)
        yield _weights(size, ranks)
        yield _traffic(size, ranks)


# -------------------------------------------------------------------------------- what the ranks do


class Run:
    """Some parameters that travel together, and this rank's chunk of their gradient."""

    def __init__(self, parameters: Any, group: Group) -> None:
        self.flat = Flat(parameters, group)
        self.shard = np.zeros(self.flat.chunk_size)
        self.missing = 0
        self.taken: list[Any] = []  # weak references to the gradients that were taken

    def take(self) -> np.ndarray:
        """Return the gradients end to end, and remove them from the parameters."""
        gradient = np.concatenate(
            [np.zeros(p.size) if p.grad is None else p.grad.ravel() for p in self.flat.parameters]
        )
        for parameter in self.flat.parameters:
            parameter.zero_grad()
        self.taken.append(weakref.ref(gradient))
        return gradient

    def chunk(self) -> np.ndarray:
        """Return a new array for this rank's part of the sum."""
        return np.full(self.flat.chunk_size, np.nan)


class Links(LateGroup):
    """A LateGroup that notes sums which arrive in a shard, and refuses verbs that wait.

    Attributes: into_shard: whether a sum was to arrive in a shard.
    """

    def __init__(self, group: Group, runs: list[Run]) -> None:
        super().__init__(group)
        self.runs = runs
        self.into_shard = False

    def start_reduce_scatter(self, x: np.ndarray, *, out: np.ndarray, **options: Any) -> Any:
        """Start a reduce-scatter as LateGroup does."""
        self.into_shard |= any(np.shares_memory(out, run.shard) for run in self.runs)
        return super().start_reduce_scatter(x, out=out, **options)

    def reduce_scatter(self, *_: Any, **__: Any) -> None:
        """Raise RuntimeError: backward must not wait here."""
        raise RuntimeError("reduce_scatter waits for the sum; here it only begins: use start_…")

    all_reduce = reduce_scatter

    def all_gather(self, *_: Any, **__: Any) -> None:
        """Raise RuntimeError: no rank needs the other ranks' sums."""
        raise RuntimeError(
            "all_gather: no rank needs the other ranks' sums of gradients; land what is in flight"
        )


def _plain(exercise: ModuleType, size: int) -> Iterator[Result]:
    """Check the plain loop: gradients are freed, and weights and bytes are right.

    All replicas must be equal, and equal to one process.
    """

    def job(group: Group) -> dict[str, Any]:
        model = new_model(CONFIG)
        drawn = weights(model)
        kept = [0]

        class Optimizer(SGD):
            def step(self, *args: Any, **options: Any) -> Any:
                kept[0] = max(kept[0], sum(p.grad is not None for p in model.parameters()))
                return super().step(*args, **options)

        before = totals(group.ledger)
        batches = [lab.global_batch(CONFIG, step) for step in range(STEPS)]
        watched = lab.WatchedGroup(group)
        exercise.plain_zero2(model, lambda pieces: Optimizer(pieces, RATE), watched, batches)
        sent = sent_since(group.ledger, before)[1]
        return {
            "kept": kept[0],
            "weights": weights(model),
            "overlapped": watched.overlapped,
            "new_sums": watched.new_sums and bool(np.array_equal(weights(model), drawn)),
            "new_gathers": watched.new_gathers,
            "gathers_sums": watched.gathers_sums,
            "adds_weights": watched.adds_weights,
            "sent": sent,
        }

    task = f"plain_zero2 on {size} ranks, {STEPS} steps"
    ranks = on_ranks(
        job,
        size=size,
        task=task,
        advice="every rank calls the same collectives: section 1 (holes 1, 2)",
    )
    yield expect(
        f"{task}: whole gradients after backward",
        0,
        ranks[0]["kept"],
        "the gradients stay",
        "p.zero_grad() as soon as the sum is there: section 1 (hole 1)",
    )
    overlapped = any(rank["overlapped"] for rank in ranks)
    yield lab.gathered(f"{task}: what is gathered", overlapped, "section 1 (hole 2)")
    trained = [rank["weights"] for rank in ranks]
    mistake, advice = (
        "the all-gather is missing",
        "each rank knows only its own new chunks until they are shared: section 1 (hole 2)",
    )
    if any(rank["new_gathers"] for rank in ranks):
        mistake, advice = lab.new_array("the model", "section 1, step 3 (hole 2)")
    yield replicas(f"{task}: replicas", trained, mistake, advice)
    # On two ranks, averaging the weights gives the same as averaging the gradients twice.
    # So the check first asks whether the weights were averaged.
    added = any(rank["adds_weights"] for rank in ranks)
    nowhere, advice = lab.new_array("the optimizer", "section 1, step 1a (hole 1)")
    yield parity(
        f"{task}: weights",
        _alone(),
        trained,
        "wrong sums",
        "mine is the sum over the ranks, no more: section 1 (hole 1)",
        known=None if added else {"averaged twice": lambda: _alone(1 / size)},
        signs={
            nowhere: Mistake(any(rank["new_sums"] for rank in ranks), advice),
            **lab.wrong_gathers(ranks, "section 1, step 3 (hole 2)"),
        },
    )
    n = 8 * ranks[0]["weights"].size
    yield expect(
        f"{task}: bytes",
        2 * STEPS * (size - 1) * n,
        sum(rank["sent"] for rank in ranks),
        "wrong traffic",
        "a reduce-scatter and an all-gather of each parameter: section 4 (holes 1, 2)",
    )


def _train(group: Group, exercise: ModuleType) -> dict[str, Any]:
    """Run the student's gradients in a training loop that is right; return what was seen."""
    model = new_model(CONFIG)
    runs = [Run(parameters, group) for parameters in cut(model.parameters(), BUCKET)]
    vectors = [each.flat.join() for each in runs]
    optimizer = SGD(
        [
            piece
            for each, w in zip(runs, vectors, strict=True)
            for piece in each.flat.pieces(w[each.flat.chunk], each.shard)
        ],
        RATE,
    )
    late = Links(group, runs)
    mine = exercise.MyGradients(late)
    seen = {"unwaited": 0, "lost": 0, "flying": 0, "copies": 0}
    shards = [each.shard for each in runs]

    def came(each: Run) -> None:
        each.missing -= 1
        if not each.missing:
            mine.final(each)
            seen["flying"] = max(seen["flying"], len(late.flying))
            seen["copies"] = max(seen["copies"], _copies(late, runs))

    def final(each: Run, _: Any) -> None:
        came(each)

    for each in runs:
        for parameter in each.flat.parameters:
            parameter.hooks.append(partial(final, each))
    before = totals(group.ledger)
    for step in range(STEPS):
        inputs, targets = lab.global_batch(CONFIG, step)
        for each in runs:
            each.shard[...] = 0
        for part in micro_parts(
            part_of((inputs, targets), size=group.size, rank=group.rank), PASSES
        ):
            for each in runs:
                each.missing = len(each.flat.parameters)
            model.loss(part.inputs, part.targets, divisor=targets.size).backward()
            mine.finish()
            seen["unwaited"] = max(seen["unwaited"], len(late.flying))
            kept = [entry[-1] for entry in mine.flying]
            lost = sum(all(handle is not other for other in kept) for handle in late.flying)
            seen["lost"] = max(seen["lost"], lost)
        optimizer.step()
        for each, vector in zip(runs, vectors, strict=True):
            with group.ledger.control():
                group.all_gather(vector[each.flat.chunk].copy(), out=vector)
    group.barrier()  # no message is on its way any more
    gc.collect()
    left = sum(ref() is not None for other in runs for ref in other.taken)
    return {
        **seen,
        "left": left,
        "waits": late.waits,
        "new_shard": any(each.shard is not shard for each, shard in zip(runs, shards, strict=True)),
        "into_shard": late.into_shard,
        "runs": len(runs),
        "n": sum(each.flat.nbytes for each in runs),
        "sent": sent_since(group.ledger, before),
        "weights": weights(model),
    }


def _copies(late: LateGroup, runs: list[Run]) -> int:
    """Return how many sums in flight are of a copy, not of the gradient that a run gave."""
    gradients = [gradient for each in runs for ref in each.taken if (gradient := ref()) is not None]
    return sum(
        not any(np.may_share_memory(handle.x, gradient) for gradient in gradients)
        for handle in late.flying
        if handle.x is not None
    )


def _alone(scale: float = 1.0, *, last_pass: int = 0) -> np.ndarray:
    """Return the weights of one process, with gradients times `scale`.

    With `last_pass` ranks, only the last pass of each rank counts.
    """
    model = new_model(CONFIG)
    optimizer = SGD(list(model.parameters()), RATE)
    for step in range(STEPS):
        inputs, targets = lab.global_batch(CONFIG, step)
        rows = [(inputs, targets)]
        if last_pass:
            micros = [
                micro_parts(part_of((inputs, targets), size=last_pass, rank=rank), PASSES)[-1]
                for rank in range(last_pass)
            ]
            rows = [(micro.inputs, micro.targets) for micro in micros if len(micro.inputs)]
        for x, y in rows:
            model.loss(x, y, divisor=targets.size).backward()
        optimizer.step(None, scale)
        optimizer.zero_grad()
    return weights(model)


# --------------------------------------------------------------------------- against the answer key


def _ended(size: int, ranks: list[dict[str, Any]]) -> Result:
    """Check that no sum is in flight when finish() has returned."""
    most = max(rank["unwaited"] for rank in ranks)
    mistake, advice = named(
        "the update comes before the reduce has ended",
        "land every sum in flight, from the oldest: the shard holds the last step's sums until "
        "then: section 1 (hole 7)",
        signs={
            "handle.wait() is missing": Mistake(
                any(not rank["waits"] for rank in ranks),
                "chunk is not there yet; it holds the sum only after the wait: section 1 (hole 5)",
            ),
            "another sum was taken out of the list": Mistake(
                any(rank["lost"] for rank in ranks),
                "land() waits for the first sum in self.flying, so take the first out, and only "
                "this one: section 1 (holes 6 and 7)",
            ),
        },
    )
    return Result(
        f"{size} ranks, on its way after finish()",
        most == 0,
        "nothing",
        f"{most or 'nothing'}",
        mistake,
        advice,
    )


def _alive(size: int, ranks: list[dict[str, Any]]) -> Result:
    """Check that one sum is in flight while the next bucket fills, and none at the end."""
    left, most, copies, runs = (
        max(rank[name] for rank in ranks) for name in ("left", "flying", "copies", "runs")
    )
    task = f"{size} ranks, whole gradients alive after {STEPS} steps"
    if left:
        return Result(
            task,
            False,
            "0",
            f"{left}",
            "forgot to free",
            "while a name refers to an array, it is there: take it out of self.flying: section "
            "2 (hole 6)",
        )
    if copies:
        return Result(
            f"{size} ranks, whole gradients alive in backward",
            False,
            "one that fills and one in flight",
            f"{copies} more",
            "a copy is summed",
            "the gradient itself can be summed, because it does not "
            "change meanwhile; a copy beside it is a third bucket: section 2 (hole 3)",
        )
    return judge(
        f"{size} ranks, in flight when backward goes on",
        most == 1,
        "one",
        f"{most} of {runs}",
        "backward stands still until each has landed",
        "when one sets out, the one before it lands: sections 1 and 2 (hole 4)",
        signs={"too many in flight": most},
    )


def _weights(size: int, ranks: list[dict[str, Any]]) -> Result:
    """Check that the weights after training are those of one process."""
    return parity(
        f"{size} ranks, {PASSES} passes a step, weights",
        _alone(),
        [rank["weights"] for rank in ranks],
        "wrong sums",
        "a shard is the sum over ranks and passes: section 4 (hole 5)",
        known={
            "averaged twice": Mistake(
                lambda: _alone(1 / size),
                f"{size} times too small; the loss is divided by all ranks' tokens "
                "already, so sums are sums: lesson 07, section 4 (hole 5)",
            ),
            "replaced instead of added": Mistake(
                lambda: _alone(last_pass=size),
                "the first pass's sum is lost when the second's takes its "
                "place: add to run.shard: section 4 (hole 5)",
            ),
        },
        signs={
            "summed into the shard": Mistake(
                any(rank["into_shard"] for rank in ranks),
                "the sum of this pass takes the place of the earlier passes' sums; let it arrive in "
                "chunk: section 4 (hole 3)",
            ),
            "run.shard is a new array": Mistake(
                any(rank["new_shard"] for rank in ranks),
                "the optimizer reads the old one; add in place, by +=: section 4 (hole 5)",
            ),
            "read before it arrived": Mistake(
                any(np.isnan(rank["weights"]).any() for rank in ranks),
                "chunk holds the sum only after handle.wait(): section 1 (hole 5)",
            ),
        },
    )


def _traffic(size: int, ranks: list[dict[str, Any]]) -> Result:
    """Check that all ranks together send (P-1) n bytes per pass."""
    return expect(
        f"{size} ranks, bytes",
        STEPS * PASSES * (size - 1) * ranks[0]["n"],
        sum(rank["sent"][1] for rank in ranks),
        "wrong traffic",
        "one reduce-scatter a run and pass: section 4 (hole 3)",
    )


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "15", *sys.argv[1:]]))
