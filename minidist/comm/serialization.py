"""Values as bytes: msgpack with a few extensions, never pickle: reading a message runs no code of
its sender.

NumPy is imported only for arrays: launcher, monitor and node agent send none, and so start in a
third of the time.
"""

import enum
import functools
import math
import re
import sys
from typing import TYPE_CHECKING, Any

import msgpack

from minidist.errors import CommError, DtypeError

if TYPE_CHECKING:
    import numpy as np

NESTING = 32  # maximum depth of tuples and sets inside one another


class Kind(enum.IntEnum):
    """The msgpack extension codes of types that msgpack does not support itself."""

    ARRAY, SCALAR, TUPLE, SET, FROZENSET, COMPLEX, INTEGER = range(1, 8)


# NumPy's own, with byte order
_PLAIN_DTYPE = re.compile(r"[<>|](?:[biufcSUV]\d{1,6}|[mM]8(?:\[\w+\])?)")
_BASES: tuple[type[Any], ...] = (int, float, str, bytes, list, dict)  # subclasses are sent as these
_COLLECTIONS: dict[int, type[Any]] = {Kind.TUPLE: tuple, Kind.SET: set, Kind.FROZENSET: frozenset}


def pack(obj: Any) -> bytes:
    """Return a value as bytes: None, bool, int, float, complex, str, bytes, list, tuple, set, dict,
    NumPy arrays and scalars of every dtype except object and structured ones, with those of
    ml_dtypes; nested (tuples: at most 32 deep).

    Cost:    an array is copied several times, once more for each tuple around it: for control
             messages, not for data.
    Raises:  DtypeError naming a type that is not supported.
    """
    return _pack(obj, 0)


def unpack(data: bytes) -> Any:
    """Return the value that pack made into bytes; arrays are new and writable. Raises CommError if
    `data` is anything else."""
    return _unpack(data, 0)


def _pack(obj: Any, depth: int) -> bytes:
    if depth > NESTING:
        raise DtypeError(
            f"tuples and sets nested more than {NESTING} deep cannot travel between processes"
        )
    try:
        packed = msgpack.packb(
            obj, default=functools.partial(_encode, depth=depth), strict_types=True
        )
    # nested lists too deep, a string that is not Unicode
    except (ValueError, UnicodeError) as error:
        raise DtypeError(
            f"a {type(obj).__name__} cannot travel between processes: {error}"
        ) from error
    return bytes(packed)


def _encode(obj: Any, depth: int) -> Any:
    """Return an extension for a type that msgpack does not support; a subclass as its base type."""
    if np := sys.modules.get("numpy"):  # else there is no array
        if isinstance(obj, np.ndarray):
            parts = [_dtype_text(obj.dtype), list(obj.shape), obj.tobytes()]
            return msgpack.ExtType(Kind.ARRAY, _pack(parts, depth + 1))
        if isinstance(obj, np.generic):
            return msgpack.ExtType(
                Kind.SCALAR, _pack([_dtype_text(obj.dtype), obj.tobytes()], depth + 1)
            )
    if isinstance(obj, complex):
        return msgpack.ExtType(Kind.COMPLEX, _pack([obj.real, obj.imag], depth + 1))
    if type(obj) is int:  # more than 64 bits
        return msgpack.ExtType(
            Kind.INTEGER, obj.to_bytes(obj.bit_length() // 8 + 1, "little", signed=True)
        )
    for kind, collection in _COLLECTIONS.items():
        if isinstance(obj, collection):
            return msgpack.ExtType(kind, _pack(list(obj), depth + 1))
    for base in _BASES:
        if isinstance(obj, base):
            return base(obj)
    raise DtypeError(
        f"a {type(obj).__module__}.{type(obj).__qualname__} cannot travel between processes; "
        "send numbers, strings, NumPy arrays, or lists, tuples, sets and dicts of them"
    )


def _unpack(data: bytes, depth: int) -> Any:
    if depth > NESTING:
        raise CommError(f"malformed message: nested more than {NESTING} deep")
    try:
        return msgpack.unpackb(
            data, ext_hook=functools.partial(_decode, depth=depth), strict_map_key=False
        )
    except CommError:
        raise
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise CommError(
            f"malformed message of {len(data)} bytes: {type(error).__name__} {error}"
        ) from error


def _decode(code: int, data: bytes, depth: int) -> Any:
    if code == Kind.INTEGER:
        return int.from_bytes(data, "little", signed=True)
    parts = _unpack(data, depth + 1)
    match code, parts:
        case Kind.ARRAY, [str(dtype), list(shape), bytes(raw)] if all(
            type(n) is int and n >= 0 for n in shape
        ):
            return _array(_dtype_named(dtype), shape, raw)
        case Kind.SCALAR, [str(dtype), bytes(raw)]:
            return _array(_dtype_named(dtype), [], raw)[()]
        case (Kind.TUPLE | Kind.SET | Kind.FROZENSET) as kind, list():
            return _COLLECTIONS[kind](parts)
        case Kind.COMPLEX, [float(real), float(imaginary)]:
            return complex(real, imaginary)
    raise CommError(f"malformed message: extension {code} holds a {type(parts).__name__}")


def _array(dtype: "np.dtype[Any]", shape: list[int], raw: bytes) -> "np.ndarray":
    """Return a new array; raise unless `raw` has exactly the bytes that the shape needs."""
    import numpy as np

    if math.prod(shape) * dtype.itemsize != len(raw):
        raise CommError(f"malformed message: {len(raw)} bytes for {dtype} of shape {tuple(shape)}")
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[:] = np.frombuffer(raw, np.uint8)
    return array


def _dtype_text(dtype: "np.dtype[Any]") -> str:
    """Return NumPy's code with byte order ('<f4'), or an ml_dtypes type's name ('bfloat16')."""
    if _is_extra(dtype.name):
        if not dtype.isnative:
            raise DtypeError(
                f"an array of dtype {dtype} in the other byte order cannot travel between "
                f"processes; send x.astype({dtype.name!r})"
            )
        return dtype.name
    if dtype.hasobject or dtype.names is not None or dtype.subdtype is not None:
        raise DtypeError(
            f"an array of dtype {dtype} cannot travel between processes; send its fields one by one"
        )
    return dtype.str


def _dtype_named(text: str) -> "np.dtype[Any]":
    import ml_dtypes
    import numpy as np

    if not _is_extra(text) and not _PLAIN_DTYPE.fullmatch(text):
        raise CommError(f"malformed message: no dtype {text[:40]!r}")
    return np.dtype(getattr(ml_dtypes, text, text))


def _is_extra(name: str) -> bool:
    """Return whether ml_dtypes adds a scalar type of this name to NumPy's."""
    import ml_dtypes
    import numpy as np

    kind = getattr(ml_dtypes, name, None)
    return isinstance(kind, type) and issubclass(kind, np.generic)
