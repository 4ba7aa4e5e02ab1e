"""Axes inside a replica: ranks that divide one model, and two facts about its weights that a step
needs.

Tensor, context, expert and pipeline parallelism divide a model, or the tokens that it works on,
when their objects are made. After that each object answers two questions about a gradient, because
some gradients are still summands after the last backward, one on each rank:

    weight                                             summed over      counted in the norm by
    a shard                                            -                the rank that has it
    a shard that several ranks hold (key heads)        those ranks      the first of them
    a whole weight, the same gradient on all ranks     -                the first rank
    … with sequence parallelism, of own tokens         the axis         the first rank
    a tied token table, at both ends of a pipeline     both ends        the first end
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from minidist.autograd.tensor import Parameter
from minidist.comm.group import Group
from minidist.device import account
from minidist.device.backend import array_module
from minidist.errors import GradientError
from minidist.parallel.step.flat import Piece


class ModelAxis:
    """The ranks of a group that divide a model.

    Args:    model: divided when a subclass is made; group: the ranks.
    """

    model: Any  # a GPT, or what is left of it

    def __init__(self, model: Any, group: Group) -> None:
        self.model = model
        self.group = group

    def sums_over(self, parameter: Parameter) -> Group | None:
        """Return the ranks over which a gradient must still be summed; None: over none."""
        return None

    def counts(self, parameter: Parameter) -> bool:
        """Return whether this rank counts a gradient in the norm: only one of the ranks that have
        it does."""
        return True

    def check_shared(self, *, when: str) -> None:
        """Compare the weights that several ranks of the axis hold. Raises: MismatchError."""


class Summand(NamedTuple):
    """A gradient, or with ZeRO this rank's piece of it, that must be summed over the ranks of
    `group`."""

    parameter: Parameter | Piece
    group: Group


def add_up(parts: Sequence[Summand]) -> None:
    """All-reduce summands in place; call it once a step, after the last backward.

    Cost:    one ring all-reduce for each group and dtype, of all its gradients, in the order of the
             parameters.
    Raises:  GradientError for a parameter without a gradient.
    """
    runs: dict[tuple[int, str], list[Summand]] = {}
    for part in parts:
        if part.parameter.grad is None:
            raise GradientError(
                f"{part.parameter.name!r} has no gradient to add up; call zero_unused first"
            )
        runs.setdefault((part.group.id, part.parameter.grad.dtype.name), []).append(part)
    for run in runs.values():
        gradients: list[Any] = [part.parameter.grad for part in run]
        xp = array_module(*gradients)
        flat = account.current().hold(
            xp.concatenate([grad.reshape(-1) for grad in gradients]), "communication"
        )
        run[0].group.all_reduce(flat, out=flat, algorithm="ring")
        start = 0
        for grad in gradients:
            grad[...] = flat[start : start + grad.size].reshape(grad.shape)
            start += grad.size
