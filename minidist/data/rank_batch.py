"""A batch as the ranks of a job pass it to a step: checked, compared, or each rank's own if the caller says so.

    step(batch)                every rank passes the global batch        digests travel with the step's losses
    step(batch, local=True)    each rank passes its own sequences        how many these are travels before the step

    reader 0   rows of rank 0      the global batch is these parts, one after another; ranks that share a reader's
    reader 1   rows of rank 1      rows, along pp, cp and tp, pass the same

Before the first step all ranks compare shapes too, so that no rank waits for messages that another does not send.
A digest is a whole number of 52 bits, which float64 holds: 32 of the numbers, 20 of shape and dtype.
"""

import zlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from minidist.comm.group import Group
from minidist.device.backend import Array, device_of, digested, empty, is_array, is_simulated
from minidist.errors import ConfigError, DtypeError, MismatchError, PlanError, ShapeError

Batch = tuple[Array, Array]
"""(inputs, targets), each with one row a sequence (or a sample): (sequences, tokens) integers for a GPT."""

WINDOW_BYTES = 64 << 10
"""Bytes of an array that a step digests; of a larger array other rows in each step."""

EVERY = 100
"""The numbers of a batch on a GPU are read in one of so many steps, because the host waits for them."""

FORM_BITS = 20
"""Of a digest, those of shape and dtype: the lowest."""

NAMES = ("inputs", "targets")
ADVICE = "pass every rank the same global batch, or each rank its own sequences with step(batch, local=True)"



class RankBatch(tuple[Array, Array]):
    """(inputs, targets) as this rank was given them, and beside it what it knows of the other ranks.

    Attributes: digests: of inputs and targets, to be compared with the other ranks'; none if there is nothing to.
                rows: how many sequences each reader of the batch has, if this rank was given its own alone; else None:
                it was given the global batch.
    """

    digests: tuple[float, ...] = ()
    rows: tuple[int, ...] | None = None


class Reader(Protocol):
    """What a step asks of a strategy, to know who reads which rows."""

    asynchronous: bool

    def readers(self, everyone: Group) -> tuple[Group, int]:
        """(group, k): its first k ranks divide the rows of a batch."""
        ...


# ------------------------------------------------------------------------------------------------------- one rank

def check_batch(who: str, batch: Any, context: int, *, may_be_empty: bool = False) -> None:
    """Check that a batch can be one of a GPT: (inputs, targets), each (sequences, tokens) of integers.

    Args:    who: is called so in an error; context: the most tokens; may_be_empty: it may have no sequence.
    Raises:  ShapeError, DtypeError.
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        came = f"{type(batch).__name__} of {len(batch)}" if hasattr(batch, "__len__") else type(batch).__name__
        raise ShapeError(f"{who}: a batch is a pair (inputs, targets), and {came} came; pass two arrays of shape "
                         f"(sequences, tokens)")
    for name, array in zip(NAMES, batch, strict=True):
        if not is_array(array):
            raise DtypeError(f"{who}: {name} are {type(array).__name__}, no array; pass an integer array of shape "
                             f"(sequences, tokens)")
        if array.dtype.kind not in "iu":
            raise DtypeError(f"{who}: {name} have dtype {array.dtype}; they are numbers of tokens: pass integers")
        if array.ndim != 2:
            raise ShapeError(f"{who}: {name} have shape {array.shape}; pass (sequences, tokens)")
    inputs, targets = batch
    if inputs.shape != targets.shape:
        raise ShapeError(f"{who}: inputs have shape {inputs.shape}, targets {targets.shape}; each input has one target")
    sequences, tokens = inputs.shape
    if not (sequences or may_be_empty):
        raise ShapeError(f"{who}: the batch has no sequence, its shape is {inputs.shape}; pass at least one")
    if sequences and not tokens:
        raise ShapeError(f"{who}: the batch's sequences have no token, its shape is {inputs.shape}; pass at least one")
    if sequences and tokens > context:
        raise ShapeError(f"{who}: sequences of {tokens} tokens are longer than the context of {context}; cut them, or "
                         f"build the model with a longer context")


def digest_of(array: Array, step: int) -> float:
    """Return the digest of a part of the batch of a step; of a large array other rows count in each step."""
    content = 0
    if device_of(array) == "cpu" or step % EVERY == 0:
        row = max(1, array.itemsize * array.shape[1])
        rows = max(1, WINDOW_BYTES // row)
        start = step * rows % max(1, len(array)) if rows < len(array) else 0
        content = zlib.crc32(digested(array[start:start + rows]))
    form = zlib.crc32(repr((array.shape, array.dtype.str)).encode())
    return float((content << FORM_BITS) + form % (1 << FORM_BITS))


def with_digests(batch: Batch, step: int) -> RankBatch:
    """Return the global batch of a step, with what the ranks compare when they add up its losses."""
    found = RankBatch(batch)
    found.digests = (digest_of(batch[0], step), digest_of(batch[1], step))
    return found


def rows_of_all(batch: Batch, size: int) -> list[int]:
    """Return how many rows of the global batch each of `size` ranks has; cut in `numpy.array_split` order."""
    if isinstance(batch, RankBatch) and batch.rows is not None:
        return list(batch.rows)
    return [len(part) for part in np.array_split(np.arange(len(batch[0])), size)]


def targets_in(batch: Batch) -> int:
    """Return how many targets the global batch has."""
    if isinstance(batch, RankBatch) and batch.rows is not None:
        return int(sum(batch.rows) * batch[1].shape[1])
    return int(batch[1].size)


def digests_of(batch: Batch) -> tuple[float, ...]:
    """Return what the ranks compare of a batch: one number of the inputs, one of the targets, or nothing."""
    return batch.digests if isinstance(batch, RankBatch) else ()


# ------------------------------------------------------------------------------------------------------ all ranks

class BatchMeeting:
    """Compares what the ranks of a job pass to their steps. Every rank makes one, and asks it before each step.

    Args:    world: all ranks; strategy: says which of them divide the rows of a batch.
    """

    def __init__(self, world: Group, strategy: Reader) -> None:
        self.world = world
        self.strategy = strategy
        self._met = False       # the ranks have compared a batch before its step

    def take(self, batch: Batch, *, step: int, context: int, local: bool) -> Batch:
        """Check a rank's batch of a step; return it with what the step needs to know of the other ranks'.

        Args:    context: as check_batch; local: the batch has this rank's own sequences alone, else those of all ranks.
        Cost:    before the first step, and with `local` before each, an all-gather of six float64 a rank, counted
                 under `control`. Later batches are compared when their losses are added up (add_losses).
        Raises:  as check_batch; MismatchError, ConfigError, ShapeError, the same on every rank, for batches that do not
                 go together; PlanError for `local` where each rank makes steps of its own.
        """
        alone = self.world.size == 1
        check_batch("step", batch, context, may_be_empty=local and not alone)
        if alone or is_simulated():
            return batch
        apart = self.strategy.asynchronous
        if apart and local:
            raise PlanError("step: local=True needs the number of all ranks' tokens, and ranks of an asynchronous plan "
                            "are never together; pass the global batch")
        if apart or (self._met and not local):
            return with_digests(batch, step)
        group, readers = self.strategy.readers(self.world)
        found = _meet(batch, self.world, step=step, local=local, readers=readers,
                      reader=group.rank if group.rank < readers else -1)
        self._met = True
        return found


def _meet(batch: Batch, world: Group, *, step: int, local: bool, reader: int, readers: int) -> RankBatch:
    """Compare the batches of all ranks before a step; return this rank's. Args: reader: negative: it reads none."""
    found = with_digests(batch, step)
    sequences, tokens = batch[0].shape
    mine = [float(local), *found.digests, reader, sequences, tokens]
    with world.ledger.control():
        told = world.all_gather(np.array(mine, dtype=np.float64), algorithm="ring").reshape(-1, len(mine))
    ranks, digests = world.world_ranks, told[:, 1:3]
    if len(set(told[:, 0])) > 1:
        own, whole = (int(np.argmax(told[:, 0] == way)) for way in (1, 0))
        raise MismatchError(f"rank {ranks[own]} passes its own sequences (local=True), rank {ranks[whole]} the global "
                            f"batch; {ADVICE}")
    if not local:
        check_digests(digests, ranks)
        return found
    return _own_rows(batch, told[:, 3:].astype(int), digests, ranks, readers)


def _own_rows(batch: Batch, told: np.ndarray, digests: np.ndarray, ranks: Sequence[int], readers: int) -> RankBatch:
    """Return this rank's own part. Args: told: of each rank, its reader's number, sequences and tokens."""
    of, sequences, lengths = told.T
    idle = np.flatnonzero((of < 0) & (sequences > 0))
    if len(idle):
        raise ConfigError(f"rank {ranks[idle[0]]} is a parameter server, which reads no rows, and passes "
                          f"{sequences[idle[0]]} sequences; pass it a batch of shape (0, tokens)")
    filled = np.flatnonzero(sequences)
    if not len(filled):
        raise ShapeError("step: no rank passes a sequence; the global batch needs at least one")
    length = lengths[filled[0]]
    other = filled[lengths[filled] != length]
    if len(other):
        raise MismatchError(f"rank {ranks[other[0]]} passes sequences of {lengths[other[0]]} tokens, rank "
                            f"{ranks[filled[0]]} of {length}; pass sequences of one length")
    rows = []
    for reader in range(readers):
        sharing = np.flatnonzero(of == reader)
        check_digests(digests[sharing], [ranks[rank] for rank in sharing], own=True)
        rows.append(int(sequences[sharing[0]]))
    found = RankBatch(array if len(array) else empty((0, int(length)), array.dtype, device_of(array))
                      for array in batch)
    found.rows = tuple(rows)
    return found


def check_digests(digests: np.ndarray, ranks: Sequence[int], *, own: bool = False) -> None:
    """Raise MismatchError unless all digests are equal: one row a rank, of inputs and targets.

    Args:    ranks: in the world; own: of ranks that share the rows of one reader.
    """
    if (digests == digests[0]).all():
        return
    usual = int((digests[:, None] == digests).all(axis=2).sum(axis=1).argmax())     # the first of most ranks
    other = next(rank for rank, row in enumerate(digests) if (row != digests[usual]).any())
    form = 1 << FORM_BITS
    differing = " and ".join(name for name, here, there in zip(NAMES, digests[other], digests[usual], strict=True)
                             if here != there)
    alike = (digests[other] % form == digests[usual] % form).all()
    way = "differ from" if alike else "have another shape or dtype than"
    advice = "ranks along pp, cp and tp share the rows of one reader: pass them the same" if own else ADVICE
    raise MismatchError(f"rank {ranks[other]}: the batch's {differing} {way} rank {ranks[usual]}'s; {advice}")


def add_losses(group: Group, share: float, batch: Batch, *, each: int = 1) -> float:
    """Return the sum of the ranks' shares of a step's loss, the same bits on every rank; compare their batches.

    Args:    each: of so many neighbours one share counts, as they have the same.
    Cost:    one all-gather of a float64 a rank, and of two more if there is something to compare, under `control`.
    Raises:  MismatchError, the same on every rank, if their batches differ.
    """
    with group.ledger.control():
        told = group.all_gather(loss_record(share, batch), algorithm="ring")
    return sum_of_records(told, group, each=each)


def loss_record(share: float, batch: Batch) -> np.ndarray:
    """Return what a rank tells the others at the end of a step: its share of the loss, and what they compare."""
    return np.array([share, *digests_of(batch)], dtype=np.float64)


def sum_of_records(told: np.ndarray, group: Group, *, each: int = 1) -> float:
    """Return the sum of the shares in the records of all ranks of a group. Args, Raises: as add_losses."""
    records = told.reshape(group.size, -1)
    if records.shape[1] > 1:
        check_digests(records[:, 1:], group.world_ranks)
    return float(np.sum(np.ascontiguousarray(records[::each, 0])))
