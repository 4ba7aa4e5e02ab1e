"""What each collective verb does before its algorithm runs: check the arguments, find a place for
the result.

A function here returns a Call that is ready to run, in the caller's thread now or in the group's
worker later. Errors in this rank's own arguments are raised here, at once; the messages tell where
ranks disagree. What the arguments mean, and what the calls raise, stands at the methods of Group
(group.py). Nothing is sent here.
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
from minidist.comm.calls.members import Members
from minidist.comm.calls.reduction import UFUNCS, Reduction, reduction
from minidist.comm.chunks import bounds
from minidist.comm.collectives.select import ALGORITHMS, ALONE, choose
from minidist.comm.device_lane import SideStream
from minidist.device.backend import is_array
from minidist.errors import ConfigError, DtypeError, ShapeError


def from_root(group: Members, verb: str, x: Any, root: int, out: Any, algorithm: str) -> Call:
    """broadcast and scatter."""
    root = group.rank_in("root", root)
    where = _working_device(group, algorithm, x)
    side = None
    # only the root knows where its array is: all
    if algorithm in ("auto", "native") and _refusal(group) is None:
        side = _side_of(group, "cuda")  # ranks prepare for the GPU
    result = OutputArray(verb, out, where, side)
    array = None
    name = _choose(group, verb, algorithm, where if side is None else "cuda")
    model = out if x is None and verb == "broadcast" else x  # of the root's dtype and shape
    model = model if model is None or is_array(model) else as_array(verb, model)
    if group.rank == root:
        if x is None:
            raise ShapeError(
                f"{verb}: rank {root} is the root and passes None; the root brings the array"
            )
        array = argument(verb, x, where)
        if verb == "scatter" and array.ndim == 0:
            raise ShapeError(
                f"scatter: rank {root} passes an array without dims; its first dim is to be cut"
            )

    def work(call: Call) -> Any:
        def place(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
            if call.side is not None:
                result.device = call.origin or "cpu"  # where the root has its array
            return result.array(shape, dtype)

        return _algorithm(group, verb, name)(call, x=array, place=place, root=root)

    def deliver(own: np.ndarray, device: str | None) -> Any:
        if group.rank == root:  # it receives nothing: its result is a copy of its own
            kept = result.array(own.shape, own.dtype)
            if kept is not own:
                kept[...] = own
        return result.deliver(None, device)

    return Call(
        group,
        verb,
        name,
        work,
        deliver,
        root=root,
        device=device_of(x, out),
        side=side,
        dtype=getattr(model, "dtype", None),
        shape=getattr(model, "shape", None),
    )


def reduced(
    group: Members, verb: str, x: Any, op: str, out: Any, algorithm: str, root: int | None = None
) -> Call:
    """reduce and all_reduce; without a root every rank gets the result."""
    where = _working_device(group, algorithm, x, op=op)
    has_result = root is None or root == group.rank
    result = OutputArray(verb, out if has_result else None, where)
    array = apart(argument(verb, x, where), result.out)
    how = _reduction(verb, op, array, group)
    name = _choose(group, verb, algorithm, where, array, op)
    total = _flat(result.array(array.shape, array.dtype)) if has_result else None
    work = partial(_algorithm(group, verb, name), x=_flat(array), out=total, op=how, **_to(root))
    return Call(
        group,
        verb,
        name,
        work,
        result.deliver if has_result else _nothing,
        op=op,
        root=root,
        dtype=array.dtype,
        shape=array.shape,
        device=device_of(x),
        side=_side_of(group, where),
    )


def reduce_scatter(group: Members, x: Any, op: str, out: Any, algorithm: str) -> Call:
    """Chunk `rank` of what all_reduce would give."""
    where = _working_device(group, algorithm, x, op=op)
    array = argument("reduce_scatter", x, where)
    result = OutputArray("reduce_scatter", out, where)
    how = _reduction("reduce_scatter", op, array, group)
    name = _choose(group, "reduce_scatter", algorithm, where, array, op)
    flat = _flat(array)
    start, stop = bounds(len(flat), group.size)[group.rank : group.rank + 2]
    mine = flat[start:stop]
    chunk = result.array(mine.shape, array.dtype)
    work = partial(
        _algorithm(group, "reduce_scatter", name), x=apart(flat, out, mine), out=chunk, op=how
    )
    return Call(
        group,
        "reduce_scatter",
        name,
        work,
        result.deliver,
        op=op,
        dtype=array.dtype,
        shape=array.shape,
        device=device_of(x),
        side=_side_of(group, where),
    )


def gathered(
    group: Members, verb: str, x: Any, out: Any, algorithm: str, root: int | None = None
) -> Call:
    """gather and all_gather; without a root every rank gets the result."""
    where = _working_device(group, algorithm, x)
    has_result = root is None or root == group.rank
    side = _side_of(group, where)
    array = argument(verb, x, where)
    own = array if array.ndim else array.reshape(1)  # a number is one row
    result = OutputArray(verb, out if has_result else None, where, side)
    name = _choose(group, verb, algorithm, where)

    # The ranks' blocks may differ in length. What all are to have is their sum, which `out` tells.
    length = None if result.out is None or not result.out.ndim else result.out.shape[0]
    shape = (length, *own.shape[1:])

    def work(call: Call) -> None:
        rows = Rows(result, own, call.size) if has_result else None
        block = own if rows is None else rows.put_own(call.rank)
        _algorithm(group, verb, name)(call, own=block, rows=rows, **_to(root))

    return Call(
        group,
        verb,
        name,
        work,
        result.deliver if has_result else _nothing,
        root=root,
        dtype=own.dtype,
        shape=shape,
        device=device_of(x),
        side=side,
    )


def all_to_all(group: Members, x: Sequence[Any], out: Sequence[Any] | None, algorithm: str) -> Call:
    """What each rank has for this rank."""
    check_lists("all_to_all", x, out, group.size)
    where = _working_device(group, algorithm, *x)
    name = _choose(group, "all_to_all", algorithm, where)
    parts = list_argument("all_to_all", x, out, where)
    side = _side_of(group, where)
    outs = [None] * group.size if out is None else out
    results = [OutputArray("all_to_all", outs[rank], where, side) for rank in range(group.size)]

    def deliver(received: list[np.ndarray], device: str | None) -> list[Any]:
        own = received[group.rank]
        results[group.rank].array(own.shape, own.dtype)[...] = own
        return [result.deliver(None, device) for result in results]

    work = partial(
        _algorithm(group, "all_to_all", name), parts=parts, place=lambda rank: results[rank].array
    )
    return Call(
        group,
        "all_to_all",
        name,
        work,
        deliver,
        device=device_of(*x),
        side=side,
        dtype=parts[0].dtype,
    )


def barrier(group: Members, algorithm: str) -> Call:
    """Every rank has come."""
    name = _choose(group, "barrier", algorithm, "cpu")
    return Call(group, "barrier", name, _algorithm(group, "barrier", name))


def _flat(array: np.ndarray) -> np.ndarray:
    """A contiguous array as one of one dim: itself, where it is one."""
    return array if array.ndim == 1 else array.reshape(-1)


def _to(root: int | None) -> dict[str, int]:
    return {} if root is None else {"root": root}


def _nothing(returned: Any, device: str | None) -> None:
    """Call.deliver where this rank gets no result."""


def _algorithm(group: Members, verb: str, name: str) -> Callable[..., Any]:
    return ALONE[verb] if group.size == 1 else ALGORITHMS[verb][name]


def _choose(
    group: Members,
    verb: str,
    algorithm: str,
    where: str,
    array: np.ndarray | None = None,
    op: str | None = None,
) -> str:
    """The name of the algorithm; `array` where all ranks bring one of that length, `op` what they
    do with it."""
    if where == "cuda":
        return "native"
    if array is None:
        name = choose(
            verb, algorithm, 0, group.size, board=group.board is not None, tiers=group.tiers
        )
    else:
        name = choose(
            verb,
            algorithm,
            array.nbytes,
            group.size,
            group.link,
            group.board is not None,
            group.tiers,
        )
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


def _working_device(group: Members, algorithm: str, *arrays: Any, op: str | None = None) -> str:
    """Where the algorithm works: "cuda" if this rank's arrays are on the GPU and can be dealt with
    there."""
    if device_of(*arrays) != "cuda" or algorithm not in ("auto", "native"):
        return "cpu"
    if group.size == 1:
        return "cuda"
    refusal = _refusal(group, op, None if op is None else arrays[0].dtype)
    if refusal is not None and algorithm == "native" and group.transport.device is not None:
        raise ConfigError(
            f"algorithm native: {refusal}; choose auto, or another, by way of the host"
        )
    return "cpu" if refusal else "cuda"


def _refusal(group: Members, op: str | None = None, dtype: np.dtype | None = None) -> str | None:
    device = group.transport.device
    return "no device" if device is None else device.refusal(group.world_ranks, op, dtype)


def _side_of(group: Members, where: str) -> SideStream | None:
    """What carries the call out on the GPU."""
    if where == "cpu" or group.size == 1 or group.transport.device is None:
        return None
    return group.transport.device.side(group.id)
