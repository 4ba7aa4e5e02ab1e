"""The signature of a call: the fields that every rank must agree on, and the error if they do not.

A message's header (`meta`) is the call's sequence in 8 bytes, and up to three msgpack objects, one
after the other:

    key     sequence [group, verb, algorithm, op, root, dtype, shape]   equal on all ranks of the call
    where   "file:line" of the program's call                           may differ
    block   [dtype, shape, device] of this message                      only where the receiver cannot know them

so the receiver of a matching message compares one prefix of bytes. None in dtype or shape means
"this rank does not know it" (a broadcast's receiver) or, inside a shape, "may differ" (the first
dim of a gather; with `out` the result's first dim is compared).
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from minidist.errors import DtypeError, MismatchError

if TYPE_CHECKING:  # the monitor compares signatures, and starts without NumPy
    import numpy as np

Shape = tuple[int | None, ...]


@lru_cache(maxsize=256)
def dtype_code(dtype: "np.dtype") -> str:
    """Return the name of a dtype on the wire: NumPy's own string ("<f4"), or ml_dtypes' name
    ("bfloat16").

    Raises: DtypeError for a dtype whose values are references (object, StringDType) or that has no
    name.
    """
    import ml_dtypes
    from numpy.lib import format as npy_format

    if dtype.hasobject or dtype.itemsize == 0:
        raise DtypeError(
            f"arrays of dtype {dtype} cannot be sent: their values are references or have no "
            "bytes; convert to numbers or fixed-length strings first"
        )
    extra = getattr(ml_dtypes, dtype.name, None) is dtype.type
    code = dtype.name if extra else npy_format.dtype_to_descr(dtype) if dtype.names else dtype.str
    text = code if isinstance(code, str) else json.dumps(code)
    if dtype_of(text) != dtype:  # e.g. a dtype of ml_dtypes in the other byte order
        raise DtypeError(
            f"arrays of dtype {dtype} cannot be sent: the dtype has no name that other ranks know; "
            f"convert to one that has, in this machine's byte order"
        )
    return text


@lru_cache(maxsize=256)
def dtype_of(code: str) -> "np.dtype":
    """Return the dtype that `dtype_code` named."""
    import ml_dtypes
    import numpy as np
    from numpy.lib import format as npy_format

    if code[:1] == "[":
        return np.dtype(npy_format.descr_to_dtype(_fields(json.loads(code))))
    return np.dtype(getattr(ml_dtypes, code, code))


def _fields(described: list[Any]) -> list[tuple[Any, ...]]:
    """Return the fields of a structured dtype, with tuples where JSON has lists.

    Python's own notation would need ast, which CPython does not let two threads use at once.
    """
    fields = []
    for name, code, *shape in described:
        title = name if isinstance(name, str) else tuple(name)
        inner = code if isinstance(code, str) else _fields(code)
        fields.append((title, inner, *map(tuple, shape)))
    return fields


# a loop repeats the same calls: this saves 1 µs per call
_packed = lru_cache(maxsize=256)(msgpack.packb)


class BlockHeader(NamedTuple):
    """The dtype and shape of a message that its receiver cannot know; `device`: of the sender's
    array."""

    dtype: "np.dtype"
    shape: tuple[int, ...]
    device: str


@lru_cache(maxsize=256)
def pack_block(dtype: "np.dtype", shape: tuple[int, ...], device: str) -> bytes:
    """Return the last object of a header."""
    return msgpack.packb((dtype_code(dtype), shape, device))  # type: ignore[no-any-return]


class Signature(NamedTuple):
    """A rank's description of a call. Compared field by field, except `where`."""

    group: int
    sequence: int
    verb: str
    algorithm: str | None
    op: str | None
    root: int | None
    dtype: str | None
    shape: Shape | None
    where: str

    def pack(self) -> tuple[bytes, bytes]:
        """Return (key, where) as they are written in a header."""
        return self.sequence.to_bytes(8, "big") + _packed((self.group, *self[2:8])), _packed(
            self.where
        )

    def describe(self) -> str:
        """Return a text: "all_reduce(float32 (3, 4), op=sum), its call 7, at train.py:40"."""
        kind = "" if self.dtype is None else str(dtype_of(self.dtype))
        shape = "" if self.shape is None else str(self.shape).replace("None", "?")
        parts = [
            f"{kind} {shape}".strip(),
            *(
                f"{name}={value}"
                for name, value in (
                    ("op", self.op),
                    ("root", self.root),
                    ("algorithm", self.algorithm),
                )
                if value is not None
            ),
        ]
        return (
            f"{self.verb}({', '.join(part for part in parts if part)}), its call "
            f"{self.sequence}, at {self.where}"
        )

    def agrees(self, other: "Signature") -> bool:
        """Return whether both describe the same call; an unknown field (None) matches anything."""
        return (
            self[:6] == other[:6]
            and _same(self.dtype, other.dtype)
            and (
                self.shape is None
                or other.shape is None
                or (
                    len(self.shape) == len(other.shape) and all(map(_same, self.shape, other.shape))
                )
            )
        )


def _same(mine: Any, theirs: Any) -> bool:
    return mine is None or theirs is None or mine == theirs


def unpack(meta: bytes) -> tuple[Signature, BlockHeader | None]:
    """Return a header's signature, and its block if present. Raises: MismatchError if it is not the
    header of a call."""
    with _read(meta) as unpacker:
        unpacker.feed(meta[8:])
        (group, *rest), where, *block = unpacker
        return Signature._make((group, int.from_bytes(meta[:8], "big"), *rest, where)), _block(
            block
        )


@lru_cache(maxsize=256)
def behind_key(rest: bytes) -> tuple[str, BlockHeader | None]:
    """Return the rest of a header after its key: where, and the block if present. Cached, which
    saves 3 µs per block. Raises: as unpack."""
    with _read(rest) as unpacker:
        unpacker.feed(rest)
        where, *block = unpacker
        return where, _block(block)


@contextmanager
def _read(meta: bytes) -> Iterator[Any]:
    try:
        yield msgpack.Unpacker(use_list=False, max_buffer_size=len(meta) or 1)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MismatchError(f"a message whose header is not a call's: {meta[:80]!r}") from error


def _block(objects: list[Any]) -> BlockHeader | None:
    if not objects:
        return None
    code, shape, device = objects[0]
    return BlockHeader(dtype_of(code), shape, device)


def mismatch(mine: Signature, my_rank: int, theirs: Signature, their_rank: int) -> MismatchError:
    """Return the error that shows both calls, by world rank, and the fields in which they
    differ."""
    names = [
        name for name, a, b in zip(Signature._fields[:8], mine, theirs, strict=False) if a != b
    ]
    return MismatchError(
        f"ranks disagree in {', '.join(names) or 'length'}:\n"
        f"  rank {my_rank} calls {mine.describe()}\n"
        f"  rank {their_rank} calls {theirs.describe()}\n"
        f"every rank of a group must make the same calls in the same order"
    )
