"""The part of each collective verb before its algorithm runs: choose the device and the algorithm
(collectives/select.py), check the arguments, prepare the result.

A function here returns a Call that is ready to run: now in the caller's thread, or later in the
group's worker. Errors in this rank's own arguments are raised here, at once; disagreement between
ranks is found in the messages. The methods of Group (group.py) document the arguments and errors.
Nothing is sent here.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from minidist.comm import call_site
from minidist.comm.calls.buffers import (
    OutputArray,
    Rows,
    apart,
    argument,
    as_array,
    check_lists,
    device_of,
    from_caller,
    list_argument,
)
from minidist.comm.calls.call import Call
from minidist.comm.calls.members import Members
from minidist.comm.calls.prepared import PreparedCall, prepare
from minidist.comm.calls.reduction import UFUNCS, Reduction, reduction
from minidist.comm.chunks import split
from minidist.comm.collectives.select import ALGORITHMS, ALONE, choose
from minidist.comm.device_lane import SideStream
from minidist.comm.signature import Shape
from minidist.device.backend import is_array
from minidist.errors import ConfigError, DtypeError, ShapeError


class CallDevice(NamedTuple):
    """The devices of a call, decided once per call.

    Fields: device   the device of this rank's own arrays: "cpu" or "cuda"; None if it has none
            runs_on  the device of the algorithm
            side     the stream that carries the call out on the GPU, or None
    """

    device: str | None
    runs_on: str
    side: SideStream | None


# for most calls; made once, because a NamedTuple takes half a microsecond
ON_HOST = CallDevice("cpu", "cpu", None)
_GATHERS = ("gather", "all_gather")


class Ready(NamedTuple):
    """The parts of a call in which each rank has one array.

    Fields: prepared  the part that a repeated call shares
            array     the argument, contiguous, on the algorithm's device
            result    the array of the result
    """

    prepared: PreparedCall
    place: CallDevice
    array: np.ndarray
    result: OutputArray


def from_root(group: Members, verb: str, x: Any, root: int, out: Any, algorithm: str) -> Call:
    """Return the call of a broadcast or scatter."""
    root = group.rank_in("root", root)
    x = from_caller(verb, x)
    place = _place_of_all(group, algorithm, x)
    result = OutputArray(verb, out, place.runs_on, place.side)
    out = result.target
    array = None
    model = out if x is None and verb == "broadcast" else x  # of the root's dtype and shape
    model = model if model is None or is_array(model) else as_array(verb, model)
    if group.rank == root:
        if x is None:
            raise ShapeError(
                f"{verb}: rank {root} is the root and passes None; the root must pass the array"
            )
        array = argument(verb, x, place.runs_on)
        if verb == "scatter" and array.ndim == 0:
            raise ShapeError(
                f"scatter: rank {root} passes an array without dims; it needs a first dim, which "
                "is divided among the ranks"
            )

    def work(call: Call) -> Any:
        def place_block(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
            if call.side is not None:
                result.device = call.origin or "cpu"  # where the root has its array
            return result.array(shape, dtype)

        return prepared.function(call, x=array, place=place_block, root=root)

    def deliver(own: np.ndarray, device: str | None) -> Any:
        if group.rank == root:  # it receives nothing: its result is a copy of its own
            kept = result.array(own.shape, own.dtype)
            if kept is not own:
                kept[...] = own
        return result.deliver(None, device)

    prepared = _prepared(
        group,
        verb,
        algorithm,
        place.runs_on if place.side is None else "cuda",
        root,
        getattr(model, "dtype", None),
        getattr(model, "shape", None),
    )
    return Call(group, prepared, work, deliver, device=device_of(x, out), side=place.side)


def reduced(
    group: Members, verb: str, x: Any, op: str, out: Any, algorithm: str, root: int | None = None
) -> Call:
    """Return the call of a reduce or all_reduce; without a root every rank gets the result."""
    has_result = root is None or root == group.rank
    ready = _ready(group, verb, x, out if has_result else None, algorithm, op, root)
    result = ready.result
    array = ready.array
    if result.out is not None and result.out is not array:
        array = apart(array, result.target)
    total = result.array(array.shape, array.dtype) if has_result else None
    if array.ndim != 1:
        array = array.reshape(-1)
        total = None if total is None else total.reshape(-1)
    return Call(
        group,
        ready.prepared,
        partial(ready.prepared.function, x=array, out=total),
        result.deliver if has_result else _nothing,
        device=ready.place.device,
        side=ready.place.side,
    )


def reduce_scatter(group: Members, x: Any, op: str, out: Any, algorithm: str) -> Call:
    """Return the call of a reduce_scatter: its result is chunk `rank` of all_reduce's result."""
    ready = _ready(group, "reduce_scatter", x, out, algorithm, op)
    flat = ready.array if ready.array.ndim == 1 else ready.array.reshape(-1)
    mine = split(flat, group.size)[group.rank]
    chunk = ready.result.array(mine.shape, flat.dtype)
    return Call(
        group,
        ready.prepared,
        partial(ready.prepared.function, x=apart(flat, ready.result.target, mine), out=chunk),
        ready.result.deliver,
        device=ready.place.device,
        side=ready.place.side,
    )


def gathered(
    group: Members, verb: str, x: Any, out: Any, algorithm: str, root: int | None = None
) -> Call:
    """Return the call of a gather or all_gather; without a root every rank gets the result."""
    has_result = root is None or root == group.rank
    ready = _ready(group, verb, x, out if has_result else None, algorithm, root=root)
    result = ready.result
    own = ready.array if ready.array.ndim else ready.array.reshape(1)  # a number is one row

    def work(call: Call) -> None:
        rows = Rows(result, own, call.size) if has_result else None
        block = own if rows is None else rows.put_own(call.rank)
        ready.prepared.function(call, own=block, rows=rows)

    return Call(
        group,
        ready.prepared,
        work,
        result.deliver if has_result else _nothing,
        device=ready.place.device,
        side=ready.place.side,
    )


def all_to_all(group: Members, x: Sequence[Any], out: Sequence[Any] | None, algorithm: str) -> Call:
    """Return the call of an all_to_all."""
    check_lists("all_to_all", x, out, group.size)
    x = [part if type(part) is np.ndarray else from_caller("all_to_all", part) for part in x]
    place = _place(group, algorithm, *x)
    outs = [None] * group.size if out is None else out
    results = [
        OutputArray("all_to_all", outs[rank], place.runs_on, place.side)
        for rank in range(group.size)
    ]
    parts = list_argument("all_to_all", x, [result.target for result in results], place.runs_on)

    def deliver(received: list[np.ndarray], device: str | None) -> list[Any]:
        own = received[group.rank]
        results[group.rank].array(own.shape, own.dtype)[...] = own
        return [result.deliver(None, device) for result in results]

    prepared = _prepared(group, "all_to_all", algorithm, place.runs_on, dtype=parts[0].dtype)
    return Call(
        group,
        prepared,
        partial(prepared.function, parts=parts, place=lambda rank: results[rank].array),
        deliver,
        device=place.device,
        side=place.side,
    )


def barrier(group: Members, algorithm: str) -> Call:
    """Return the call of a barrier."""
    prepared = _prepared(group, "barrier", algorithm, "cpu")
    return Call(group, prepared, prepared.function)


def _prepared(
    group: Members,
    verb: str,
    algorithm: str,
    device: str,
    root: int | None = None,
    dtype: np.dtype | None = None,
    shape: Shape | None = None,
) -> PreparedCall:
    """Return the call that this line of the program makes, of a verb whose algorithm depends on no
    array; if the line has made it before, the same as then."""
    # call chain: _prepared < the verb, above < Group's method
    where = call_site.caller_at(2)
    key = (verb, str(algorithm), None, root, where, dtype, shape, device)
    prepared = group.prepared.get(key)
    if prepared is None:
        name, function = _choose(group, verb, algorithm, device)
        prepared = prepare(
            group.id, verb, name, function, where, root=root, dtype=dtype, shape=shape
        )
        group.prepared.keep(key, prepared)
    return prepared


def _ready(
    group: Members,
    verb: str,
    x: Any,
    out: Any,
    algorithm: str,
    op: str | None = None,
    root: int | None = None,
) -> Ready:
    """Return the parts of a call to which each rank brings one array; `op`: a reduction, where all
    arrays have one length.

    If this line of the program has made the same call with the same kind of arrays before, its
    checks are known to pass and its choices are known: only `out` is checked again.
    """
    # call chain: _ready < the verb, above < Group's method
    where = call_site.caller_at(2)
    if not (
        type(x) is np.ndarray
        and x.flags.c_contiguous
        and (out is None or type(out) is np.ndarray)
        and isinstance(algorithm, str)
        and (op is None or isinstance(op, str))
    ):
        return _checked(group, verb, x, out, algorithm, op, root, where)
    shape = None if out is None else out.shape
    key = (verb, algorithm, op, root, where, x.dtype, x.shape, shape)
    prepared = group.prepared.get(key)
    if prepared is None:
        ready = _checked(group, verb, x, out, algorithm, op, root, where)
        group.prepared.keep(key, ready.prepared)
        return ready
    return Ready(prepared, ON_HOST, x, OutputArray(verb, out))


def _checked(
    group: Members,
    verb: str,
    x: Any,
    out: Any,
    algorithm: str,
    op: str | None,
    root: int | None,
    where: str,
) -> Ready:
    """Return the parts of a call that the group has not prepared: check its arguments, and choose
    the device and the algorithm."""
    x = from_caller(verb, x)
    place = _place(group, algorithm, x, op=op)
    array = argument(verb, x, place.runs_on)
    # a reduction's result has the argument's shape, so its array is made now, not on the side
    gathers = verb in _GATHERS
    result = OutputArray(verb, out, place.runs_on, place.side if gathers else None)
    options: dict[str, Any] = {} if root is None else {"root": root}
    shape: Shape = array.shape
    if gathers:
        # The ranks' blocks may differ in length. All must agree on their sum, the length of `out`.
        length = None if result.out is None or not result.target.ndim else result.target.shape[0]
        shape = (length, *array.shape[1:])
        name, function = _choose(group, verb, algorithm, place.runs_on)
    else:
        options["op"] = _reduction(verb, op, array, group)
        name, function = _choose(group, verb, algorithm, place.runs_on, array, op)
    prepared = prepare(
        group.id,
        verb,
        name,
        partial(function, **options),
        where,
        op=op,
        root=root,
        dtype=array.dtype,
        shape=shape,
    )
    return Ready(prepared, place, array, result)


def _nothing(returned: Any, device: str | None) -> None:
    """Return None: the `deliver` of ranks without a result."""


def _choose(
    group: Members,
    verb: str,
    algorithm: str,
    device: str,
    array: np.ndarray | None = None,
    op: str | None = None,
) -> tuple[str, Callable[..., Any]]:
    """Return the algorithm's name and function; `array` if all ranks have arrays of this length,
    `op` if they are reduced."""
    if device == "cuda":
        name = "native"
    else:
        name = choose(
            verb,
            algorithm,
            0 if array is None else array.nbytes,
            group.size,
            None if array is None else group.link,
            group.board is not None,
            group.tiers,
        )
        if name == "native" and group.size > 1:
            group.transport.check_native(op, None if array is None else array.dtype)
    return name, ALONE[verb] if group.size == 1 else ALGORITHMS[verb][name]


def _reduction(verb: str, op: Any, array: np.ndarray, group: Members) -> Reduction:
    """Return the reduction of a call; its errors name the verb."""
    if not isinstance(op, str):
        raise ConfigError(f"{verb}: op={op!r} must be a name: {', '.join(UFUNCS)}")
    try:
        return reduction(op, array.dtype, group.size)
    except (ConfigError, DtypeError) as error:
        raise type(error)(f"{verb}: {error}") from None


def _place(group: Members, algorithm: str, *arrays: Any, op: str | None = None) -> CallDevice:
    """Return the devices of a call: the GPU if this rank's arrays are there and the transport
    supports the call there."""
    device = device_of(*arrays)
    if device == "cpu":
        return ON_HOST
    if device is None or algorithm not in ("auto", "native"):
        return CallDevice(device, "cpu", None)
    if group.size == 1:
        return CallDevice(device, "cuda", None)
    gpu = group.transport.device
    if gpu is None:
        return CallDevice(device, "cpu", None)
    refusal = gpu.refusal(group.world_ranks, op, None if op is None else arrays[0].dtype)
    if refusal is None:
        return CallDevice(device, "cuda", gpu.side(group.id))
    if algorithm == "native":
        raise ConfigError(
            f"algorithm native: {refusal}; choose auto or another algorithm, which sends through "
            "the host"
        )
    return CallDevice(device, "cpu", None)


def _place_of_all(group: Members, algorithm: str, x: Any) -> CallDevice:
    """Return the devices of a call to which only the root brings an array: all ranks prepare for
    the GPU, because they do not know the root's device."""
    place = _place(group, algorithm, x)
    gpu = group.transport.device
    if gpu is None or group.size == 1 or algorithm not in ("auto", "native"):
        return place
    able = gpu.refusal(group.world_ranks, None, None) is None
    return place._replace(side=gpu.side(group.id) if able else None)
