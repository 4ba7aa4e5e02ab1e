"""Grades exercise 16: ranks as threads train a small GPT with your ZeRO-3; one process is the
answer key."""

import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.console import size_text
from minidist.grading import Mistake, Result, expect, judge, sent_since, totals
from minidist.lessons import zero_lab as lab
from minidist.lessons.checking import on_ranks, parity
from minidist.lessons.lab import alone, new_model
from minidist.lessons.lab import weights as weights_of
from minidist.nn import GPTConfig
from minidist.optim import SGD
from minidist.parallel.zero.zero3 import PlainUnit, plain_zero3

CONFIG = GPTConfig(vocabulary=13, context=5, layers=3, width=8, heads=2, dtype="float64")
STEPS = 3
RATE = 0.3

CUT_FROM = (PlainUnit, plain_zero3)


def grade(exercise: ModuleType) -> Iterator[Result]:
    """Check one unit, then two and three ranks.

    Of a run the check looks at which units are whole and when, at the weights and at the bytes.
    """
    yield from _unit(exercise)
    for size in (2, 3):
        ranks = on_ranks(
            _train,
            exercise,
            size=size,
            task=f"{STEPS} steps on {size} ranks",
            advice="all ranks gather the same units: section 1",
        )
        yield _there(size, ranks)
        yield _freed(size, ranks)
        yield _weights(size, ranks)
        yield _traffic(size, ranks)


# -------------------------------------------------------------------------------- what the ranks do


class Noting:
    """A unit's Flat that notes the vector of weights it is given, and puts nothing into them."""

    def __init__(self, flat: Any) -> None:
        self.flat = flat
        self.vector: Any = None

    def views(self, vector: Any) -> Iterator[Any]:
        """Note the vector."""
        self.vector = vector
        return iter(())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.flat, name)


def _unit(exercise: ModuleType) -> Iterator[Result]:
    """Check what a unit registers as hooks, and how many numbers it gathers."""

    def job(group: Group) -> dict[str, Any]:
        given: list[tuple[int, Any]] = []
        module = new_model(CONFIG).blocks[0]
        for hole, name in (
            (1, "register_forward_pre_hook"),
            (2, "register_forward_hook"),
            (3, "register_backward_pre_hook"),
        ):
            setattr(module, name, lambda hook, hole=hole: given.append((hole, hook)))
        unit = exercise.PlainUnit(module, group)
        flat = unit.flat
        unit.flat = Noting(flat)
        unit.gather()
        return {
            "hooks": given,
            "gathered": int(np.size(unit.flat.vector)),
            "size": flat.size,
            "chunk": flat.chunk_size,
        }

    rank = on_ranks(
        job,
        size=2,
        task="one unit on 2 ranks",
        advice="all ranks gather the same unit: section 1 (hole 4)",
    )[0]
    called = next(((hole, hook) for hole, hook in rank["hooks"] if not callable(hook)), None)
    yield Result(
        "the hooks of a unit",
        called is None,
        "methods",
        "methods" if called is None else repr(called[1]),
        "the method was called at once, and its result was registered",
        f"give the method, without (): section 1 (hole {called[0] if called else 1})",
    )
    yield expect(
        "numbers that a unit gathers, on 2 ranks",
        rank["size"],
        rank["gathered"],
        "not the whole vector",
        "all ranks' chunks, one after the other, by all_gather: section 1, forward 1 (hole 4)",
        known={"only this rank's chunk": rank["chunk"]},
    )


def _whole(module: Any) -> bool:
    """Return whether the unit has its weights."""
    return not any(np.isnan(p.data).any() for p in module.parameters())


def _vector(module: Any) -> np.ndarray:
    """Return a unit's weights as one vector."""
    return np.concatenate([p.data.ravel() for p in module.parameters()])


def _train(group: Group, exercise: ModuleType) -> dict[str, Any]:
    """Run the student's loop and units; return what was seen: which units are whole, and when."""
    model = new_model(CONFIG)
    units = [(name, module) for name, module in model.children() if list(module.parameters())]
    missing: list[str] = []
    most = [0]
    left = [0]
    kept = [0]
    steps = [0]
    strange = [False]
    early = [False]
    cleared = [0]
    sums = [0]  # when a forward begins
    watched = lab.WatchedGroup(group)
    drawn = {name: _vector(module) for name, module in units}

    def count() -> int:
        return sum(_whole(module) for _, module in units)

    def needs(name: str, module: Any, when: str) -> None:
        if not _whole(module):
            missing.append(f"{name} in {when}")
            for p in module.parameters():
                p.data = np.zeros(p.shape)
        elif not steps[0] and not np.array_equal(_vector(module), drawn[name]):
            strange[0] = True
        if when == "forward" and name == units[0][0]:
            sums[0] = len(watched.sums)
        elif when == "forward" and len(watched.sums) > sums[0]:
            early[0] = True
        if steps[0] and when == "forward" and name == units[0][0] and not missing:
            kept[0] = max(kept[0], count() - 1)
        else:
            most[0] = max(most[0], count())

    class Optimizer(SGD):
        def step(self, *args: Any, **options: Any) -> None:
            left[0] = max(left[0], count())
            steps[0] = steps[0] + 1
            super().step(*args, **options)

        def zero_grad(self) -> None:
            cleared[0] += 1
            super().zero_grad()

    def new_optimizer(pieces: Any) -> Any:
        for name, module in units:  # after the units' own hooks
            module.register_forward_pre_hook(
                lambda *_, name=name, module=module: needs(name, module, "forward")
            )
            module.register_backward_pre_hook(
                lambda *_, name=name, module=module: needs(name, module, "backward")
            )
        return Optimizer(pieces, RATE)

    before = totals(group.ledger)
    batches = [lab.global_batch(CONFIG, step) for step in range(STEPS)]
    with np.errstate(all="ignore"):
        exercise.plain_zero3(
            model, [module for _, module in units], new_optimizer, watched, batches
        )
    weights = np.concatenate([_vector(module) for _, module in units])
    return {
        "missing": missing[:1],
        "most": most[0],
        "left": left[0],
        "kept": kept[0],
        "steps": steps[0],
        "strange": strange[0],
        "early": early[0],
        "cleared": cleared[0],
        "new_sums": watched.new_sums
        and bool(np.array_equal(weights, np.concatenate(list(drawn.values())))),
        "all_reduces": watched.all_reduces,
        "units": len(units),
        "sent": sent_since(group.ledger, before),
        "n": weights.nbytes,
        "weights": weights,
    }


def _alone(scale: float = 1.0) -> np.ndarray:
    """Return the weights of one process on the global batches, with gradients times `scale`."""
    batches = [lab.global_batch(CONFIG, step) for step in range(STEPS)]
    return alone(new_model(CONFIG), partial(SGD, lr=RATE), batches, scale)


def _never_cleared() -> np.ndarray:
    """Return the weights of one process that adds each step's gradients to those before."""
    model = new_model(CONFIG)
    optimizer = SGD(list(model.parameters()), RATE)
    for step in range(STEPS):
        inputs, targets = lab.global_batch(CONFIG, step)
        model.loss(inputs, targets, divisor=targets.size).backward()
        optimizer.step()
    return weights_of(model)


# --------------------------------------------------------------------------- against the answer key


def _there(size: int, ranks: list[dict[str, Any]]) -> Result:
    """Check that each unit has its weights when it needs them."""
    missing = [name for rank in ranks for name in rank["missing"]]
    where = missing[0] if missing else ""
    return judge(
        f"{size} ranks, weights there when needed",
        not missing,
        "always",
        f"not for {where}" if where else "always",
        "not gathered for forward",
        "a unit is gathered before its forward and again before its backward: section 1 "
        f"(holes {3 if 'backward' in where else 1} and 4)",
        signs={"not gathered again for backward": "backward" in where},
    )


def _freed(size: int, ranks: list[dict[str, Any]]) -> Result:
    """Check that one unit at a time is whole, and none when backward has ended."""
    most, left, kept, units = (
        max(rank[name] for rank in ranks) for name in ("most", "left", "kept", "units")
    )
    task = f"{size} ranks, whole units at once"
    if left:
        return Result(
            task,
            False,
            "none after backward",
            f"{left} of {units}",
            "forgot to free after backward",
            "and the next forward would compute with weights that were not updated: section 2 "
            "(hole 5)",
        )
    if kept:
        return Result(
            task,
            False,
            "none after the update",
            f"{kept} of {units}",
            "an all-gather too many at the end",
            "they are not needed before the next forward, which gathers anyway: section 4 (hole 6)",
        )
    if ranks[0]["steps"] != STEPS:
        return Result(
            task,
            False,
            f"{STEPS} updates",
            str(ranks[0]["steps"]),
            "not one update a step",
            "optimizer.step() (hole 6)",
        )
    return Result(
        task,
        most == 1,
        "1 at most",
        f"{most} of {units}",
        "forgot to free after forward",
        "a rank that keeps what it has used ends up with the whole model: section 2 (hole 2)",
    )


def _weights(size: int, ranks: list[dict[str, Any]]) -> Result:
    """Check that the weights after training are those of one process."""
    nowhere, advice = lab.new_array("the optimizer", "section 1, backward 3 (hole 5)")
    return parity(
        f"{size} ranks, weights after {STEPS} steps",
        _alone(),
        [rank["weights"] for rank in ranks],
        "wrong gradients",
        "self.mine is the sum over the ranks: section 1, backward 3 (hole 5)",
        known={
            "averaged twice": Mistake(
                lambda: _alone(1 / size),
                f"{size} times too small; the loss is divided by all ranks' tokens "
                "already: lesson 07, section 4 (hole 5)",
            ),
            "the last step's sums are still in it": Mistake(
                _never_cleared,
                "the sum takes the place of the old one: give out=self.mine, and do not add: "
                "section 1, backward 3 (hole 5)",
            ),
        },
        signs={
            nowhere: Mistake(any(rank["new_sums"] for rank in ranks), advice),
            "other weights are gathered": Mistake(
                any(rank["strange"] for rank in ranks),
                "gather each rank's self.shard, one after the other, in rank order: section 1, "
                "forward 1 (hole 4)",
            ),
            "the gradients were cleared": Mistake(
                any(rank["cleared"] for rank in ranks),
                "unit.mine is written again by the next backward: after optimizer.step() nothing is "
                "left to do: section 4 (hole 6)",
            ),
        },
    )


def _traffic(size: int, ranks: list[dict[str, Any]]) -> Result:
    """Check that all ranks together send 3(P-1) n bytes per step."""
    n = ranks[0]["n"]
    # This check gathers the weights once at the end. Those bytes do not count.
    measured = (sum(rank["sent"][1] for rank in ranks) - (size - 1) * n) / STEPS
    return expect(
        f"{size} ranks, bytes a step",
        3 * (size - 1) * n,
        measured,
        "wrong traffic",
        "gather, gather, reduce-scatter: the next forward gathers anyway: section 4 (hole 6)",
        signs={
            "an all-reduce where a reduce-scatter is enough": Mistake(
                any(rank["all_reduces"] for rank in ranks),
                "a rank needs the sum of its own chunk only: section 1, backward 3 (hole 5)",
            ),
            "reduced after forward": Mistake(
                any(rank["early"] for rank in ranks),
                "after forward there are no gradients yet: only free the weights: section 1, "
                "forward 3 (hole 2)",
            ),
            "an all-gather too many at the end": measured == 4 * (size - 1) * n,
        },
        show=size_text,
    )


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "16", *sys.argv[1:]]))
