"""A group: an ordered set of ranks that communicate; the verbs, each with `out=`, `algorithm=` and a `start_…` twin.

    total = group.all_reduce(x)                    # a new array; x is left alone
    group.all_reduce(x, out=x)                     # in place
    pending = group.start_all_reduce(x, out=x)     # at once; x must not be touched before
    pending.wait()                                 # this

Every rank of a group must make the same collective calls in the same order: each message carries the call's signature,
and ranks that disagree get MismatchError with both calls. Calls on one group run one after the other: a `start_…` call
in the group's worker thread, any other in the caller's own thread, behind those that were started before it. Make the
calls of one group from one thread; threads that communicate by themselves each take a group of their own (`split`).

What all verbs take: arrays of NumPy or CuPy of any dtype without references, contiguous or not, read-only or not,
empty or without dims; numbers and nested lists count as arrays. Results are arrays, without dims where the argument was
a number (`float(result)` makes a number of it). A result lies where the rank's own argument lies.

What all verbs raise: MismatchError (ranks called different things), PeerLostError (a rank died), TimeoutError (a wait
reached `group.transport.limit` seconds), ConfigError (no such algorithm, op or rank: the message lists those that there
are), ShapeError and DtypeError (this rank's own arguments do not fit), CommError (the group is closed, two threads use
it at once, or a child does that the rank forked).
"""

from collections.abc import Iterable, Sequence
from typing import Any

from minidist.comm import subgroups, verbs
from minidist.comm.call_site import entries
from minidist.comm.calls.async_call import Pending, Worker
from minidist.comm.calls.call import Call
from minidist.comm.calls.group_guard import Usage
from minidist.comm.cost.critical_path import tiers
from minidist.comm.ledger import Ledger
from minidist.comm.point_to_point import Messages
from minidist.comm.transport import Transport
from minidist.errors import ConfigError

__all__ = ["Group", "Pending"]

WORLD = 0
"""The id of the group of all ranks."""


@entries
class Group:
    """An ordered set of ranks of the job, this one among them.

    Attributes: rank, size     this rank's place in the group, and how many there are
                world_rank     this rank's place in the job
                world_ranks    world rank of each rank
                nodes          the machine each rank is on: a number for each rank, equal where they share one
                axis           what the group is for ("world", "dp", ...): the ledger counts under it
                ledger         what this rank sent, shared with its other groups
                link           what a message costs among its ranks (cost/link_model.py); None if it was not measured
                tiers          how it lies on nodes, if it spans several of several ranks; else None
                board          memory that all its ranks share, or None
                transport, id, usage   for the layers below
    """

    def __init__(self, transport: Transport, ledger: Ledger, world_ranks: Sequence[int], *, axis: str = "world",
                 id: int = WORLD, nodes: Sequence[int] | None = None, places: Sequence[int] | None = None) -> None:
        self.transport, self.ledger, self.world_ranks = transport, ledger, tuple(world_ranks)
        self.axis, self.id = axis, id
        self.nodes = tuple(nodes or (0,) * len(self.world_ranks))
        self.world_rank, self.size = transport.world_rank, len(self.world_ranks)
        if self.world_rank not in self.world_ranks:
            raise ConfigError(f"world rank {self.world_rank} is not in the group {self.world_ranks} it would make")
        self.rank = self.world_ranks.index(self.world_rank)
        profile = transport.profile
        self.link = None if profile is None else profile.link(transport.inside, self.nodes)
        self.tiers = tiers(self.nodes, profile, transport.inside)
        places = places or [transport.reserve_board()] * self.size      # the world's board: the first place everywhere
        self.board = transport.open_board(self.world_ranks, places) if self.size > 1 else None
        self.usage, self._messages = Usage(axis, self.world_rank), Messages(self)
        self._worker: Worker | None = None
        self._sequence = self._splits = 0
        self._children: list[Group] = []

    def __repr__(self) -> str:
        return f"Group({self.axis}: rank {self.rank} of {self.size}, world ranks {self.world_ranks})"

    # --------------------------------------------------------------------------------------------- point to point

    def send(self, x: Any, dst: int) -> None:
        """Send `x` to rank `dst`; returns when `x` may change again. A send to oneself works."""
        self.start_send(x, dst).wait()

    def start_send(self, x: Any, dst: int) -> Pending:
        """send's twin. Any number of messages may be under way, in any directions."""
        return self._messages.send(x, verbs.rank_in(self, "dst", dst))

    def recv(self, src: int, *, out: Any = None) -> Any:
        """Receive the next array from rank `src`; its shape and dtype come with it, and must be those of `out`."""
        return self.start_recv(src, out=out).wait()

    def start_recv(self, src: int, *, out: Any = None) -> Pending:
        """recv's twin."""
        return self._messages.recv(verbs.rank_in(self, "src", src), out)

    def exchange(self, x: Any, dst: int, src: int, *, out: Any = None) -> Any:
        """Send `x` to `dst` and receive from `src` at once: no order of the two can deadlock. `out` may be `x`."""
        return self.start_exchange(x, dst, src, out=out).wait()

    def start_exchange(self, x: Any, dst: int, src: int, *, out: Any = None) -> Pending:
        """exchange's twin. It meets a send and a recv of other ranks, or their exchanges."""
        return self._messages.exchange(x, verbs.rank_in(self, "dst", dst), verbs.rank_in(self, "src", src), out)

    # ------------------------------------------------------------------------------------------------- from one root

    def broadcast(self, x: Any = None, root: int = 0, *, out: Any = None, algorithm: str = "auto") -> Any:
        """The root's array on every rank.

        Args:    x: at the root; elsewhere None, or anything of the root's shape and dtype.
                 algorithm: naive, tree, ring, hierarchical, native, shared.
        """
        return self._run(verbs.broadcast(self, x, root, out, algorithm))

    def start_broadcast(self, x: Any = None, root: int = 0, *, out: Any = None, algorithm: str = "auto") -> Pending:
        """broadcast's twin."""
        return self._start(verbs.broadcast(self, x, root, out, algorithm))

    def scatter(self, x: Any = None, root: int = 0, *, out: Any = None, algorithm: str = "auto") -> Any:
        """Rank r gets part r of the root's array, cut along the first dim as numpy.array_split does.

        Args:    x: (n, ...) at the root; elsewhere None, or anything of the root's shape and dtype.
                 algorithm: naive, tree, native.
        """
        return self._run(verbs.scatter(self, x, root, out, algorithm))

    def start_scatter(self, x: Any = None, root: int = 0, *, out: Any = None, algorithm: str = "auto") -> Pending:
        """scatter's twin."""
        return self._start(verbs.scatter(self, x, root, out, algorithm))

    # --------------------------------------------------------------------------------------------------- to one root

    def reduce(self, x: Any, op: str = "sum", root: int = 0, *, out: Any = None, algorithm: str = "auto") -> Any:
        """At the root, all ranks' arrays combined elementwise; None elsewhere (`out` is ignored).

        Args:    x: one shape and dtype on all ranks. op: sum, mean, max, min, prod (see calls/reduction.py).
                 algorithm: naive, tree, hierarchical, native.
        Raises:  DtypeError if op does not take the dtype (mean of integers).
        """
        return self._run(verbs.reduce(self, x, op, root, out, algorithm))

    def start_reduce(self, x: Any, op: str = "sum", root: int = 0, *, out: Any = None,
                     algorithm: str = "auto") -> Pending:
        """reduce's twin."""
        return self._start(verbs.reduce(self, x, op, root, out, algorithm))

    def gather(self, x: Any, root: int = 0, *, out: Any = None, algorithm: str = "auto") -> Any:
        """At the root, all ranks' arrays one after the other along the first dim; None elsewhere (`out` is ignored).

        Args:    x: (m, ...), where m may differ between ranks; a number is one row.
                 algorithm: naive, tree, native.
        """
        return self._run(verbs.gather(self, x, root, out, algorithm))

    def start_gather(self, x: Any, root: int = 0, *, out: Any = None, algorithm: str = "auto") -> Pending:
        """gather's twin."""
        return self._start(verbs.gather(self, x, root, out, algorithm))

    # -------------------------------------------------------------------------------------------- from all, to all

    def all_reduce(self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str = "auto") -> Any:
        """All ranks' arrays combined elementwise, the same bits on every rank.

        Args:    x: one shape and dtype on all ranks. op: sum, mean, max, min, prod (see calls/reduction.py).
                 out: may be x, which is then reduced in place, without a copy.
                 algorithm: naive, tree, ring, direct, pairwise, doubling, halving-doubling,
                 hierarchical, torus, native, shared.
        Raises:  DtypeError if op does not take the dtype (mean of integers).
        """
        return self._run(verbs.all_reduce(self, x, op, out, algorithm))

    def start_all_reduce(self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str = "auto") -> Pending:
        """all_reduce's twin."""
        return self._start(verbs.all_reduce(self, x, op, out, algorithm))

    def reduce_scatter(self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str = "auto") -> Any:
        """Chunk `rank` of what all_reduce would give, flattened and cut in `size` as numpy.array_split does: one dim.

        Args:    x: one shape and dtype on all ranks. op: sum, mean, max, min, prod. out: may be that chunk of x.
                 algorithm: naive, ring, pairwise, halving-doubling, hierarchical, torus, native, shared.
        Raises:  DtypeError if op does not take the dtype (mean of integers).
        """
        return self._run(verbs.reduce_scatter(self, x, op, out, algorithm))

    def start_reduce_scatter(self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str = "auto") -> Pending:
        """reduce_scatter's twin."""
        return self._start(verbs.reduce_scatter(self, x, op, out, algorithm))

    def all_gather(self, x: Any, *, out: Any = None, algorithm: str = "auto") -> Any:
        """All ranks' arrays one after the other along the first dim, on every rank.

        Args:    x: (m, ...), where m may differ between ranks; a number is one row. It may be its own part of `out`.
                 algorithm: naive, ring, halving-doubling, hierarchical, torus, native, shared.
        """
        return self._run(verbs.all_gather(self, x, out, algorithm))

    def start_all_gather(self, x: Any, *, out: Any = None, algorithm: str = "auto") -> Pending:
        """all_gather's twin."""
        return self._start(verbs.all_gather(self, x, out, algorithm))

    def all_to_all(self, x: Sequence[Any], *, out: Sequence[Any] | None = None, algorithm: str = "auto") -> list[Any]:
        """A list of `size` arrays: what rank 0, rank 1, ... had for this rank.

        Args:    x: one array for each rank, of one dtype and any shapes. out: `size` arrays of the shapes to come.
                 algorithm: naive, pairwise, bruck, native, shared.
        """
        return self._run(verbs.all_to_all(self, x, out, algorithm))

    def start_all_to_all(self, x: Sequence[Any], *, out: Sequence[Any] | None = None,
                         algorithm: str = "auto") -> Pending:
        """all_to_all's twin."""
        return self._start(verbs.all_to_all(self, x, out, algorithm))

    def barrier(self, *, algorithm: str = "auto") -> None:
        """Return when every rank of the group has called it. algorithm: naive, dissemination, native, shared."""
        self._run(verbs.barrier(self, algorithm))

    def start_barrier(self, *, algorithm: str = "auto") -> Pending:
        """barrier's twin."""
        return self._start(verbs.barrier(self, algorithm))

    # ----------------------------------------------------------------------------------------------- groups of groups

    def split(self, color: int | None, key: int | None = None, *, axis: str | None = None) -> "Group | None":
        """The group of those ranks that pass the same color, in the order of their keys (then of their ranks).

        Args:    color: an integer, or None to belong to no group; key: this rank's where None.
                 axis: what the group is for, under which its ledger counts; "world.split" where the parent is "world".
        Returns: the group, or None for color None. Overlapping and nested groups may be used at once.
        Cost:    one all_gather of four integers, counted under "control".
        """
        part = subgroups.of_color(self, self._splits + 1, color, key, axis)
        self._splits += 1
        return None if part is None else self._child(part)

    def without(self, gone: Iterable[int]) -> "Group":
        """The group of those that are left when the ranks `gone` are lost, in their order; each of them calls it alike.

        Sends nothing, for those who are gone would not answer.
        """
        return self._child(subgroups.left(self, gone))

    def _child(self, part: subgroups.Part) -> "Group":
        child = Group(self.transport, self.ledger, subgroups.chosen(self.world_ranks, part), axis=part.axis, id=part.id,
                      nodes=subgroups.chosen(self.nodes, part), places=part.places)
        self._children.append(child)
        return child

    def tell_step(self, step: int) -> None:
        """Say which training step this rank is in; what it raises when another rank is lost names it. Sends nothing."""
        self.transport.waits.step = step

    def expendable(self) -> None:
        """Let the job go on without this rank: should it end, waits for it raise PeerLostError, and no other does.

        Where the launcher is mpirun, it ends the job all the same. Sends nothing to other ranks.
        """
        if self.transport.waits.spare is not None:
            self.transport.waits.spare()

    def close(self) -> None:
        """Carry out what was started, in this group and those split from it, and end them; again, it does nothing.

        The world's waits for ranks that share this one's GPU to do the same, and gives that memory back
        (device_lane.py). Raises: the error of a started call that nobody waited for.
        """
        self.usage.close()
        for child in self._children:
            child.close()
        if self._worker is not None:
            worker, self._worker = self._worker, None
            worker.close()
        if self.transport.device is not None:
            self.transport.device.finish()
            if self.id == WORLD:
                self.transport.device.close()
        if self.board is not None:
            self.board.close()

    def next_sequence(self) -> int:
        """The number of the next collective call. Calls take theirs when they are made."""
        self.usage.check()
        self._sequence += 1
        return self._sequence

    def _run(self, call: Call) -> Any:
        """Carry the call out: here, if no started call is before it."""
        if self._worker is not None and self._worker.busy():
            return self._worker.submit(call).wait()
        with self.usage:
            return call.settle(call.run())

    def _start(self, call: Call) -> Pending:
        """Hand the call to the worker, which is made when it is first needed."""
        self.usage.check_alone()
        if self._worker is None:
            self._worker = Worker(f"rank {self.world_rank} {self.axis}", self.transport)
        return self._worker.submit(call)
