"""Local steps' outer optimizer, and the parts of the weights that travel by themselves."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from minidist.autograd.tensor import Parameter
from minidist.comm.calls.async_call import Pending
from minidist.comm.chunks import bounds
from minidist.comm.group import Group
from minidist.comm.limits import STRETCH_BYTES
from minidist.device.backend import Array
from minidist.optim import SGD
from minidist.parallel.compress.pending_sum import Phased
from minidist.parallel.step.scheme import GradientRun


class Outer(NamedTuple):
    """The numbers of an outer optimizer; `make` makes it: SGD on outer gradients."""

    lr: float
    momentum: float = 0.0
    nesterov: bool = False

    def make(self, tensors: Sequence[Any]) -> SGD:
        """Return the optimizer of these tensors."""
        return SGD(tensors, self.lr, momentum=self.momentum, nesterov=self.nesterov)


OUTERS = {"sgd": Outer(1.0), "nesterov": Outer(0.7, 0.9, nesterov=True)}
"""Outer optimizers by name, as published: local SGD's and DiLoCo's."""


OF_OUTER = "outer "  # before the kind of a state array of the outer optimizer, as "outer momentum"


class FragmentStretch(NamedTuple):
    """A part of a fragment that travels by itself: its place there, the bucket that a scheme sees,
    and the number of this bucket."""

    where: slice
    run: GradientRun
    number: int


class AllSums(Phased):
    """The sums of a fragment's stretches on their way."""

    def __init__(self, sums: Sequence[Pending]) -> None:
        self.sums = sums

    def advance(self) -> None:
        for each in self.sums:
            if isinstance(each, Phased):
                each.advance()

    def wait(self) -> None:
        for each in self.sums:
            each.wait()

    def done(self) -> bool:
        return all(each.done() for each in self.sums)


class Fragment:
    """A slice of the vector of all weights. The outer optimizer's tensor: it has data, a gradient
    and a name.

    Attributes: name; data: the common weights; grad: their outer gradient, while the outer step
    reads it.
                own: this rank's weights; pending: the sum of outer gradients under way; in_flight:
                the array that it is summed in.
                stretches: at most 4 MiB each: one is encoded while the one before is on the link.
    """

    def __init__(
        self, number: int, own: Array, common: Array, stretches: Sequence[FragmentStretch]
    ) -> None:
        self.name = f"fragment {number}"
        self.own = own
        self.data = common  # common weights, so named for SGD
        self.stretches = stretches
        self.grad: Array | None = None
        self.pending: AllSums | None = None
        self.in_flight: Array | None = None


def cut_fragments(
    count: int, own: Array, common: Array, weights: Sequence[Parameter], group: Group
) -> list[Fragment]:
    """Cut the vectors of all weights, a rank's own and the common ones, into `count` slices, equal
    to one element."""
    fragments = list[Fragment]()
    first = 0
    for number, (start, stop) in enumerate(pairwise(bounds(len(own), count))):
        cuts = max(1, -(-(stop - start) * own.itemsize // STRETCH_BYTES))
        stretches = list[FragmentStretch]()
        for low, high in pairwise(bounds(stop - start, cuts)):
            run = GradientRun(
                tuple(_spans(weights, start + low, start + high)), group, "all_reduce"
            )
            stretches.append(FragmentStretch(slice(low, high), run, first + len(stretches)))
        fragments.append(Fragment(number, own[start:stop], common[start:stop], stretches))
        first += cuts
    return fragments


def _spans(
    weights: Sequence[Parameter], start: int, stop: int
) -> Iterator[tuple[Parameter, range]]:
    """Yield the parameters that lie in [start, stop) of the vector of all, each with its elements
    there."""
    first = 0
    for parameter in weights:
        inside = range(max(start - first, 0), min(stop - first, parameter.size))
        if inside:
            yield parameter, inside
        first += parameter.size
