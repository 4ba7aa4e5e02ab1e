"""What local steps meet with: the outer optimizer, and the parts of the weights that travel by themselves."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from minidist.autograd.tensor import Parameter
from minidist.comm.calls.async_call import Pending
from minidist.comm.chunks import bounds
from minidist.comm.group import Group
from minidist.device.backend import Array
from minidist.optim import SGD
from minidist.parallel.step.scheme import GradientRun


class Outer(NamedTuple):
    """The outer optimizer: SGD on outer gradients."""

    lr: float
    momentum: float = 0.0
    nesterov: bool = False

    def make(self, tensors: Sequence[Any]) -> SGD:
        """The optimizer of these tensors."""
        return SGD(tensors, self.lr, momentum=self.momentum, nesterov=self.nesterov)


OUTERS = {"sgd": Outer(1.0), "nesterov": Outer(0.7, 0.9, nesterov=True)}
"""Outer optimizers by name, as published: local SGD's and DiLoCo's."""


class Fragment:
    """A slice of the vector of all weights. The outer optimizer's tensor: it has data, a gradient and a name.

    Attributes: name, number; data: the common weights; grad: their outer gradient, while the outer step reads it.
                own: this rank's weights; pending, room: the outer gradient on its way, and where it lies.
                run: what a scheme knows of it.
    """

    def __init__(self, number: int, own: Array, common: Array, run: GradientRun) -> None:
        self.name, self.number, self.own, self.data, self.run = f"fragment {number}", number, own, common, run
        self.grad: Array | None = None
        self.pending: Pending | None = None
        self.room: Array | None = None


def cut_fragments(count: int, own: Array, common: Array, weights: Sequence[Parameter], group: Group) -> list[Fragment]:
    """The vectors of all weights, a rank's own and the common ones, in `count` slices, equal to one element."""
    return [Fragment(number, own[start:stop], common[start:stop],
                     GradientRun(tuple(_spans(weights, start, stop)), group, "all_reduce"))
            for number, (start, stop) in enumerate(pairwise(bounds(len(own), count)))]


def _spans(weights: Sequence[Parameter], start: int, stop: int) -> Iterator[tuple[Parameter, range]]:
    """The parameters that lie in [start, stop) of the vector of all, each with its elements there."""
    first = 0
    for parameter in weights:
        inside = range(max(start - first, 0), min(stop - first, parameter.size))
        if inside:
            yield parameter, inside
        first += parameter.size
