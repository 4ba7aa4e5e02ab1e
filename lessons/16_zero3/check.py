"""Grades exercise 16: ranks as threads train a small GPT with your ZeRO-3; one process is the answer key."""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
from minidist.lessons import zero_lab as lab

from minidist.comm.group import Group
from minidist.console import size_text
from minidist.errors import CommError
from minidist.grading import Result, sent_since, totals
from minidist.launch import run
from minidist.nn import GPTConfig
from minidist.optim import SGD
from minidist.parallel.step.flat import Flat

CONFIG = GPTConfig(vocabulary=13, context=5, layers=3, width=8, heads=2, dtype="float64")
STEPS, LIMIT, RATE = 3, 60.0, 0.3


def grade(exercise: ModuleType) -> Iterator[Result]:
    """Two and three ranks: what is whole and when, the weights, the bytes."""
    for size in (2, 3):
        try:
            ranks = run(_train, exercise, size=size, limit=LIMIT)
        except CommError as error:
            yield Result(f"{STEPS} steps on {size} ranks", False, "an end", type(error).__name__,
                         "the ranks do not fit together", f"all ranks gather the same units: section 1; {error}")
            return
        yield _there(size, ranks)
        yield _freed(size, ranks)
        yield _weights(size, ranks)
        yield _traffic(size, ranks)


# ---------------------------------------------------------------------------------------------- what the ranks do

class Watched:
    """A unit that remembers whether its weights are there."""

    def __init__(self, name: str, module: Any, group: Group) -> None:
        self.name, self.module = name, module
        self.flat = Flat(list(module.parameters()), group)
        self.shard = self.flat.join()[self.flat.chunk].copy()
        self.mine = np.zeros(self.flat.chunk_size)
        self.whole = True

    def put(self, whole: np.ndarray) -> None:
        """The parameters become views of `whole`."""
        for parameter, view in self.flat.views(whole):
            parameter.data = view
        self.whole = True

    def forget(self) -> None:
        """The parameters have a shape, and read as NaN."""
        for parameter in self.flat.parameters:
            parameter.data = np.broadcast_to(np.nan, parameter.shape)
        self.whole = False

    def gradient(self) -> np.ndarray:
        """All gradients in one new array."""
        found = np.concatenate([np.zeros(p.size) if p.grad is None else p.grad.ravel() for p in self.flat.parameters])
        for parameter in self.flat.parameters:
            parameter.zero_grad()
        return found


def _train(group: Group, exercise: ModuleType) -> dict[str, Any]:
    """The student's hooks around a loop that is right."""
    model = lab.new_model(CONFIG)
    units = [Watched(name, module, group) for name, module in model.children() if list(module.parameters())]
    mine, missing, most = exercise.MyZero3(group), [], [0]

    def watch(unit: Watched) -> None:
        def needs(when: str) -> None:
            if not unit.whole:
                missing.append(f"{unit.name} in {when}")
                unit.put(np.zeros(unit.flat.size))
            most[0] = max(most[0], sum(other.whole for other in units))

        def before_forward(*_: Any) -> None:
            mine.before_forward(unit)
            needs("forward")

        def before_backward(*_: Any) -> None:
            mine.before_backward(unit)
            needs("backward")

        unit.module.register_forward_pre_hook(before_forward)
        unit.module.register_forward_hook(lambda *_: mine.after_forward(unit))
        unit.module.register_backward_pre_hook(before_backward)
        unit.module.register_backward_hook(lambda *_: mine.after_backward(unit))

    for unit in units:
        watch(unit)
        unit.forget()
    optimizer = SGD([piece for unit in units for piece in unit.flat.pieces(unit.shard, unit.mine)], RATE)
    before, left, kept = totals(group.ledger), 0, 0
    for inputs, targets, tokens in lab.parts(group, CONFIG, STEPS):
        model.loss(inputs, targets, divisor=tokens).backward()
        left = max(left, sum(unit.whole for unit in units))
        optimizer.step()
        for unit in units:
            mine.after_update(unit)
        kept = max(kept, sum(unit.whole for unit in units))
    sent = sent_since(group.ledger, before)
    with group.ledger.control():
        weights = np.concatenate([group.all_gather(unit.shard) for unit in units])
    return {"missing": missing[:1], "most": most[0], "left": left, "kept": kept, "units": len(units), "sent": sent,
            "n": sum(unit.flat.nbytes for unit in units), "weights": weights}


def _alone(scale: float = 1.0) -> np.ndarray:
    """One process, with gradients times `scale`; unit by unit."""
    model = lab.new_model(CONFIG)
    optimizer = SGD(list(model.parameters()), RATE)
    for step in range(STEPS):
        inputs, targets = lab.global_batch(CONFIG, step)
        model.loss(inputs, targets, divisor=targets.size).backward()
        optimizer.step(None, scale)
        optimizer.zero_grad()
    return np.concatenate([parameter.data.ravel() for _, module in model.children()
                           for parameter in module.parameters()])


# ------------------------------------------------------------------------------------------- beside the answer key

def _there(size: int, ranks: list[dict[str, Any]]) -> Result:
    """Each unit has its weights when it needs them."""
    missing = [name for rank in ranks for name in rank["missing"]]
    where = missing[0] if missing else ""
    mistake = "not gathered again for backward" if "backward" in where else "not gathered for forward"
    return Result(f"{size} ranks, weights there when needed", not missing, "always", f"not for {where}" if where else
                  "always", mistake, "a unit is gathered before its forward and again before its backward: section 1 "
                  f"(hole {3 if 'backward' in where else 1})")


def _freed(size: int, ranks: list[dict[str, Any]]) -> Result:
    """One unit at a time is whole, and none when backward has ended."""
    most, left, kept, units = (max(rank[name] for rank in ranks) for name in ("most", "left", "kept", "units"))
    task = f"{size} ranks, whole units at once"
    if left:
        return Result(task, False, "none after backward", f"{left} of {units}", "forgot to free after backward",
                      "and the next forward would compute with weights that were not updated: section 2 (hole 4)")
    if kept:
        return Result(task, False, "none after the update", f"{kept} of {units}", "an all-gather too many at the end",
                      "they are not needed before the next forward, which gathers anyway: section 4 (hole 5)")
    return Result(task, most == 1, "1 at most", f"{most} of {units}", "forgot to free after forward",
                  "a rank that keeps what it has used ends up with the whole model: section 2 (hole 2)")


def _weights(size: int, ranks: list[dict[str, Any]]) -> Result:
    """After training: those of one process."""
    task, mine = f"{size} ranks, weights after {STEPS} steps", ranks[0]["weights"]
    error = lab.off(mine, _alone())
    if error < 1e-10:
        return Result(task, True, "those of one process, to 1e-10", "those of one process, to 1e-10")
    mistake, advice = "wrong gradients", "unit.mine is the sum over the ranks: section 1, backward 3 (hole 4)"
    if lab.off(mine, _alone(1 / size)) < 1e-10:
        mistake, advice = "averaged twice", (f"{size} times too small; the loss is divided by all ranks' tokens "
                                             "already: lesson 07, section 4 (hole 4)")
    return Result(task, False, "those of one process", f"off by {error:.1e}", mistake, advice)


def _traffic(size: int, ranks: list[dict[str, Any]]) -> Result:
    """3(P-1) n a step over all ranks."""
    measured, n = sum(rank["sent"][1] for rank in ranks) / STEPS, ranks[0]["n"]
    target = 3 * (size - 1) * n
    mistake = "an all-gather too many at the end" if measured == 4 * (size - 1) * n else "wrong traffic"
    return Result(f"{size} ranks, bytes a step", measured == target, size_text(target), size_text(measured), mistake,
                  "gather, gather, reduce-scatter: the next forward gathers anyway: section 4 (hole 5)")


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "16", *sys.argv[1:]]))
