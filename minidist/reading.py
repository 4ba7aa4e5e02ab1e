"""Files that a user brings, read through a schema: bounded, regular, and of the types that the
reader expects.

    class Point(msgspec.Struct):           # a schema: unknown keys are ignored
        x: Finite
        name: str
    read_json("point.json", Point)         # the JSON value itself; ConfigError in one line if it
                                           # does not fit

A digest says that a file is as it was written, but not who wrote it. So data with a digest is read
in the same way.
"""

import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import msgspec

from minidist.errors import ConfigError
from minidist.files import read_regular

MOST_BYTES = 1 << 30  # of a file of JSON
MOST_DEPTH = 64  # of lists and objects in each other

Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Finite = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e300)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=1e300)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=2**20)]

_ONE_THREAD = threading.Lock()
"""Held while msgspec converts: it crashes where two threads, as ranks may be, need the same new
schema at once."""

_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def read_json(
    file: str | Path, schema: Any = Any, *, most: int = MOST_BYTES, member: bool = False
) -> Any:
    """Return the JSON value of a file that fits a schema.

    Args:    schema: a type, as msgspec has them. most, member: as of files.read_regular.
    Raises:  OSError if it cannot be read; ConfigError in a few words, without the file's name, if
             it does not fit.
    """
    return parse_json(read_regular(file, most=most, member=member), schema)


def read_text(file: str | Path, *, most: int = MOST_BYTES) -> str:
    """Return the text of a regular file in UTF-8, with line ends of any system as "\\n".

    Raises:  OSError if it cannot be read; ConfigError in a few words if it is no such text.
    """
    content = read_regular(file, most=most)
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"it is not a text in UTF-8: byte {error.start} is {content[error.start]:#04x}"
        ) from error


def parse_json(content: bytes, schema: Any = Any) -> Any:
    """Return the JSON value in UTF-8 bytes. Raises: ConfigError as read_json."""
    value = decoded(content)
    require_shallow(value)
    return require(value, schema)


def decoded(content: bytes) -> Any:
    """Return the JSON value in UTF-8 bytes, of any shape and depth. Raises: ConfigError as
    read_json.

    Numbers may be NaN and infinite, as Python's JSON has them, unless a schema forbids that.
    """
    try:
        try:
            return msgspec.json.decode(content)
        except msgspec.DecodeError:  # NaN is one reason
            return json.loads(content.decode())
    except RecursionError:
        raise ConfigError("its JSON has lists nested too deeply") from None
    except ValueError as error:
        raise ConfigError(f"it is not JSON: {str(error).splitlines()[0]}") from error


def read_toml(file: str | Path, *, most: int = MOST_BYTES) -> dict[str, Any]:
    """Return the value of a TOML file. Raises: as read_text; ValueError if it is not TOML."""
    if sys.version_info >= (3, 11):  # here: `import minidist` reads no TOML
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(read_text(file, most=most))


def require_shallow(value: Any) -> None:
    """Raise ConfigError if a value of JSON has lists in lists deeper than MOST_DEPTH."""
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, (list, dict))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            break
    if level:
        raise ConfigError(f"it has lists nested more than {MOST_DEPTH} deep")


def require(value: Any, schema: Any) -> Any:
    """Return a value of JSON if it fits a schema, as it is. Raises: ConfigError in a few words."""
    converted(value, schema)
    return value


def convert(value: Any, schema: Any) -> Any:
    """Return a value of JSON as an object of the schema's type. Raises: msgspec.ValidationError,
    ValueError."""
    with _ONE_THREAD:
        return msgspec.convert(value, schema)


def converted(value: Any, schema: Any) -> Any:
    """Return a value of JSON as an object of the schema's type. Raises: ConfigError in a few
    words."""
    try:
        return convert(value, schema)
    except (msgspec.ValidationError, ValueError, RecursionError, OverflowError) as error:
        told, _, place = str(error).partition(" - at ")
        where = place.replace("`", "").removeprefix("$").removeprefix(".")
        raise ConfigError(f"{where}: {told}" if where else told) from error


def parse_line(line: bytes, schema: Any) -> Any:
    """Return the JSON value of one line of a log; None if the line is torn, or does not fit the
    schema."""
    try:
        value = json.loads(line)
        convert(value, schema)
    except (msgspec.ValidationError, ValueError, RecursionError):
        return None
    return value


@contextmanager
def consistent(what: str) -> Iterator[None]:
    """Context manager: raise ConfigError if the values of `what` each fit, but contradict each
    other."""
    try:
        yield
    except ConfigError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{what} contradict each other ({type(error).__name__}: {error})"
        ) from error


def visible(text: str, keep: str = "") -> str:
    """Return a text of a file in which control characters, and letters that change the direction,
    are escaped.

    Args:    keep: control characters that stay, as "\\n".
    """
    return _UNSAFE.sub(lambda found: found[0] if found[0] in keep else _escaped(found[0]), text)


@lru_cache(maxsize=256)
def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode()
