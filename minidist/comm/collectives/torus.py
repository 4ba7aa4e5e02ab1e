"""Torus: ranks in a grid whose rows and columns are rings, as in TPU networks; reduce along rows,
then along columns.

    P=6, 2 x 3     r0 - r1 - r2 - (r0)        row:    ranks that follow each other
                   |    |    |                column: every third rank
                   r3 - r4 - r5 - (r3)

    all-reduce     reduce-scatter in each row: r0 and r3 hold the sums of their rows' first third
                   all-reduce of that third in each column
                   all-gather in each row

The ring's bytes exactly, in 2(R + C - 2) steps instead of 2(P-1) (chunks of more than 4 MiB take
more: all_reduce). R x C is the grid of P ranks that is nearest to a square: 2 x 3 for 6, 3 x 3 for
9. A prime P is one row: the ring itself.

notes: N4 §3 环面网格 (N4:153)
"""

from typing import NamedTuple

import numpy as np

from minidist.comm.calls.buffers import Rows
from minidist.comm.calls.call import Call
from minidist.comm.calls.reduction import Reduction
from minidist.comm.chunks import bounds, split
from minidist.comm.collectives import ring
from minidist.comm.collectives.blocking import BlockingGroup
from minidist.comm.collectives.subset_call import SubsetCall


def plain_all_reduce(row: BlockingGroup, column: BlockingGroup, x: np.ndarray) -> np.ndarray:
    """Return the sum of x (n,) over a grid of ranks: a ring in the row, one in the column, and the
    row's once more."""
    chunks = np.array_split(x.copy(), row.size)
    ring.plain_reduce_scatter(row, chunks)  # the row's sum of chunk row.rank
    chunks[row.rank] = ring.plain_all_reduce(column, chunks[row.rank])
    ring.plain_all_gather(row, chunks)
    return np.concatenate(chunks)


# The real version makes the grid from the group's own ranks, and has reduce-scatter and all-gather.


class Grid(NamedTuple):
    """The shape of a grid: R rows of C ranks."""

    rows: int
    columns: int

    def row_of(self, rank: int) -> list[int]:
        """Return the ranks of the row of `rank`."""
        first = rank - rank % self.columns
        return list(range(first, first + self.columns))

    def column_of(self, rank: int) -> list[int]:
        """Return the ranks of the column of `rank`."""
        return list(range(rank % self.columns, self.rows * self.columns, self.columns))


def grid(size: int) -> Grid:
    """Return the grid of `size` ranks that is nearest to a square, rows <= columns."""
    rows = max(rows for rows in range(1, size + 1) if size % rows == 0 and rows * rows <= size)
    return Grid(rows, size // rows)


def all_reduce(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    """Reduce-scatter in the row, all-reduce the row's chunk in the column, all-gather in the row;
    in `out`.

    P=4           r0 sends     r1 sends     r2 sends     r3 sends
    step 0        c1:2 -> r1   c0:1 -> r0   c1:2 -> r3   c0:1 -> r2
    step 1        c0:h -> r2   c1:h -> r3   c0:h -> r0   c1:h -> r1      half a chunk
    step 2        c0:h -> r2   c1:h -> r3   c0:h -> r0   c1:h -> r1
    step 3        c0:1 -> r1   c1:2 -> r0   c0:1 -> r3   c1:2 -> r2

    Cost:    2(C-1) messages per rank in its row, 2(R-1) in its column for each stretch of at most 4
             MiB of its chunk (ring.py); 2(P-1)*nbytes over all ranks, exactly. No workspace.
    Rounding: low precision is added in float32 and rounded once per hop, R + C - 2 times in all.
    """
    call.agree()
    form = grid(call.size)
    row = SubsetCall(call, form.row_of(call.rank))
    column = SubsetCall(call, form.column_of(call.rank), first_step=form.columns - 1)
    sums = split(out, form.columns)
    ring.reduce_around(row, split(x, form.columns), sums, op)
    ring.all_reduce(column, sums[row.rank], sums[row.rank], op)
    ring.gather_around(row, sums, first_step=form.columns + 2 * form.rows - 3)


def reduce_scatter(call: Call, x: np.ndarray, out: np.ndarray, op: Reduction) -> None:
    """Reduce-scatter the chunks of whole rows in the column, then single chunks in the row.

    P=4           r0 sends     r1 sends     r2 sends     r3 sends
    step 0        c2:4 -> r2   c2:4 -> r3   c0:2 -> r0   c0:2 -> r1
    step 1        c1:2 -> r1   c0:1 -> r0   c3:4 -> r3   c2:3 -> r2

    Cost:    R + C - 2 messages per rank; (P-1)*nbytes over all ranks, exactly.
             Workspace: at most three times the chunks of a row.
    Rounding: as all_reduce.
    """
    call.agree()
    form = grid(call.size)
    cut = bounds(len(x), call.size)
    row = SubsetCall(call, form.row_of(call.rank), form.rows - 1)
    column = SubsetCall(call, form.column_of(call.rank))
    strips = [
        x[cut[first] : cut[first + form.columns]] for first in range(0, call.size, form.columns)
    ]
    strip = strips[column.rank]
    if form.rows > 1:
        strip = call.workspace(len(strip), x.dtype)
        ring.reduce_chunks(column, strips, strip, op)
    start = cut[call.rank - row.rank]
    chunks = [strip[cut[rank] - start : cut[rank + 1] - start] for rank in form.row_of(call.rank)]
    ring.reduce_chunks(row, chunks, out, op)
    op.finish(out, out)


def all_gather(call: Call, own: np.ndarray, rows: Rows) -> np.ndarray:
    """Pass blocks around the row, then the row's joined blocks around the column.

    P=4           r0 sends     r1 sends     r2 sends     r3 sends
    step 0        b0 -> r1     b1 -> r0     b2 -> r3     b3 -> r2
    step 1        b01 -> r2    b01 -> r3    b23 -> r0    b23 -> r1

    Cost:    R + C - 2 messages per rank; (P-1)*(the bytes of all blocks) over all ranks, exactly.
             No copy where all blocks have one length.
    """
    call.agree()
    form = grid(call.size)
    around = form.row_of(call.rank)
    row = SubsetCall(call, around)
    column = SubsetCall(call, form.column_of(call.rank), form.columns - 1)
    blocks = ring.gather_blocks(row, own, lambda place: rows.place(around[place]))
    strip = rows.merge(around[0], blocks)
    strips = ring.gather_blocks(
        column, strip, lambda place: rows.place(place * form.columns, form.columns)
    )
    return rows.complete(rows.merge(0, strips))
