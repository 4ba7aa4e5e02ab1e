"""The common work of every strategy before and after its passes: take its part of the batch; give
unused parameters a gradient; find the norm of the gradient."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from minidist.autograd.tensor import Parameter, Tensor
from minidist.comm.group import Group
from minidist.data.rank_batch import Batch as Batch
from minidist.data.rank_batch import RankBatch, add_squares
from minidist.device.backend import Array, array_module
from minidist.errors import ConfigError
from minidist.nn.layers import DropoutKey
from minidist.optim import norm_of, squares_of


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


def loss_of(model: Any, key: Key | None = None) -> Loss:
    """Return the model's own loss: `model.loss(inputs, targets, divisor)`; of a GPT with the rows'
    dropout key."""
    if key is None:
        return lambda part, divisor: model.loss(part.inputs, part.targets, divisor)
    return lambda part, divisor: model.loss(part.inputs, part.targets, divisor, key=key(part))


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


@dataclass(frozen=True)
class Counted:
    """The part of the whole gradient that this rank counts in the norm.

    The norm is the root of the sum of squares of all numbers of the gradient; each number of the
    model counts once:

        strategy                  a rank counts                            added over
        one process, DDP          the whole gradient                       no other rank
        local steps               its own gradient                         no other rank
        ZeRO                      its pieces                               the ranks of its copy
        parameter server          a server's keys                          the servers
        pipeline                  its stages; a tied table: first end      the stages
        Hybrid (chapter 17)       what no other rank counts                norm_group

    Attributes: tensors: parameters or pieces, whose `grad` counts; None counts as zero.
                group: the ranks that together count each number once; None: this rank counts all.
                batch: the ranks of the group compare it on this occasion (add_squares); None: they
                compare nothing.
    """

    tensors: Sequence[Any]
    group: Group | None = None
    batch: Batch | None = None

    def squares(self) -> float | Array:
        """Return the sum of the squares of this rank's numbers; on a GPU the host does not wait."""
        # with an offload the tensors are StoredPieces, which name their store (chapter 20)
        store = getattr(self.tensors[0], "store", None) if self.tensors else None
        if store is not None:
            own: float = store.squares(self.tensors)
            return own
        return squares_of(tensor.grad for tensor in self.tensors)


def gradient_norm(counted: Counted) -> float | Array:
    """Return the norm of the whole gradient, the same bits on every rank and transport; inf or NaN
    if a number is.

    Clipping scales the gradient by it, and a loss scale finds an overflow in it. The ranks' sums
    are float64, and are added in rank order.
    Returns: without a group perhaps an array of no dims on a GPU: the host does not wait.
    Cost:    with a group one all-gather of a float64 per rank, and of two more if there is a batch
             to compare, counted under `control`.
    """
    squares = counted.squares()
    if counted.group is not None:
        squares = add_squares(counted.group, float(squares), counted.batch)
    return norm_of(squares)
