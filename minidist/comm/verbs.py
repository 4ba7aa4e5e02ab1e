"""What each collective verb does before its algorithm runs: check the arguments, find a place for the result.

A function here returns a Call that is ready to run, in the caller's thread now or in the group's worker later. Errors
in this rank's own arguments are raised here, at once; the messages tell where ranks disagree. What the arguments mean,
and what the calls raise, stands at the methods of Group (group.py). Nothing is sent here.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from minidist.comm.calls.buffers import (
    OutputArray,
    Rows,
    apart,
    argument,
    as_array,
    check_lists,
    device_of,
    list_argument,
)
from minidist.comm.calls.call import Call
from minidist.comm.calls.call_device import place_told, side_for_root, side_of, working_device
from minidist.comm.calls.members import Members
from minidist.comm.calls.reduction import UFUNCS, Reduction, reduction
from minidist.comm.chunks import bounds
from minidist.comm.collectives.select import ALGORITHMS, ALONE, choose
from minidist.device.backend import is_array
from minidist.errors import ConfigError, DtypeError, ShapeError


def broadcast(group: Members, x: Any, root: int, out: Any, algorithm: str) -> Call:
    """The root's array on every rank.

    Args:    x (...), at the root; elsewhere None, or anything of the root's shape and dtype. out: of that shape, or
             None. algorithm: see ALGORITHMS, or "auto".
    Returns: the call; its result is `out` or a new array.
    Raises:  ConfigError, ShapeError, DtypeError for this rank's arguments.
    """
    return _from_root(group, "broadcast", x, root, out, algorithm, out if x is None else x)


def scatter(group: Members, x: Any, root: int, out: Any, algorithm: str) -> Call:
    """Rank r gets part r of the root's array, cut along the first dim as numpy.array_split does.

    Args:    x (n, ...), at the root; elsewhere None, or anything of the root's shape and dtype. out: of the part's
             shape, or None.
    Returns: the call; its result is `out` or a new array, (ceil or floor of n/P, ...).
    Raises:  as broadcast; ShapeError for an array without dims.
    """
    return _from_root(group, "scatter", x, root, out, algorithm, x)


def reduce(group: Members, x: Any, op: str, root: int, out: Any, algorithm: str) -> Call:
    """All ranks' arrays combined elementwise, at the root.

    Args:    x (...), of one shape and dtype on all ranks; op: a name of UFUNCS; out: as x, or None; ignored elsewhere.
    Returns: the call; its result is `out` or a new array at the root, elsewhere None.
    Raises:  as broadcast; DtypeError if op does not take the dtype.
    """
    return _reduced(group, "reduce", x, op, out, algorithm, root=group.rank_in("root", root))


def all_reduce(group: Members, x: Any, op: str, out: Any, algorithm: str) -> Call:
    """All ranks' arrays combined elementwise, on every rank.

    Args:    x (...), of one shape and dtype on all ranks; op: a name of UFUNCS; out: as x, may be x, or None.
    Returns: the call; its result is `out` or a new array.
    Raises:  as reduce.
    """
    return _reduced(group, "all_reduce", x, op, out, algorithm)


def reduce_scatter(group: Members, x: Any, op: str, out: Any, algorithm: str) -> Call:
    """Chunk `rank` of what all_reduce would give, flattened and cut as numpy.array_split does.

    Args:    x (...) of n elements, of one shape and dtype on all ranks; op: a name of UFUNCS; out (ceil or floor of
             n/P,), may be that chunk of x, or None.
    Returns: the call; its result is `out` or a new array of one dim.
    Raises:  as reduce.
    """
    where = working_device(group, algorithm, x, op=op)
    array, result = argument("reduce_scatter", x, where), OutputArray("reduce_scatter", out, where)
    how = _reduction("reduce_scatter", op, array, group)
    name = _choose(group, "reduce_scatter", algorithm, where, array, op)
    flat = array.reshape(-1)
    start, stop = bounds(len(flat), group.size)[group.rank:group.rank + 2]
    mine = flat[start:stop]
    chunk = result.array(mine.shape, array.dtype)
    work = partial(_algorithm(group, "reduce_scatter", name), x=apart(flat, out, mine), out=chunk, op=how)
    return Call(group, "reduce_scatter", name, work, result.deliver, op=op, dtype=array.dtype, shape=array.shape,
                device=device_of(x), side=side_of(group, where))


def gather(group: Members, x: Any, root: int, out: Any, algorithm: str) -> Call:
    """All ranks' arrays one after the other along the first dim, at the root.

    Args:    x (m, ...), of one dtype and further dims on all ranks, any m; a number is one row. out (sum of m, ...) at
             the root, or None; ignored elsewhere.
    Returns: the call; its result is `out` or a new array at the root, elsewhere None.
    Raises:  as broadcast.
    """
    root, at_root = group.rank_in("root", root), group.rank == root
    if at_root:
        return _gathered(group, "gather", x, out, algorithm, root=root)
    where = working_device(group, algorithm, x)
    own, name = _rows_of(argument("gather", x, where)), _choose(group, "gather", algorithm, where)
    work = partial(_algorithm(group, "gather", name), own=own, rows=None, root=root)
    return Call(group, "gather", name, work, root=root, dtype=own.dtype, shape=(None, *own.shape[1:]),
                device=device_of(x), side=side_of(group, where))


def all_gather(group: Members, x: Any, out: Any, algorithm: str) -> Call:
    """All ranks' arrays one after the other along the first dim, on every rank.

    Args:    x (m, ...), as for gather; it may be its own part of `out`. out (sum of m, ...), or None.
    Returns: the call; its result is `out` or a new array.
    Raises:  as broadcast.
    """
    return _gathered(group, "all_gather", x, out, algorithm)


def all_to_all(group: Members, x: Sequence[Any], out: Sequence[Any] | None, algorithm: str) -> Call:
    """What each rank has for this rank.

    Args:    x: an array for each rank, of one dtype and any shapes; out: an array for each rank, or None.
    Returns: the call; its result is a list of an array from each rank.
    Raises:  as broadcast; ShapeError for lists of another length.
    """
    check_lists("all_to_all", x, out, group.size)
    where = working_device(group, algorithm, *x)
    name, parts = _choose(group, "all_to_all", algorithm, where), list_argument("all_to_all", x, out, where)
    side, outs = side_of(group, where), [None] * group.size if out is None else out
    results = [OutputArray("all_to_all", outs[rank], where, side) for rank in range(group.size)]

    def deliver(received: list[np.ndarray], device: str | None) -> list[Any]:
        own = received[group.rank]
        results[group.rank].array(own.shape, own.dtype)[...] = own
        return [result.deliver(None, device) for result in results]

    work = partial(_algorithm(group, "all_to_all", name), parts=parts, place=lambda rank: results[rank].array)
    return Call(group, "all_to_all", name, work, deliver, device=device_of(*x), side=side, dtype=parts[0].dtype)


def barrier(group: Members, algorithm: str) -> Call:
    """Every rank has come.

    Returns: the call; its result is None. Raises: ConfigError for an unknown algorithm.
    """
    name = _choose(group, "barrier", algorithm, "cpu")
    return Call(group, "barrier", name, _algorithm(group, "barrier", name))


def _from_root(group: Members, verb: str, x: Any, root: int, out: Any, algorithm: str, model: Any) -> Call:
    """broadcast and scatter; `model` has the dtype and shape of the root's array, as far as this rank knows them."""
    root, where = group.rank_in("root", root), working_device(group, algorithm, x)
    side = side_for_root(group, algorithm)
    result = OutputArray(verb, out, where, side)
    name = _choose(group, verb, algorithm, where if side is None else "cuda")
    array = _at_root(group, verb, x, root, where)
    if verb == "scatter" and array is not None and array.ndim == 0:
        raise ShapeError(f"scatter: rank {group.rank} passes an array without dims; its first dim is to be cut")

    def work(call: Call) -> Any:
        return _algorithm(group, verb, name)(call, x=array, place=place_told(result, call), root=root)

    def deliver(own: np.ndarray, device: str | None) -> Any:
        if group.rank == root:                  # it receives nothing: its result is a copy of its own
            kept = result.array(own.shape, own.dtype)
            if kept is not own:
                kept[...] = own
        return result.deliver(None, device)

    return Call(group, verb, name, work, deliver, root=root, device=device_of(x, out), side=side, **_kind(model, verb))


def _reduced(group: Members, verb: str, x: Any, op: str, out: Any, algorithm: str, root: int | None = None) -> Call:
    """reduce and all_reduce; without a root every rank gets the result."""
    where, has_result = working_device(group, algorithm, x, op=op), root is None or root == group.rank
    result = OutputArray(verb, out if has_result else None, where)
    array = apart(argument(verb, x, where), result.out)
    how, name = _reduction(verb, op, array, group), _choose(group, verb, algorithm, where, array, op)
    total = result.array(array.shape, array.dtype).reshape(-1) if has_result else None
    work = partial(_algorithm(group, verb, name), x=array.reshape(-1), out=total, op=how, **_to(root))
    return Call(group, verb, name, work, result.deliver if has_result else _nothing, op=op, root=root,
                dtype=array.dtype, shape=array.shape, device=device_of(x), side=side_of(group, where))


def _gathered(group: Members, verb: str, x: Any, out: Any, algorithm: str, root: int | None = None) -> Call:
    """gather at its root, and all_gather."""
    where = working_device(group, algorithm, x)
    side = side_of(group, where)
    own, result = _rows_of(argument(verb, x, where)), OutputArray(verb, out, where, side)
    name = _choose(group, verb, algorithm, where)

    def work(call: Call) -> None:
        rows = Rows(result, own, call.size)
        _algorithm(group, verb, name)(call, own=rows.put_own(call.rank), rows=rows, **_to(root))

    return Call(group, verb, name, work, result.deliver, root=root, dtype=own.dtype, shape=(None, *own.shape[1:]),
                device=device_of(x), side=side)


def _to(root: int | None) -> dict[str, int]:
    return {} if root is None else {"root": root}


def _nothing(returned: Any, device: str | None) -> None:
    """Call.deliver where this rank gets no result."""


def _algorithm(group: Members, verb: str, name: str) -> Callable[..., Any]:
    return ALONE[verb] if group.size == 1 else ALGORITHMS[verb][name]


def _choose(group: Members, verb: str, algorithm: str, where: str, array: np.ndarray | None = None,
            op: str | None = None) -> str:
    """The name of the algorithm; `array` where all ranks bring one of that length, `op` what they do with it."""
    if where == "cuda":
        return "native"
    if array is None:
        name = choose(verb, algorithm, 0, group.size, board=group.board is not None, tiers=group.tiers)
    else:
        name = choose(verb, algorithm, array.nbytes, group.size, group.link, group.board is not None, group.tiers)
    if name == "native" and group.size > 1:
        group.transport.check_native(op, None if array is None else array.dtype)
    return name


def _reduction(verb: str, op: Any, array: np.ndarray, group: Members) -> Reduction:
    """The reduction of a call; its errors name the verb."""
    if not isinstance(op, str):
        raise ConfigError(f"{verb}: op={op!r} must be a name: {', '.join(UFUNCS)}")
    try:
        return reduction(op, array.dtype, group.size)
    except (ConfigError, DtypeError) as error:
        raise type(error)(f"{verb}: {error}") from None


def _kind(x: Any, verb: str = "") -> dict[str, Any]:
    """dtype and shape for a signature; None where this rank brought nothing that says them."""
    if x is None:
        return {"dtype": None, "shape": None}
    x = x if is_array(x) else as_array(verb, x)
    return {"dtype": x.dtype, "shape": x.shape}


def _at_root(group: Members, verb: str, x: Any, root: int, where: str) -> np.ndarray | None:
    """The root's array, ready to send; None elsewhere."""
    if group.rank != root:
        return None
    if x is None:
        raise ShapeError(f"{verb}: rank {root} is the root and passes None; the root brings the array")
    return argument(verb, x, where)


def _rows_of(array: np.ndarray) -> np.ndarray:
    """An array that can be joined along its first dim: a scalar is one row."""
    return array.reshape(1) if array.ndim == 0 else array
