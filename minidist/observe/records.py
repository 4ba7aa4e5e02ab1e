"""Small records (spans, ledgers, memory accounts) from every rank to rank 0, or to all; and from rank 0 to all."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.comm.wire import pack, unpack
from minidist.device import account

A_DAY = 86400.0


@contextmanager
def unhurried(group: Group) -> Iterator[None]:
    """In the block a wait of this rank may last a day, because what it waits for is one rank's work, not a message.

    A rank that is lost ends the wait as ever.
    """
    transport = group.transport
    limit = transport.limit
    transport.limit = max(limit, A_DAY)
    try:
        yield
    finally:
        transport.limit = limit


def gather_records(group: Group, record: Any) -> list[Any] | None:
    """Every rank's `record` on rank 0, in rank order; None on the others.

    The bytes are outside every memory account, so a limit of device memory does not stop them.

    Args:    record: anything that `wire.pack` takes: dicts, lists, numbers, texts, bytes, arrays.
    Cost:    two gathers, counted under `control`: the lengths (8 bytes a rank), then the packed bytes.
    Raises:  CommError if a rank is lost or does not call this.
    """
    packed = np.frombuffer(pack(record), dtype=np.uint8)
    with group.ledger.control(), account.use(account.MemoryAccount()):
        lengths = group.gather(np.array([packed.size], dtype=np.int64))
        joined = group.gather(packed)
    if lengths is None or joined is None:
        return None
    return _unpacked(lengths, joined)


def share_records(group: Group, record: Any) -> list[Any]:
    """Every rank's `record` on every rank, in rank order. Args, Raises: as gather_records.

    Cost:    two all-gathers, counted under `control`.
    """
    packed = np.frombuffer(pack(record), dtype=np.uint8)
    with group.ledger.control(), account.use(account.MemoryAccount()):
        return _unpacked(group.all_gather(np.array([packed.size], dtype=np.int64)), group.all_gather(packed))


def hand_out_record(group: Group, record: Any) -> Any:
    """Rank 0's `record` on every rank. Args, Raises: as gather_records.

    Cost:    one broadcast, counted under `control`.
    """
    packed = np.frombuffer(pack(record), dtype=np.uint8) if group.rank == 0 else None
    with group.ledger.control(), account.use(account.MemoryAccount()):
        return unpack(group.broadcast(packed, root=0).tobytes())


def _unpacked(lengths: np.ndarray, joined: np.ndarray) -> list[Any]:
    ends = np.cumsum(lengths)
    return [unpack(joined[end - length:end].tobytes()) for length, end in zip(lengths, ends, strict=True)]
