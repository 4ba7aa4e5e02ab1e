"""An exception's journey from the rank that raised it to the process that called md.run."""

import builtins
import traceback
from collections.abc import Collection
from typing import Any

from minidist import errors
from minidist.comm import wire
from minidist.comm.health.failure import Failure, begin_with_rank, escape_surrogates, words
from minidist.errors import CommError, TimeoutError


def encode(error: BaseException) -> dict[str, Any]:
    """What wire.pack can carry of an exception: its type's name, its arguments as far as they
    travel, its traceback."""
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
    """The exception that `encode` saw, naming its rank, with the remote traceback as its cause.

    Built-in exceptions and minidist's keep their type; any other becomes a RuntimeError that names
    the type.
    """
    message = coded["message"]
    error = _of_its_own_type(coded) or RuntimeError(f"{coded['module']}.{coded['name']}: {message}")
    begin_with_rank(error, world_rank)
    error.__cause__ = CommError(f"the traceback of rank {world_rank}:\n{coded['traceback']}")
    return error


def first_failure(loss: Failure, outcomes: dict[int, dict[str, Any]]) -> Exception:
    """What md.run raises: the lost rank's own exception if it handed that over, else PeerLostError:
    how it went."""
    coded = outcomes.get(loss.world_rank, {}).get("error")
    return loss.error() if coded is None else rebuild(coded, loss.world_rank)


def late(ranks: Collection[int], size: int, limit: float, table: str) -> TimeoutError:
    """What md.run raises when `ranks` have not ended in time; `table`: what all ranks wait for."""
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
    """What OSError takes after its number and words, but does not keep in .args: file, winerror,
    second file."""
    if not isinstance(error, OSError) or len(error.args) != 2 or error.filename is None:
        return []
    names = [
        escape_surrogates(name) if isinstance(name, str) else name
        for name in (error.filename, error.filename2)
    ]
    return [names[0]] if names[1] is None else [names[0], None, names[1]]


def _travelling(value: Any) -> Any:
    """`value`, or None if it cannot be packed: the program's own classes may raise anything
    then."""
    try:
        wire.pack(value)
    except Exception:
        return None
    return value
