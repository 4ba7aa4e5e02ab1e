"""What each collective verb does before its algorithm runs: check the arguments, find a place for the result.

A function here returns a Call that is ready to run, in the caller's thread now or in the group's worker later. Whatever
is wrong with one rank's own arguments is raised here, at once; in what the ranks disagree, the messages tell.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from minidist.comm.calls.buffers import Place, Result, Rows, apart, argument, as_array, device_of
from minidist.comm.calls.call import Call
from minidist.comm.calls.reduction import UFUNCS, Reduction, reduction
from minidist.comm.chunks import bounds
from minidist.comm.collectives.select import ALGORITHMS, choose
from minidist.comm.device_lane import Side
from minidist.device.backend import array_module, is_array
from minidist.errors import ConfigError, DtypeError, ShapeError

if TYPE_CHECKING:
    from minidist.comm.group import Group


def broadcast(group: "Group", x: Any, root: int, out: Any, algorithm: str) -> Call:
    root, where = rank_in(group, "root", root), _where(group, algorithm, x)
    result, side = Result("broadcast", out, where), _side_for_root(group, algorithm)
    name = _choose(group, "broadcast", algorithm, where if side is None else "cuda")
    array = _at_root(group, "broadcast", x, root, where)

    def work(call: Call) -> Any:
        result.side = call.side
        full = ALGORITHMS["broadcast"][name](call, array, _where_told(result, call), root)
        _keep(result, call, full, root)
        return result.deliver(call.device)

    return Call(group, "broadcast", name, work, root=root, device=device_of(x, out), side=side,
                **_kind(out if x is None else x, "broadcast"))


def scatter(group: "Group", x: Any, root: int, out: Any, algorithm: str) -> Call:
    root, where = rank_in(group, "root", root), _where(group, algorithm, x)
    result, side = Result("scatter", out, where), _side_for_root(group, algorithm)
    name = _choose(group, "scatter", algorithm, where if side is None else "cuda")
    array = _at_root(group, "scatter", x, root, where)
    if array is not None and array.ndim == 0:
        raise ShapeError(f"scatter: rank {group.rank} passes an array without dims; its first dim is to be cut")

    def work(call: Call) -> Any:
        result.side = call.side
        part = ALGORITHMS["scatter"][name](call, array, _where_told(result, call), root)
        _keep(result, call, part, root)
        return result.deliver(call.device)

    return Call(group, "scatter", name, work, root=root, device=device_of(x, out), side=side, **_kind(x, "scatter"))


def reduce(group: "Group", x: Any, op: str, root: int, out: Any, algorithm: str) -> Call:
    root, where = rank_in(group, "root", root), _where(group, algorithm, x, op=op)
    at_root = group.rank == root
    result = Result("reduce", out if at_root else None, where)
    array = apart(argument("reduce", x, where), result.out)
    how, name = _reduction("reduce", op, array, group), _choose(group, "reduce", algorithm, where, array, op)
    total = result.array(array.shape, array.dtype).reshape(-1) if at_root else None

    def work(call: Call) -> Any:
        ALGORITHMS["reduce"][name](call, array.reshape(-1), total, how, root)
        return result.deliver(call.device) if at_root else None

    return Call(group, "reduce", name, work, op=op, root=root, device=device_of(x), side=_side(group, where),
                **_kind(array))


def all_reduce(group: "Group", x: Any, op: str, out: Any, algorithm: str) -> Call:
    where = _where(group, algorithm, x, op=op)
    array, result = apart(argument("all_reduce", x, where), out), Result("all_reduce", out, where)
    how, name = _reduction("all_reduce", op, array, group), _choose(group, "all_reduce", algorithm, where, array, op)
    total = result.array(array.shape, array.dtype).reshape(-1)

    def work(call: Call) -> Any:
        ALGORITHMS["all_reduce"][name](call, array.reshape(-1), total, how)
        return result.deliver(call.device)

    return Call(group, "all_reduce", name, work, op=op, device=device_of(x), side=_side(group, where), **_kind(array))


def reduce_scatter(group: "Group", x: Any, op: str, out: Any, algorithm: str) -> Call:
    where = _where(group, algorithm, x, op=op)
    array, result = argument("reduce_scatter", x, where), Result("reduce_scatter", out, where)
    how = _reduction("reduce_scatter", op, array, group)
    name = _choose(group, "reduce_scatter", algorithm, where, array, op)
    flat = array.reshape(-1)
    start, stop = bounds(len(flat), group.size)[group.rank:group.rank + 2]
    mine = flat[start:stop]
    flat = apart(flat, out, mine)
    chunk = result.array(mine.shape, array.dtype)

    def work(call: Call) -> Any:
        ALGORITHMS["reduce_scatter"][name](call, flat, chunk, how)
        return result.deliver(call.device)

    return Call(group, "reduce_scatter", name, work, op=op, device=device_of(x), side=_side(group, where),
                **_kind(array))


def gather(group: "Group", x: Any, root: int, out: Any, algorithm: str) -> Call:
    root, where = rank_in(group, "root", root), _where(group, algorithm, x)
    at_root = group.rank == root
    own, result = _rows_of(argument("gather", x, where)), Result("gather", out if at_root else None, where)
    name = _choose(group, "gather", algorithm, where)

    def work(call: Call) -> Any:
        result.side = call.side
        if not at_root:
            return ALGORITHMS["gather"][name](call, own, None, root)
        rows = Rows(result, own, call.size)
        ALGORITHMS["gather"][name](call, rows.put_own(call.rank), rows, root)
        return result.deliver(call.device)

    return Call(group, "gather", name, work, root=root, device=device_of(x), side=_side(group, where),
                **_kind_of_rows(own))


def all_gather(group: "Group", x: Any, out: Any, algorithm: str) -> Call:
    where = _where(group, algorithm, x)
    own, result = _rows_of(argument("all_gather", x, where)), Result("all_gather", out, where)
    name = _choose(group, "all_gather", algorithm, where)

    def work(call: Call) -> Any:
        result.side = call.side
        rows = Rows(result, own, call.size)
        ALGORITHMS["all_gather"][name](call, rows.put_own(call.rank), rows)
        return result.deliver(call.device)

    return Call(group, "all_gather", name, work, device=device_of(x), side=_side(group, where), **_kind_of_rows(own))


def all_to_all(group: "Group", x: Sequence[Any], out: Sequence[Any] | None, algorithm: str) -> Call:
    _check_lists(group, x, out)
    where = _where(group, algorithm, *x)
    name, parts = _choose(group, "all_to_all", algorithm, where), _parts(group, x, out, where)
    results = [Result("all_to_all", None if out is None else out[rank], where) for rank in range(group.size)]

    def place(rank: int) -> Place:
        return results[rank].array

    def work(call: Call) -> Any:
        for result in results:
            result.side = call.side
        own = ALGORITHMS["all_to_all"][name](call, parts, place)[call.rank]
        results[call.rank].array(own.shape, own.dtype)[...] = own
        return [result.deliver(call.device) for result in results]

    return Call(group, "all_to_all", name, work, device=device_of(*x), side=_side(group, where), dtype=parts[0].dtype)


def barrier(group: "Group", algorithm: str) -> Call:
    name = _choose(group, "barrier", algorithm, "cpu")
    return Call(group, "barrier", name, ALGORITHMS["barrier"][name])


def _where(group: "Group", algorithm: str, *arrays: Any, op: str | None = None) -> str:
    """Where the algorithm works: "cuda" if this rank's arrays are on the GPU and can be dealt with there."""
    if device_of(*arrays) != "cuda" or algorithm not in ("auto", "native"):
        return "cpu"
    if group.size == 1:
        return "cuda"
    dtype = None if op is None else arrays[0].dtype
    refusal = _refusal(group, op, dtype)
    if refusal is not None and algorithm == "native" and group.transport.device is not None:
        raise ConfigError(f"algorithm native: {refusal}; choose auto, or another, by way of the host")
    return "cpu" if refusal else "cuda"


def _refusal(group: "Group", op: str | None = None, dtype: np.dtype | None = None) -> str | None:
    device = group.transport.device
    return "no device" if device is None else device.refusal(group.world_ranks, op, dtype)


def _side(group: "Group", where: str) -> Side | None:
    """What carries the call out on the GPU."""
    if where == "cpu" or group.size == 1:
        return None
    device = group.transport.device
    return None if device is None else device.side(group.id)


def _side_for_root(group: "Group", algorithm: str) -> Side | None:
    """The same where only the root knows whether its array is on the GPU: all ranks prepare for it."""
    if algorithm not in ("auto", "native") or _refusal(group) is not None:
        return None
    return _side(group, "cuda")


def _where_told(result: Result, call: Call) -> Place:
    """Where the root's array goes: on whatever device the root has it."""
    def place(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        if call.side is not None:
            result.device = call.origin or "cpu"
        return result.array(shape, dtype)

    return place


def _choose(group: "Group", verb: str, algorithm: str, where: str, array: np.ndarray | None = None,
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


def _reduction(verb: str, op: Any, array: np.ndarray, group: "Group") -> Reduction:
    """The reduction of a call; its errors say of which."""
    if not isinstance(op, str):
        raise ConfigError(f"{verb}: op={op!r} must be a name: {', '.join(UFUNCS)}")
    try:
        return reduction(op, array.dtype, group.size)
    except (ConfigError, DtypeError) as error:
        raise type(error)(f"{verb}: {error}") from None


def rank_in(group: "Group", name: str, rank: int) -> int:
    """`rank`, or ConfigError if the group has none such; `name` is what the argument is called."""
    if not isinstance(rank, int | np.integer) or not 0 <= rank < group.size:
        raise ConfigError(f"{name}={rank!r}: the group {group.axis} has ranks 0 to {group.size - 1}")
    return int(rank)


def _kind(x: Any, verb: str = "") -> dict[str, Any]:
    """dtype and shape for a signature; None where this rank brought nothing that says them."""
    if x is None:
        return {"dtype": None, "shape": None}
    x = x if is_array(x) else as_array(verb, x)
    return {"dtype": x.dtype, "shape": x.shape}


def _kind_of_rows(own: np.ndarray) -> dict[str, Any]:
    """The same for blocks whose first dim may differ between ranks."""
    return {"dtype": own.dtype, "shape": (None, *own.shape[1:])}


def _at_root(group: "Group", verb: str, x: Any, root: int, where: str) -> np.ndarray | None:
    """The root's array, ready to send; None elsewhere."""
    if group.rank != root:
        return None
    if x is None:
        raise ShapeError(f"{verb}: rank {root} is the root and passes None; the root brings the array")
    return argument(verb, x, where)


def _keep(result: Result, call: Call, own: np.ndarray, root: int) -> None:
    """At the root, which receives nothing, the result is a copy of its own."""
    if call.rank == root:
        kept = result.array(own.shape, own.dtype)
        if kept is not own:
            kept[...] = own


def _rows_of(array: np.ndarray) -> np.ndarray:
    """An array that can be joined along its first dim: a scalar is one row."""
    return array.reshape(1) if array.ndim == 0 else array


def _check_lists(group: "Group", x: Any, out: Any) -> None:
    """Whether the arguments of an all_to_all are lists of an array for each rank."""
    for name, arrays in (("x", x), ("out", out)):
        if arrays is None and name == "out":
            continue
        if not hasattr(arrays, "__getitem__") or getattr(arrays, "shape", None) == ():
            raise ShapeError(f"all_to_all: {name} is a {type(arrays).__name__}; pass a list of {group.size} arrays")
        if len(arrays) != group.size:
            raise ShapeError(f"all_to_all: {name} has {len(arrays)} arrays; pass one for each of {group.size} ranks")
    if out is not None and len(set(map(id, out))) < group.size:
        raise ShapeError("all_to_all: out= holds one array several times; pass an array of its own for each rank")


def _parts(group: "Group", x: Sequence[Any], out: Sequence[Any] | None, where: str) -> list[np.ndarray]:
    """The arrays of an all_to_all, ready to send: one for each rank, of one dtype, apart from all of `out`."""
    parts = [argument("all_to_all", part, where) for part in x]
    dtypes = {part.dtype for part in parts}
    if len(dtypes) > 1:
        raise DtypeError(f"all_to_all: the arrays have dtypes {', '.join(sorted(map(str, dtypes)))}; cast them to one")
    theirs = [array for array in out or () if isinstance(array, type(parts[0]))]
    if theirs and _share(_whole(parts), _whole(theirs)) and _share(parts, theirs):
        return [part.copy() for part in parts]
    return parts


def _whole(arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    """The one array of which all these are views, if they are of one; else they themselves. So few pairs are compared.
    """
    base = arrays[0].base
    return [base] if isinstance(base, type(arrays[0])) and all(array.base is base for array in arrays) else arrays


def _share(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    """Whether any of the first may share memory with any of the second."""
    share = array_module(some[0]).may_share_memory
    return any(share(one, other) for one in some for other in others)
