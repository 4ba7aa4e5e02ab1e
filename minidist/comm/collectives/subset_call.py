"""A subset of the ranks of a call, as a call: algorithms of several levels combine simple
algorithms with it.

    row = SubsetCall(call, [4, 5, 6, 7])        # on each of these ranks
    ring.all_reduce(row, x, out, op)            # row.rank, row.size, row.next_rank count among them

It makes no group and needs no message: every rank computes the same subsets from data that all
ranks have. Messages carry the signature of the whole call, and are counted with it.
"""

from collections.abc import Sequence

import numpy as np

from minidist.comm.calls.buffers import Place
from minidist.comm.calls.call import Call
from minidist.comm.handle import Handle
from minidist.comm.transport import Reduce


class SubsetCall(Call):
    """The whole call with its ranks renumbered by their place in `ranks`; the step numbers that it
    reports begin at `first_step`."""

    def __init__(self, call: Call, ranks: Sequence[int], first_step: int = 0) -> None:
        self._whole = call
        self._ranks = ranks
        self._first_step = first_step
        self.rank = ranks.index(call.rank)
        self.size = len(ranks)
        self.next_rank, self.prev_rank = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        self.signature = call.signature
        self.world_ranks = call.world_ranks

    def start_send(
        self,
        dst: int,
        array: np.ndarray,
        *,
        block: bool = False,
        step: int | None = None,
        chunk: int | None = None,
    ) -> Handle:
        step = None if step is None else self._first_step + step
        return self._whole.start_send(self._ranks[dst], array, block=block, step=step, chunk=chunk)

    def start_recv(self, src: int, into: np.ndarray, reduce: Reduce | None = None) -> Handle:
        return self._whole.start_recv(self._ranks[src], into, reduce)

    def start_recv_block(
        self, src: int, place: Place, like: np.ndarray | None = None
    ) -> tuple[Handle, list[np.ndarray]]:
        return self._whole.start_recv_block(self._ranks[src], place, like)

    def agree(self) -> None:
        """Do nothing: the ranks of the whole call have already agreed."""

    def workspace(self, length: int, dtype: np.dtype) -> np.ndarray:
        return self._whole.workspace(length, dtype)
