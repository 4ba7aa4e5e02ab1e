"""Flat shards: parameters one after another in one vector; each rank owns a chunk of it.

    parameters     |  w (3, 2)  | b (2) |    v (5)    |      13 elements
    chunks, P=3    |     r0     |    r1    |   r2     |      5 + 4 + 4: numpy.array_split

A chunk's edges fall anywhere, also inside a parameter, so shards differ by at most one element, for
any shapes. An optimizer is given the pieces of parameters that lie in the chunk.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from minidist.autograd.tensor import Parameter
from minidist.comm.chunks import bounds, spans_within
from minidist.comm.group import Group
from minidist.device import account
from minidist.device.backend import Array, array_module
from minidist.errors import ConfigError
from minidist.parallel.step.replicas import sharers


class Piece:
    """A rank's part of one parameter, which the optimizer updates; it may be empty.

    It keeps the parameter's number of dims, (1, …, n). A rule over parameters is given the whole
    parameter.

    Attributes: name, data, grad: views of the shards, so always up to date; part: its positions in
                the parameter.
    """

    def __init__(self, parameter: Parameter, data: Array, grad: Array, part: range) -> None:
        self.parameter = parameter
        self.part = part
        shape = (*(1 for _ in parameter.shape[1:]), -1)
        self.name = parameter.name
        self.data = data.reshape(shape)
        self.grad = grad.reshape(shape)


class Flat:
    """A run of parameters of one dtype as one vector, and this rank's chunk of it.

    Args:    group: the ranks that share it, unless `shared_by` of the parameters names others.
    Attributes: group                    the ranks that share it
                parameters, size, nbytes   the run, and how many elements and bytes it has
                chunk, chunk_size        where this rank's chunk lies, and how many elements it has
    """

    def __init__(self, parameters: Sequence[Parameter], group: Group) -> None:
        self.group = sharers(parameters, group)
        self.parameters = tuple(parameters)
        self.dtype = parameters[0].dtype
        self.size = sum(p.size for p in parameters)
        edges = bounds(self.size, self.group.size)
        self.chunk = slice(edges[self.group.rank], edges[self.group.rank + 1])
        self.chunk_size, self.nbytes = (
            self.chunk.stop - self.chunk.start,
            self.size * self.dtype.itemsize,
        )

    def chunk_spans(self, chunk: slice | None = None) -> Iterator[tuple[Parameter, slice, range]]:
        """Yield (parameter, its piece's place in a chunk, the piece's positions in the flattened
        parameter); default: of this rank's chunk."""
        return spans_within(
            [(parameter, range(parameter.size)) for parameter in self.parameters],
            chunk or self.chunk,
        )

    def views(self, vector: Array) -> Iterator[tuple[Parameter, Array]]:
        """Yield (parameter, its place in `vector` in its own shape)."""
        return views(self.parameters, vector)

    def pieces(self, weights: Array, gradients: Array) -> list[Piece]:
        """Return a piece of every parameter, over this rank's chunks of the weights and of their
        gradients."""
        return [
            Piece(p, weights[place], gradients[place], part)
            for p, place, part in self.chunk_spans()
        ]

    def join(self, *, copy: bool = True) -> Array:
        """Move the parameters' data into one new vector; each becomes a view of it. `copy`: with
        their values."""
        return join(self.parameters, copy=copy)


def views(run: Sequence[Parameter], vector: Array) -> Iterator[tuple[Parameter, Array]]:
    """Yield (parameter, its place in `vector` in its own shape), for parameters one after
    another."""
    start = 0
    for parameter in run:
        yield parameter, vector[start : start + parameter.size].reshape(parameter.shape)
        start += parameter.size


def join(run: Sequence[Parameter], *, copy: bool = True) -> Array:
    """Move the parameters' data into one new vector, as Flat.join."""
    vector = empty_like(run[0].data, sum(parameter.size for parameter in run), "parameters")
    for parameter, view in views(run, vector):
        if copy:
            view[...] = parameter.data
        parameter.place(view)
    return vector


def settle_in_vector(run: Iterable[Parameter]) -> None:
    """Fix `data` of these parameters as a view of their vector (Parameter.in_vector)."""
    for parameter in run:
        parameter.in_vector = True


def forget(parameters: Iterable[Parameter], xp: Any) -> None:
    """Drop values that are kept elsewhere: a parameter keeps shape and dtype, takes one element,
    and reads as NaN."""
    for parameter in parameters:
        parameter.place(xp.broadcast_to(xp.full((), xp.nan, parameter.dtype), parameter.shape))


def empty_like(array: Array, size: int, category: str) -> Array:
    """Return a vector on `array`'s device, of its dtype, counted by the memory account."""
    return account.current().hold(array_module(array).empty(size, array.dtype), category)


def trainable(parameters: Iterable[Parameter]) -> list[Parameter]:
    """Return the parameters that are not frozen: those that a strategy trains.

    One of them may be frozen later; the optimizer then leaves it as it is. A parameter that begins
    to learn later has no place for a gradient and no state: its first backward raises ConfigError.
    Raises:  ConfigError if there is none.
    """
    chosen = []
    for parameter in parameters:
        if untrained(parameter):  # by an earlier strategy
            parameter.hooks.remove(left_out)
        if parameter.requires_grad:
            chosen.append(parameter)
        else:
            parameter.hooks.append(left_out)
    if not chosen:
        raise ConfigError(
            "no parameter asks for a gradient, so there is nothing to train; leave some "
            "requires_grad on"
        )
    return chosen


def untrained(parameter: Parameter) -> bool:
    """Return whether the parameter was frozen when the strategy of its model was made."""
    return left_out in parameter.hooks


def left_out(parameter: Parameter) -> None:
    """Raise ConfigError: backward has reached a parameter that no strategy trains."""
    raise ConfigError(
        f"requires_grad of {parameter.name!r} was switched on, but it was off when "
        f"the training was set up; switch it on before, and off until it is to learn"
    )
