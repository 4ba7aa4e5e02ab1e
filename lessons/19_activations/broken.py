"""Run the experiments of section 9: each makes one mistake and shows its result."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from minidist.autograd import ops
from minidist.autograd.recompute import recompute
from minidist.autograd.tensor import Parameter, tensor
from minidist.console import size_text
from minidist.device import account
from minidist.errors import GradientError
from minidist.grading import load_module
from minidist.lessons.running import Break
from minidist.parallel.memory.activations import checkpoint
from minidist.parallel.memory.kept_inputs import InputKeeper

lab, kept = (
    load_module(Path(__file__).resolve().with_name(name), "19")
    for name in ("experiments.py", "kept.py")
)


def fresh_dropout() -> None:
    """Take random numbers from a generator's state, not from a key: the second forward drops other
    places."""
    generator = np.random.default_rng(0)

    def drop(x: Any) -> Any:
        return x * (2.0 * (generator.random(x.shape) < 0.5))

    x = tensor(np.ones(8), requires_grad=True)
    y = recompute(drop, x)
    y.sum().backward()
    print(
        f"forward kept  {(y.data != 0).astype(int)}\nbackward kept "
        f"{(np.asarray(x.grad) != 0).astype(int)}, expected those of forward: "
        f"no error, and a gradient of another function"
    )


def changed_input() -> None:
    """Overwrite the function's input before backward."""
    weight = Parameter(np.ones((3, 3)), name="weight")
    x = tensor(np.ones((2, 3)))
    y = recompute(lambda h: ops.linear(h, weight), x)
    x.data[...] = 100.0
    y.sum().backward()
    print(
        f"the weight's gradient should be 2 everywhere, it is "
        f"{np.asarray(weight.grad)[0, 0]:g}: the input was not a copy"
    )


def other_weights() -> None:
    """Recompute a function that remembers that it ran already."""
    first = Parameter(np.ones(3), name="first")
    second = Parameter(np.ones(3), name="second")
    calls = itertools.count()

    def fickle(x: Any) -> Any:
        return x * (first if next(calls) == 0 else second)

    print("expected: an error, because the second run uses another weight", flush=True)
    recompute(fickle, tensor(np.ones(3))).sum().backward()


def one_stretch() -> None:
    """Recompute the whole stack as one segment: all its activations are back in memory at once."""
    for name, modules in (
        ("each block", lambda model: model.blocks),
        ("the whole model", lambda model: [model]),
    ):
        with account.use(account.MemoryAccount()) as memory:
            model = lab.model_of(lab.CONFIG, "none")
            checkpoint(modules(model))
            loss = model.loss(*lab.batch_of(lab.CONFIG))
            alive = memory.now["activations"]
            loss.backward()
        print(
            f"{name:16} at the end of forward {size_text(alive):>9}, at the peak "
            f"{size_text(memory.peak['activations']):>9}"
        )


def round_to_nearest() -> None:
    """Round to 8 bits without chance: a number is rounded the same way each time, so its error
    never cancels."""
    for name, keeper in (
        ("by chance", InputKeeper(["8bit"])),
        ("to nearest", kept.Nearest(["8bit"])),
    ):
        first, *_, last = kept.errors(keeper)
        print(
            f"{name:10} error of one gradient {100 * first:.2f} %, of the mean of "
            f"{kept.DRAWS[-1]}: {100 * last:.2f} %"
        )


BREAKS = {
    "fresh-dropout": Break(fresh_dropout, says="a gradient of another function"),
    "changed-input": Break(changed_input, says="should be 2 everywhere, it is 200"),
    "other-weights": Break(
        other_weights,
        says="used other weights in the second run",
        error=GradientError,
    ),
    "one-stretch": Break(one_stretch, says="at the peak  7.79 MiB"),
    "round-to-nearest": Break(round_to_nearest, says="of the mean of 64: 0.21 %"),
}
