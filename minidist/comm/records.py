"""Exchange small records (spans, ledgers, memory accounts) between ranks: to rank 0, to all, and
from rank 0.

Values that must be equal on every rank are compared by a digest, of eight bytes per rank.
"""

import functools
import hashlib
import inspect
import numbers
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.comm.wire import pack, unpack
from minidist.device import account
from minidist.device.backend import digested, is_array
from minidist.errors import MismatchError

SHOWN = 80
"""Maximum number of characters of a value in an error."""

NOT_GIVEN = "none given"

A_DAY = 86400.0


@contextmanager
def unhurried(group: Group) -> Iterator[None]:
    """Raise the limit of this rank's waits in the block to one day, because they wait for one
    rank's work, not for a message.

    A lost rank still ends the wait.
    """
    transport = group.transport
    limit = transport.limit
    transport.limit = max(limit, A_DAY)
    try:
        yield
    finally:
        transport.limit = limit


def gather_records(group: Group, record: Any) -> list[Any] | None:
    """Return every rank's `record` on rank 0, in rank order; None on the other ranks.

    The bytes are outside every memory account, so a limit of device memory does not stop them.

    Args:    record: a value that `wire.pack` supports: dicts, lists, numbers, texts, bytes, arrays.
    Cost:    two gathers, counted under `control`: the lengths (8 bytes per rank), then the packed
             bytes.
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
    """Return every rank's `record` on every rank, in rank order. Args, Raises: as gather_records.

    Cost:    two all-gathers, counted under `control`.
    """
    packed = np.frombuffer(pack(record), dtype=np.uint8)
    with group.ledger.control(), account.use(account.MemoryAccount()):
        return _unpacked(
            group.all_gather(np.array([packed.size], dtype=np.int64)), group.all_gather(packed)
        )


def hand_out_record(group: Group, record: Any) -> Any:
    """Return rank 0's `record` on every rank. Args, Raises: as gather_records.

    Cost:    one broadcast, counted under `control`.
    """
    packed = np.frombuffer(pack(record), dtype=np.uint8) if group.rank == 0 else None
    with group.ledger.control(), account.use(account.MemoryAccount()):
        return unpack(group.broadcast(packed, root=0).tobytes())


def _unpacked(lengths: np.ndarray, joined: np.ndarray) -> list[Any]:
    ends = np.cumsum(lengths)
    return [
        unpack(joined[end - length : end].tobytes())
        for length, end in zip(lengths, ends, strict=True)
    ]


# -------------------------------------------------------- values that must be equal on all ranks


def check_alike(
    group: Group, parts: Mapping[str, Any], *, advice: str = "give every rank the same"
) -> None:
    """Check that named values are equal on all ranks of a group. Every rank calls it.

    Args:    parts: each value under its name for the user; advice: the end of the error's text.
    Cost:    one all-gather of 8 bytes per rank, counted under `control`; nothing for a single rank.
             If the ranks differ, two all-gathers more, of the values as texts.
    Raises:  MismatchError, the same on every rank: the rank that differs, and the first name.
    """
    if group.size == 1:
        return
    texts = {name: described(value) for name, value in parts.items()}
    digest = hashlib.blake2b(repr(sorted(texts.items())).encode(), digest_size=8).digest()
    with group.ledger.control():
        digests = group.all_gather(np.frombuffer(digest, dtype=np.uint64))
    if (digests == digests[0]).all():
        return
    usual = int((digests[:, None] == digests).sum(axis=1).argmax())  # the first of most ranks
    others = [rank for rank in range(group.size) if digests[rank] != digests[usual]]
    told = share_records(group, texts)
    raise MismatchError(f"{_difference(group, told, usual, others)}; {advice}")


def named(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` for check_alike, each under "prefix name"; inner dicts are flattened."""
    parts: dict[str, Any] = {}
    for name, value in values.items():
        longer = f"{prefix} {name}"
        parts |= named(longer, value) if isinstance(value, dict) else {longer: value}
    return parts


def described(value: Any) -> str:
    """Return a text of a value that is equal on two ranks if the values are.

    Arrays are described by a checksum; functions by their name, source, defaults and captured
    values; callable objects by their numbers and texts; other objects only by their type.
    """
    kind = type(value).__qualname__
    if value is None or isinstance(value, bool | str | bytes):
        return repr(value)
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if isinstance(value, numbers.Real):
        number = float(value)
        return str(int(number)) if number.is_integer() else repr(number)
    if isinstance(value, type):
        return value.__qualname__
    if is_array(value):
        checksum = zlib.crc32(digested(value))
        return f"{value.dtype} array {value.shape} with checksum {checksum:08x}"
    if is_dataclass(value):
        inner = {field.name: getattr(value, field.name) for field in fields(value)}
        return f"{kind}{described(inner)}"
    if isinstance(value, Mapping):
        pairs = sorted((described(key), described(item)) for key, item in value.items())
        return "{" + ", ".join(f"{key}: {item}" for key, item in pairs) + "}"
    if isinstance(value, list | tuple | range):
        return "(" + ", ".join(map(described, value)) + ")"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(described, value))) + "}"
    if isinstance(value, functools.partial):
        return f"partial of {described(value.func)} with {described([value.args, value.keywords])}"
    if inspect.ismethod(value):
        return f"method of {described(value.__self__)}: {described(value.__func__)}"
    if inspect.isfunction(value):
        return _function(value)
    if callable(value):
        plain = {
            name: item
            for name, item in getattr(value, "__dict__", {}).items()
            if isinstance(item, str | numbers.Real)
        }
        return f"a {kind} with {described(plain)}"
    return f"a {kind}"


def _function(function: Any) -> str:
    """Return the text of a function, without its byte code, which depends on Python's version.

    Two functions on one line have the same source, so floats in the code are included.
    """
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        source = ""
    checksum = zlib.crc32(source.encode())
    constants = [each for each in function.__code__.co_consts if isinstance(each, float)]
    captured = [_content(cell) for cell in function.__closure__ or ()]
    beside = [*constants, *captured, function.__defaults__, function.__kwdefaults__]
    return f"function {function.__qualname__} {described(beside)} with source {checksum:08x}"


def _content(cell: Any) -> Any:
    """Return the value that a function captures in a cell; None for a function, and for an empty
    cell."""
    try:
        content = cell.cell_contents
    except ValueError:
        return None
    return None if inspect.isroutine(content) else content


def _difference(
    group: Group, told: Sequence[Mapping[str, str]], usual: int, others: Sequence[int]
) -> str:
    """Return the ranks that differ from rank `usual`, and the differences of the first of them."""
    theirs = told[others[0]]
    ours = told[usual]
    names = [name for name in {**ours, **theirs} if theirs.get(name) != ours.get(name)]
    there = _shown(theirs.get(names[0], NOT_GIVEN))
    here = _shown(ours.get(names[0], NOT_GIVEN))
    first, *further = [group.world_ranks[rank] for rank in others]
    text = f"rank {first}: {names[0]} is {there}, rank {group.world_ranks[usual]} has {here}"
    if names[1:]:
        text += f"; {', '.join(names[1:6])} differ too"
    if further:
        text += f"; ranks {', '.join(map(str, further))} differ too"
    return text


def _shown(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
