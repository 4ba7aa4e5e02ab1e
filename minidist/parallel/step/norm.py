"""The norm of the whole gradient: one function, for every strategy.

Clipping scales a gradient by its norm, and a loss scale finds an overflow in it. The norm is the
root of the sum of squares of all numbers of the gradient; each number of the model counts once. A
strategy says which numbers its rank counts, and over which ranks the sums are added (Counted):

    strategy                     a rank counts                            added over
    one process, DDP             the whole gradient                       no other rank
    local steps                  its own gradient                         no other rank
    ZeRO                         its pieces                               the ranks of its copy
    parameter server             a server's keys                          the servers
    pipeline                     its stages; a tied table: first end      the stages
    Hybrid (chapter 17)          what no other rank counts                the ranks that differ in it

Sums are float64 and are added in rank order: the same bits on every rank and transport.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minidist.comm.group import Group
from minidist.data.rank_batch import Batch, add_squares
from minidist.device.backend import Array
from minidist.optim import norm_of, squares_of


@dataclass(frozen=True)
class Counted:
    """The part of the whole gradient that this rank counts in the norm.

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
    """Return the norm of the whole gradient, the same bits on every rank; inf or NaN if a number
    is.

    Returns: without a group perhaps an array of no dims on a GPU: the host does not wait.
    Cost:    with a group one all-gather of a float64 per rank, and of two more if there is a batch
             to compare, counted under `control`.
    """
    squares = counted.squares()
    if counted.group is not None:
        squares = add_squares(counted.group, float(squares), counted.batch)
    return norm_of(squares)
