"""Chapter 24 · The group of a rank that runs alone: its calls are recorded, and answered with
shapes.

    world = SimGroup.world_of(sim)              # sim: a SimRank, which knows the plan
    tp = world.split(color, axis="tp")          # the ranks follow from the plan: no message is sent
    tp.all_reduce(x)                            # Start(GroupCall("tp", "all_reduce", …)), Await; a
                                                row in the ledger

The algorithm's own code runs, on a call whose messages are only counted. So messages, bytes and
workspace are those of a real call. Arrays without data are not filled. Small NumPy arrays (counts,
loss shares, digests) are answered as if every rank had brought what this one brings: sums are P
times it, gathers repeat it. Arrays on a GPU are a library's to move, as NCCL: their calls are
"native" in the events, and need no workspace. The ledger counts the plan's algorithm.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minidist.comm.calls.async_call import Pending
from minidist.comm.calls.buffers import apart
from minidist.comm.calls.members import WORLD
from minidist.comm.calls.reduction import reduction
from minidist.comm.chunks import bounds
from minidist.comm.collectives.select import ALGORITHMS, ALONE, choose
from minidist.comm.group import Group
from minidist.comm.subgroups import derived_id
from minidist.device import account
from minidist.device.backend import array_module, is_array, is_virtual
from minidist.errors import ConfigError
from minidist.observe.events import GroupCall
from minidist.simulate import recording
from minidist.simulate.counting_call import CountingCall, DeclaredPlace, DeclaredRows, SimTransport
from minidist.simulate.sim_rank import SimRank

_remembered: dict[tuple[Any, ...], tuple[int, int, tuple[tuple[int, np.dtype], ...]]] = {}
"""What calls did that came before: bytes, messages, workspace."""
NATIVE = "native"


class SimPending(Pending):
    """A call that was started; its wait() is an event."""

    def __init__(self, sim: SimRank, number: int | None, result: Any, kept: Any) -> None:
        self._sim = sim
        self._number = number
        self._result = result
        self._kept = kept

    def wait(self) -> Any:
        if self._number is not None:
            self._sim.recording.wait(self._number)
            self._number = None
        return self._result

    def done(self) -> bool:
        return self._number is None


class _Result:
    """The array of a verb's result: the caller's `out`, else a new one beside `like`."""

    def __init__(self, out: Any, like: Any) -> None:
        self.out = out
        self.target = out  # as OutputArray's, which Rows reads
        self._like = like
        self.whole = None

    def array(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return the array to fill: `out` where it is contiguous."""
        self.whole = self.out
        if self.out is None or not self.out.flags.c_contiguous:
            self.whole = array_module(self._like).empty(shape, dtype)
            if self.out is not None:
                account.current().hold(self.whole, "communication")
        return self.whole

    def deliver(self) -> Any:
        """Return what the caller gets."""
        if self.out is not None and self.whole is not self.out:
            self.out[...] = self.whole
        return self.whole if self.out is None else self.out


class SimGroup(Group):
    """A group of a rank that runs alone. Attributes: name: of the group in events
    (group_ranks.py)."""

    def __init__(
        self, sim: SimRank, name: str, world_ranks: Sequence[int], *, axis: str, id: int
    ) -> None:
        super().__init__(
            SimTransport(sim.rank, sim.size), sim.ledger, world_ranks, axis=axis, id=id
        )
        self.sim = sim
        self.name = name
        # shapes of an all_to_all -> those that came in return
        self._way_back: dict[Any, list[tuple[int, ...]]] = {}

    @classmethod
    def world_of(cls, sim: SimRank) -> "SimGroup":
        """Return the group of all ranks."""
        return cls(sim, "world", range(sim.size), axis="world", id=WORLD)

    def split(self, color: int | None, key: int | None = None, *, axis: str | None = None) -> Any:
        """Split as Group.split does; the ranks are those that the plan says."""
        with self.ledger.control():
            self.all_gather(np.zeros((1, 4), np.int64))
        self._splits += 1
        if color is None:
            return None
        name, ranks = self.sim.subgroup(self.name, axis)
        child = SimGroup(
            self.sim,
            name,
            ranks,
            axis=axis or f"{self.axis}.split",
            id=derived_id(self.id, f"{self._splits}/{int(color)}"),
        )
        self._children.append(child)
        child._parent = self
        return child

    # ------------------------------------------------------------------------------- point to point

    def start_send(self, x: Any, dst: int) -> SimPending:
        array = _ready(x)
        return self._message("send", array, dst, None, None, "send")

    def start_recv(self, src: int, *, out: Any = None) -> SimPending:
        if out is None:
            raise ConfigError(
                "a rank simulated by itself cannot know the shape of a message; pass out="
            )
        return self._message("recv", out, src, out, None, "recv")

    def start_exchange(self, x: Any, dst: int, src: int, *, out: Any = None) -> SimPending:
        array = _ready(x)
        if out is not None and array_module(array).may_share_memory(array, out):
            array = array.copy()
        result = array_module(array).empty(array.shape, array.dtype) if out is None else out
        self._message("send", array, dst, None, None, "exchange")
        return self._message("recv", result, src, result, array, "exchange")

    def _message(
        self, way: str, array: Any, peer: int, result: Any, kept: Any, verb: str
    ) -> SimPending:
        number = None
        if way == "send" and peer != self.rank:
            _, axis = self.ledger.labels(self.axis)
            self.ledger.record(axis, verb, "direct", array.nbytes)
        if peer != self.rank:
            number = self.sim.recording.start(
                GroupCall(
                    self.name,
                    way,
                    "direct",
                    array.nbytes,
                    peer=peer,
                    itemsize=array.dtype.itemsize,
                    dims=array.ndim,
                )
            )
        # no rank waits for a send: only the receiver's wait is an event
        return SimPending(self.sim, None if way == "send" else number, result, kept)

    # ---------------------------------------------------------------------------------- collectives

    def start_all_reduce(
        self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str = "auto"
    ) -> SimPending:
        array = apart(_ready(x), out)
        result = _Result(out, array)
        total = result.array(array.shape, array.dtype).reshape(-1)
        return self._carry_out(
            "all_reduce",
            algorithm,
            array,
            result.deliver,
            op=op,
            n=array.nbytes,
            x=array.reshape(-1),
            out=total,
        )

    def start_reduce_scatter(
        self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str = "auto"
    ) -> SimPending:
        array = _ready(x)
        flat = array.reshape(-1)
        start, stop = bounds(flat.size, self.size)[self.rank : self.rank + 2]
        result = _Result(out, array)
        mine = flat[start:stop]
        chunk = result.array(mine.shape, array.dtype)
        return self._carry_out(
            "reduce_scatter",
            algorithm,
            array,
            result.deliver,
            op=op,
            n=array.nbytes,
            x=apart(flat, out, mine),
            out=chunk,
        )

    def start_all_gather(self, x: Any, *, out: Any = None, algorithm: str = "auto") -> SimPending:
        array = _ready(x)
        own = array if array.ndim else array.reshape(1)
        # places of own tokens
        divided = is_virtual(own) or (self.axis in ("cp", "tp") and own.dtype == np.int64)
        lengths = (
            self.sim.blocks(own, out, self.size, self.rank, self.axis)
            if divided
            else [len(own)] * self.size
        )
        result: Any = _Result(out, own)
        each = own.nbytes // max(1, len(own))
        blocks = tuple(length * each for length in lengths) if len(set(lengths)) > 1 else ()
        name = choose("all_gather", algorithm, 0, self.size)
        if name in ("ring", NATIVE) and (self._by_library(own) or not is_virtual(own)):
            result.array((sum(lengths), *own.shape[1:]), own.dtype)
            passed_on = sum(lengths) - lengths[(self.rank + 1) % self.size]  # as round a ring
            return self._carry_out(
                "all_gather",
                algorithm,
                own,
                result.deliver,
                blocks=blocks,
                sent=(passed_on * each, self.size - 1),
            )
        rows = DeclaredRows(result, own, lengths)
        return self._carry_out(
            "all_gather",
            algorithm,
            own,
            result.deliver,
            blocks=blocks,
            own=rows.put_own(self.rank),
            rows=rows,
        )

    def start_all_to_all(
        self, x: Sequence[Any], *, out: Any = None, algorithm: str = "auto"
    ) -> SimPending:
        parts = [_ready(part) for part in x]
        results = [_Result(None, part) for part in parts]
        shapes = self._returned([part.shape for part in parts], is_virtual(parts[0]))
        came = list(parts)

        def place(rank: int) -> DeclaredPlace:
            def of(shape: tuple[int, ...], dtype: np.dtype) -> Any:
                came[rank] = results[rank].array(shape, dtype)
                return came[rank]

            return DeclaredPlace(of, shapes[rank])

        def deliver() -> list[Any]:
            if is_virtual(parts[0]):
                came[self.rank] = parts[self.rank].copy()
                return came
            return [parts[self.rank].copy() for _ in parts]

        return self._carry_out(
            "all_to_all",
            algorithm,
            parts[0],
            deliver,
            parts=parts,
            place=place,
            blocks=tuple(part.nbytes for part in parts),
            total=sum(part.nbytes for part in parts),
        )

    def _returned(self, sent: list[tuple[int, ...]], virtual: bool) -> list[tuple[int, ...]]:
        """Return the shapes that come when these are sent: on the way back those of the way
        there."""
        if not virtual:
            return [sent[self.rank]] * self.size
        found = self._way_back.get(tuple(sent))
        came = found or self.sim.swapped(sent, self.size, self.rank)
        if found is None:
            self._way_back[tuple(came)] = sent
            self._way_back[tuple(sent)] = came
        return came

    def start_barrier(self, *, algorithm: str = "auto") -> SimPending:
        return self._carry_out("barrier", algorithm, np.zeros(0, np.uint8), lambda: None)

    def _carry_out(
        self,
        verb: str,
        algorithm: str,
        array: Any,
        deliver: Callable[[], Any],
        *,
        n: int = 0,
        op: str = "sum",
        blocks: tuple[int, ...] = (),
        total: int | None = None,
        sent: tuple[int, int] | None = None,
        **arrays: Any,
    ) -> SimPending:
        """Count the call, record its start, and return it."""
        name = choose(verb, algorithm, n, self.size)
        call = CountingCall(self, verb, name, array.dtype, held=not self._by_library(array))
        if "out" in arrays:
            arrays["op"] = reduction(op, array.dtype, self.size)
        with recording.pause():
            if sent is not None:
                call.nbytes, call.messages = sent
            elif self.size == 1:
                ALONE[verb](call, **arrays)
            else:
                self._work(verb, name, call, arrays)
            result = deliver()
            if not is_virtual(array):
                result = _answer(verb, op, array, result, self.size)
        _, axis = self.ledger.labels(self.axis)
        self.ledger.record(axis, verb, name, call.nbytes, call.messages)
        number = None
        if self.size > 1:
            number = self.sim.recording.start(
                GroupCall(
                    self.name,
                    verb,
                    NATIVE if self._by_library(array) else name,
                    array.nbytes if total is None else total,
                    blocks,
                    name=self.sim.recording.name_of_next(self.axis),
                    itemsize=array.dtype.itemsize,
                    dims=array.ndim,
                )
            )
        return SimPending(self.sim, number, result, arrays)

    def _by_library(self, array: Any) -> bool:
        """Return True if a library moves the array, as NCCL does on GPUs."""
        return self.size > 1 and is_virtual(array) and array.device_name != "cpu"

    def _work(self, verb: str, name: str, call: CountingCall, arrays: dict[str, Any]) -> None:
        """Run the algorithm; one that was run before is remembered, if all ranks bring the same."""
        function = ALGORITHMS[verb][name]
        x = arrays.get("x")
        if x is None or not is_virtual(x):
            function(call, **arrays)
            return
        same = arrays["out"].owner is x.owner
        key = verb, name, arrays["op"], self.size, self.rank, x.size, x.dtype, same
        if key not in _remembered:
            function(call, **arrays)
            _remembered[key] = call.nbytes, call.messages, tuple(call.rooms)
            return
        call.nbytes, call.messages, rooms = _remembered[key]
        held = [call.workspace(length, dtype) for length, dtype in rooms]
        del held

    # ------------------------------------------------------------ blocking: started, and waited for

    def send(self, x: Any, dst: int) -> None:
        self.start_send(x, dst).wait()

    def all_reduce(
        self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str = "auto"
    ) -> Any:
        return self.start_all_reduce(x, op, out=out, algorithm=algorithm).wait()

    def reduce_scatter(
        self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str = "auto"
    ) -> Any:
        return self.start_reduce_scatter(x, op, out=out, algorithm=algorithm).wait()

    def all_gather(self, x: Any, *, out: Any = None, algorithm: str = "auto") -> Any:
        return self.start_all_gather(x, out=out, algorithm=algorithm).wait()

    def all_to_all(
        self, x: Sequence[Any], *, out: Any = None, algorithm: str = "auto"
    ) -> list[Any]:
        return list(self.start_all_to_all(x, out=out, algorithm=algorithm).wait())

    def barrier(self, *, algorithm: str = "auto") -> None:
        self.start_barrier(algorithm=algorithm).wait()


def _ready(x: Any) -> Any:
    """Return an argument as a contiguous array: itself, or a copy that counts as communication."""
    array = x if is_array(x) else np.asarray(x)
    return (
        array if array.flags.c_contiguous else account.current().hold(array.copy(), "communication")
    )


def _answer(verb: str, op: str, own: np.ndarray, result: Any, size: int) -> Any:
    """Return the result of a call on small NumPy arrays, if all ranks bring what this one
    brings."""
    if verb == "all_reduce":
        result[...] = own * size if op == "sum" else own
    elif verb == "all_gather":
        result[...] = np.resize(own, result.shape)
    elif verb == "reduce_scatter":
        result[...] = own.reshape(-1)[: len(result)] * (size if op == "sum" else 1)
    return result
