"""A batch as the ranks of a job pass it to a step: checked, and compared or put together.

    step(batch)               every rank passes the global batch     digests are sent with the loss
    step(batch, local=True)   each rank passes its own sequences     their number is sent before

    reader 0   rows of rank 0      the global batch is these parts, one after another; ranks along
    reader 1   rows of rank 1      pp, cp and tp that share a reader's rows pass the same

Before the first step all ranks compare their batches, so that none waits for a message that another
does not send. Ranks of tp all have the same loss, so they compare their batches together with the
clipping norm; without one, in each 100th step. A digest is a whole number of 52 bits, which float64
holds: 32 bits of the numbers, 20 of shape and dtype.
"""

import zlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from minidist.comm.group import Group
from minidist.device.backend import Array, device_of, digested, empty, is_array
from minidist.errors import ConfigError, DtypeError, MismatchError, PlanError, ShapeError

Batch = tuple[Array, Array]
"""(inputs, targets), one row a sequence (or a sample): (sequences, tokens) integers for a GPT."""

WINDOW_BYTES = 64 << 10
"""Bytes of an array that a step digests; of a larger array other rows in each step."""

EVERY = 100
"""In one of so many steps all ranks compare batches before it, and read those that are on a GPU."""

FORM_BITS = 20
"""Of a digest, those of shape and dtype: the lowest."""

DIFFERS = -1.0
"""In place of a digest: of some ranks that this rank has asked, batches differ."""

NAMES = ("inputs", "targets")
ADVICE = (
    "pass every rank the same global batch, or each rank its own sequences with "
    "step(batch, local=True)"
)


class RankBatch(tuple[Array, Array]):
    """(inputs, targets) as this rank was given them, and facts about the other ranks' batches.

    Attributes: digests: of inputs and targets, to be compared with the other ranks', or none.
                differs: this rank has seen that another rank's batch differs (add_squares).
                rows: the number of sequences of each reader of the batch, if this rank was given
                only its own; None: it was given the global batch.
    """

    digests: tuple[float, ...] = ()
    differs: bool = False
    rows: tuple[int, ...] | None = None


class HasReaders(Protocol):
    """The part of a strategy that a BatchMeeting uses: which ranks read which rows, and whether
    ranks wait for each other."""

    asynchronous: bool
    common_state_of: Any

    def readers(self, everyone: Group) -> tuple[Group, int]:
        """Return (group, k): the first k ranks of the group divide the rows of a batch."""
        ...


# ---------------------------------------------------------------------------------------- one rank


def check_batch(who: str, batch: Any, context: int, *, may_be_empty: bool = False) -> None:
    """Check that a batch can be one of a GPT: two arrays (sequences, tokens) of integers.

    Args:    who: begins each error; context: the most tokens; may_be_empty: without a sequence.
    Raises:  ShapeError, DtypeError.
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        parts = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        raise ShapeError(
            f"{who}: a batch is a pair (inputs, targets), but got {type(batch).__name__}{parts}; "
            "pass two arrays of shape (sequences, tokens)"
        )
    for name, array in zip(NAMES, batch, strict=True):
        if not is_array(array):
            raise DtypeError(
                f"{who}: {name} are of type {type(array).__name__}, not an array; pass an array of "
                "integers of shape (sequences, tokens)"
            )
        if array.dtype.kind not in "iu":
            raise DtypeError(f"{who}: {name} have dtype {array.dtype}; pass tokens as integers")
        if array.ndim != 2:
            raise ShapeError(f"{who}: {name} have shape {array.shape}; pass (sequences, tokens)")
    inputs, targets = batch
    if inputs.shape != targets.shape:
        raise ShapeError(
            f"{who}: inputs have shape {inputs.shape}, targets {targets.shape}; pass one target "
            "per input"
        )
    sequences, tokens = inputs.shape
    if not (sequences or may_be_empty):
        raise ShapeError(
            f"{who}: the batch has no sequence, its shape is {inputs.shape}; pass at least one"
        )
    if sequences and not tokens:
        raise ShapeError(
            f"{who}: the sequences have no token, their shape is {inputs.shape}; pass at least one"
        )
    if sequences and tokens > context:
        raise ShapeError(
            f"{who}: sequences of {tokens} tokens are longer than the context of {context}; "
            "shorten them, or build the model with a longer context"
        )


def digest_of(array: Array, step: int) -> float:
    """Return the digest of a batch's array in a step; of a large array other rows in each step."""
    content = 0
    if device_of(array) == "cpu" or step % EVERY == 0:
        row = max(1, array.itemsize * array.shape[1])
        rows = max(1, WINDOW_BYTES // row)
        start = step * rows % len(array) if rows < len(array) else 0
        content = zlib.crc32(digested(array[start : start + rows]))
    form = zlib.crc32(repr((array.shape, array.dtype.str)).encode())
    return float((content << FORM_BITS) + form % (1 << FORM_BITS))


def with_digests(batch: Batch, step: int) -> RankBatch:
    """Return the batch of a step with its digests, which the ranks compare when they add up its
    losses."""
    found = RankBatch(batch)
    found.digests = (digest_of(batch[0], step), digest_of(batch[1], step))
    return found


def rows_of_all(batch: Batch, size: int) -> list[int]:
    """Return the number of rows of the global batch that each of `size` readers has."""
    if isinstance(batch, RankBatch) and batch.rows is not None:
        return list(batch.rows)
    return [len(part) for part in np.array_split(np.arange(len(batch[0])), size)]


def targets_in(batch: Batch) -> int:
    """Return the number of targets in the global batch."""
    if isinstance(batch, RankBatch) and batch.rows is not None:
        return int(sum(batch.rows) * batch[1].shape[1])
    return int(batch[1].size)


def digests_of(batch: Batch | None) -> tuple[float, ...]:
    """Return the numbers of a batch that the ranks compare: one for the inputs, one for the
    targets."""
    return batch.digests if isinstance(batch, RankBatch) else ()


# --------------------------------------------------------------------------------------- all ranks


class BatchMeeting:
    """A check that the ranks of a job pass matching batches to their steps.

    Args:    world: all ranks; each of them makes one BatchMeeting; strategy: says which ranks read
             which rows.
    """

    def __init__(self, world: Group, strategy: HasReaders) -> None:
        self.world = world
        self.strategy = strategy
        self._met = False  # the ranks have compared a batch before its step

    def take(self, batch: Batch, *, step: int, context: int, local: bool) -> Batch:
        """Check a rank's batch; return it with the facts about the other ranks' batches that the
        step needs.

        Args:    context: as check_batch; local: the batch has only this rank's own sequences.
        Cost:    before the first step and each 100th, unless ranks train separately, and with
                 `local` before each step: an all-gather of six float64 per rank, counted under
                 `control`. Other batches are compared by the messages of norms and losses
                 (add_losses).
        Raises:  as check_batch; MismatchError, ConfigError, ShapeError for batches that do not go
                 together, the same on every rank; PlanError for `local` if the ranks never
                 synchronize.
        """
        alone = self.world.size == 1
        check_batch("step", batch, context, may_be_empty=local and not alone)
        if alone:
            return batch
        asynchronous = self.strategy.asynchronous
        if asynchronous and local:
            raise PlanError(
                "step: local=True needs the number of all ranks' tokens, but ranks of an "
                "asynchronous plan do not wait for each other; pass the global batch"
            )
        waits_for_none = asynchronous or self.strategy.common_state_of is not None
        due = step % EVERY == 0 or not self._met
        if not local and (waits_for_none or not due):
            return with_digests(batch, step)
        found = self._meet(batch, step=step, local=local)
        self._met = True
        return found

    def _meet(self, batch: Batch, *, step: int, local: bool) -> RankBatch:
        """Compare the batches of all ranks before a step; return this rank's."""
        found = with_digests(batch, step)
        group, readers = self.strategy.readers(self.world)
        reader = group.rank if group.rank < readers else -1
        mine = [float(local), *found.digests, reader, *batch[0].shape]
        with self.world.ledger.control():
            told = self.world.all_gather(np.array(mine, dtype=np.float64), algorithm="ring")
        table = told.reshape(-1, len(mine))
        ways = table[:, 0]
        ranks = self.world.world_ranks
        if len(set(ways)) > 1:
            own = ranks[int(np.argmax(ways == 1))]
            whole = ranks[int(np.argmax(ways == 0))]
            raise MismatchError(
                f"rank {own} passes its own sequences (local=True), rank {whole} the global "
                f"batch; {ADVICE}"
            )
        if not local:
            check_digests(table[:, 1:3], ranks)
            return found
        return own_part(batch, table[:, 3:].astype(int), table[:, 1:3], ranks, readers)


def own_part(
    batch: Batch, table: np.ndarray, digests: np.ndarray, ranks: Sequence[int], readers: int
) -> RankBatch:
    """Return a rank's own part of the global batch; the part knows the rows of all readers.

    Args:    table: one row per rank: its number as a reader (negative: none), sequences, tokens.
             digests: one row per rank; ranks: their numbers in the world.
    Raises:  as BatchMeeting.take.
    """
    of, sequences, lengths = table.T
    idle = np.flatnonzero((of < 0) & (sequences > 0))
    if len(idle):
        raise ConfigError(
            f"rank {ranks[int(idle[0])]} is a parameter server, which reads no rows, but it passes "
            f"{sequences[idle[0]]} sequences; pass it a batch of shape (0, tokens)"
        )
    filled = np.flatnonzero(sequences)
    if not len(filled):
        raise ShapeError("step: no rank passes a sequence; the global batch needs at least one")
    first = int(filled[0])
    length = int(lengths[first])
    odd = filled[lengths[filled] != length]
    if len(odd):
        raise MismatchError(
            f"rank {ranks[int(odd[0])]} passes sequences of {lengths[odd[0]]} tokens, rank "
            f"{ranks[first]} of {length}; pass sequences of the same length"
        )
    rows = []
    for reader in range(readers):
        sharing = [int(rank) for rank in np.flatnonzero(of == reader)]
        check_digests(digests[sharing], [ranks[rank] for rank in sharing], own=True)
        rows.append(int(sequences[sharing[0]]))
    found = RankBatch(
        array if len(array) else empty((0, length), array.dtype, device_of(array))
        for array in batch
    )
    found.rows = tuple(rows)
    return found


def check_digests(digests: np.ndarray, ranks: Sequence[int], *, own: bool = False) -> None:
    """Raise MismatchError unless all digests are equal: one row per rank, of inputs and targets.

    Args:    ranks: in the world; own: of ranks that share the rows of one reader.
    """
    if (digests == digests[0]).all():
        return
    equal = (digests[:, None] == digests).all(axis=2)
    usual = int(equal.sum(axis=1).argmax())  # the first of most ranks
    other = int(equal[usual].argmin())
    same = digests[other] == digests[usual]
    differing = " and ".join(name for name, alike in zip(NAMES, same, strict=True) if not alike)
    forms = digests % (1 << FORM_BITS)
    of_one_form = (forms[other] == forms[usual]).all()
    differ = "differ from" if of_one_form else "have another shape or dtype than"
    advice = "ranks along pp, cp and tp share the rows of one reader: pass them the same"
    raise MismatchError(
        f"rank {ranks[other]}: the batch's {differing} {differ} rank {ranks[usual]}'s; "
        f"{advice if own else ADVICE}"
    )


def add_squares(group: Group, share: float, batch: Batch | None) -> float:
    """Return the sum of the ranks' squares of a step's norm; note in the batch if batches differ.

    Args:    batch: None: nothing is compared.
    Cost:    one all-gather, as add_losses.
    Returns: the same bits on every rank, added in rank order.
    """
    records = _all_records(group, share, batch)
    digests = records[:, 1:]
    if isinstance(batch, RankBatch) and digests.size:
        batch.differs = bool((digests != digests[0]).any())
    return _sum_of_shares(records)


def add_losses(group: Group, share: float, batch: Batch, *, everyone: Group | None = None) -> float:
    """Return the sum of the ranks' shares of a step's loss; compare their batches.

    Args:    everyone: all ranks; some of them may have seen in add_squares that batches differ.
    Returns: the same bits on every rank, added in rank order.
    Cost:    one all-gather of a float64 per rank, and of two more if there is something to compare,
             counted under `control`.
    Raises:  MismatchError, the same on every rank, if their batches differ.
    """
    records = _all_records(group, share, batch)
    if everyone is not None and (records[:, 1:] == DIFFERS).any():
        with everyone.ledger.control():
            told = everyone.all_gather(np.array(digests_of(batch)), algorithm="ring")
        check_digests(told.reshape(everyone.size, -1), everyone.world_ranks)
    return sum_of_records(records, group)


def share_record(share: float, batch: Batch | None) -> np.ndarray:
    """Return the record that a rank sends to the others: its share of a number of the step, and its
    digests."""
    digests: tuple[float, ...] = ()
    if isinstance(batch, RankBatch):
        digests = (DIFFERS, DIFFERS) if batch.differs else batch.digests
    return np.array([share, *digests], dtype=np.float64)


def sum_of_records(told: np.ndarray, group: Group) -> float:
    """Return the sum of the shares in the records of a group's ranks. Raises: as add_losses."""
    records = told.reshape(group.size, -1)
    if records.shape[1] > 1:
        check_digests(records[:, 1:], group.world_ranks)
    return _sum_of_shares(records)


def _all_records(group: Group, share: float, batch: Batch | None) -> np.ndarray:
    """Return the records of a group's ranks, one row each."""
    with group.ledger.control():
        told: np.ndarray = group.all_gather(share_record(share, batch), algorithm="ring")
    return told.reshape(group.size, -1)


def _sum_of_shares(records: np.ndarray) -> float:
    return float(np.sum(np.ascontiguousarray(records[:, 0])))
