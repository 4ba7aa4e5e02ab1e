"""The common work of every strategy before and after its passes: take its part of the batch; give
unused parameters a gradient."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from minidist.autograd.tensor import Parameter, Tensor
from minidist.data.rank_batch import Batch as Batch
from minidist.data.rank_batch import RankBatch
from minidist.device.backend import Array, array_module
from minidist.errors import ConfigError
from minidist.nn.layers import DropoutKey


@dataclass(frozen=True)
class Part:
    """A rank's rows of a global batch; `first` is the number of the first of these rows there."""

    inputs: Array
    targets: Array
    first: int


Key = Callable[[Part], DropoutKey | None]
"""`key(part)`: which tokens of which step these rows are, for dropout."""

Loss = Callable[[Part, int], Tensor]
"""`loss(part, divisor)`: the sum of the losses of the part's targets over `divisor`, one number."""


def loss_of(model: Any) -> Loss:
    """Return the model's own loss: `model.loss(inputs, targets, divisor)`."""
    return lambda part, divisor: model.loss(part.inputs, part.targets, divisor)


def part_of(batch: Batch, *, size: int, rank: int) -> Part:
    """Return rank `rank`'s rows of a global batch, cut in `numpy.array_split` order; views, nothing
    is copied.

    The first `B % size` ranks get one row more; with fewer rows than ranks the last ranks get none.
    A rank that was given only its own rows has all of them.
    """
    inputs, targets = batch
    if isinstance(batch, RankBatch) and batch.rows is not None:
        return Part(inputs, targets, sum(batch.rows[:rank]))
    rows, start = rows_of(len(inputs), size=size, rank=rank)
    return Part(inputs[start : start + rows], targets[start : start + rows], start)


def rows_of(rows: int, *, size: int, rank: int) -> tuple[int, int]:
    """Return (the number of rank `rank`'s rows, the number of its first row), in
    `numpy.array_split` order."""
    each, more = divmod(rows, size)
    return each + (rank < more), rank * each + min(rank, more)


def micro_parts(part: Part, count: int) -> list[Part]:
    """Return a rank's part in `count` passes, cut as `part_of` does, some without a row. Raises:
    ConfigError if count < 1."""
    if count < 1:
        raise ConfigError(f"accumulate={count}: a step has at least one backward pass")
    micros = [
        part_of((part.inputs, part.targets), size=count, rank=number) for number in range(count)
    ]
    return [Part(micro.inputs, micro.targets, part.first + micro.first) for micro in micros]


def zero_unused(parameters: Iterable[Parameter]) -> None:
    """Give a zero gradient to each parameter that this step's backward did not reach.

    So an unused parameter means the same on one process and on many, where another rank may have
    used it: its gradient is zero, and momentum and weight decay continue.
    """
    for parameter in parameters:
        if parameter.grad is None:
            room = parameter.gradient_room()
            zeros = (
                array_module(parameter.data).zeros_like(parameter.data) if room is None else room
            )
            zeros[...] = 0
            parameter.grad = zeros
