"""Pass an exception from the rank that raised it to the process that called md.run."""

import builtins
import traceback
from collections.abc import Collection
from typing import Any

from minidist import errors
from minidist.comm import wire
from minidist.comm.health.failure import Failure, begin_with_rank, escape_surrogates, words
from minidist.errors import CommError, TimeoutError


def encode(error: BaseException) -> dict[str, Any]:
    """Return the parts of an exception that wire.pack can pack: its type's name, its arguments and
    its traceback."""
    args = [escape_surrogates(arg) if isinstance(arg, str) else arg for arg in error.args]
    return {
        "module": type(error).__module__,
        "name": type(error).__qualname__,
        "message": words(error),
        "traceback": escape_surrogates("".join(traceback.format_exception(error))),
        "args": _travelling([*args, *_file_names(error)]),
        "state": _travelling(vars(error)),
    }


def rebuild(coded: dict[str, Any], world_rank: int) -> Exception:
    """Return the exception that `encode` packed, with its rank in its message and the remote
    traceback as its cause.

    Built-in exceptions and minidist's keep their type; any other becomes a RuntimeError that names
    the type.
    """
    message = coded["message"]
    error = _of_its_own_type(coded) or RuntimeError(f"{coded['module']}.{coded['name']}: {message}")
    begin_with_rank(error, world_rank)
    error.__cause__ = CommError(f"the traceback of rank {world_rank}:\n{coded['traceback']}")
    return error


def first_failure(loss: Failure, outcomes: dict[int, dict[str, Any]]) -> Exception:
    """Return the exception that md.run raises: the lost rank's own, if it left one, or
    PeerLostError."""
    coded = outcomes.get(loss.world_rank, {}).get("error")
    return loss.error() if coded is None else rebuild(coded, loss.world_rank)


def late(ranks: Collection[int], size: int, limit: float, table: str) -> TimeoutError:
    """Return the TimeoutError of `ranks` that have not ended in time.

    `table` lists what all ranks wait for.
    """
    return TimeoutError(
        f"{len(ranks)} of {size} ranks had not ended after {limit:g} s: rank "
        f"{', '.join(map(str, sorted(ranks)))}\n{table}"
    )


def _of_its_own_type(coded: dict[str, Any]) -> Exception | None:
    home = {"builtins": builtins, "minidist.errors": errors}.get(coded["module"])
    kind = getattr(home, coded["name"], None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)) or coded["args"] is None:
        return None
    try:
        error = kind(*coded["args"])
    except Exception:  # a constructor of other arguments than .args
        return None
    vars(error).update(coded["state"] or {})
    return error


def _file_names(error: BaseException) -> list[Any]:
    """Return the constructor arguments of an OSError that .args does not keep: file, winerror,
    second file."""
    if not isinstance(error, OSError) or len(error.args) != 2 or error.filename is None:
        return []
    names = [
        escape_surrogates(name) if isinstance(name, str) else name
        for name in (error.filename, error.filename2)
    ]
    return [names[0]] if names[1] is None else [names[0], None, names[1]]


def _travelling(value: Any) -> Any:
    """Return `value`, or None if it cannot be packed.

    Packing a program's own class may raise anything.
    """
    try:
        wire.pack(value)
    except Exception:
        return None
    return value
