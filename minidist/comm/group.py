"""A group: an ordered set of ranks that communicate; the verbs, each with `out=`, `algorithm=` and
a `start_…` twin.

    total = group.all_reduce(x)                    # a new array; x is unchanged
    group.all_reduce(x, out=x)                     # in place
    pending = group.start_all_reduce(x, out=x)     # returns at once; do not use x
    pending.wait()                                 # until here

Every rank of a group must make the same collective calls in the same order: each message carries
the call's signature, and ranks that disagree get MismatchError with both calls. Calls on one group
run one after the other: a `start_…` call in the group's worker thread; any other in the caller's
own thread, or behind the started calls in the worker, while some of these are unfinished. Make the
calls of one group from one thread; threads that communicate independently each need a group of
their own (`split`).

The class Group documents the arguments, results and errors of all verbs.

Cost of each algorithm, in messages and bytes: at its function in collectives/; as formulas in
cost/volume.py.
"""

from collections.abc import Iterable, Sequence
from typing import Any, overload

from minidist.comm import subgroups, verbs
from minidist.comm.call_site import entries
from minidist.comm.calls.async_call import CallWorker, Pending
from minidist.comm.calls.call import Call
from minidist.comm.calls.members import WORLD, Members
from minidist.comm.ledger import Ledger
from minidist.comm.point_to_point import PointToPoint
from minidist.comm.transport import Transport

__all__ = ["Group", "Pending"]


@entries
class Group(Members):
    """An ordered set of ranks of the job that contains this rank, with the verbs; for its
    attributes see Members.

    Args of all verbs: x and out are arrays of NumPy or CuPy of any dtype but object, contiguous or
    not, x read-only or not, empty or without dims; numbers and nested lists count as arrays. Both
    may be arrays of another library that exports DLPack, such as PyTorch's tensors, on the host or
    (with CuPy) on a GPU: their memory is used in place, and such an `out` must be contiguous. `out`
    has the shape and dtype of the result. `algorithm` is "auto" or one of the names listed. `root`,
    `dst` and `src` are ranks in the group.

    Returns of all verbs: `out` itself, or without it a new array of NumPy or CuPy: on the device of
    the rank's own argument, without dims where the argument was a number (`float(result)` makes a
    number of it). A `start_…` twin returns a Pending at once.

    Raises of all verbs: ConfigError (no such algorithm, op or rank: the message lists the valid
    ones), ShapeError and DtypeError (this rank's own arguments do not fit), and a CommError:
        MismatchError   ranks made different calls, or an arriving array does not fit `out`
        DeadlockError   ranks wait for each other in a circle
        PeerLostError   a rank died; LinkLostError: the link to it broke
        TimeoutError    a wait reached `group.transport.limit` seconds
        CommError       the group is closed, two threads use it at once, or a forked child of the
                        rank uses it
    A collective that ends in a CommError ends its group: later calls raise the same error, and so
    do the calls that were started before it.
    """

    def __init__(
        self,
        transport: Transport,
        ledger: Ledger,
        world_ranks: Sequence[int],
        *,
        axis: str = "world",
        id: int = WORLD,
        nodes: Sequence[int] | None = None,
        places: Sequence[int] | None = None,
    ) -> None:
        super().__init__(
            transport, ledger, world_ranks, axis=axis, id=id, nodes=nodes, places=places
        )
        self._messages = PointToPoint(self)
        self._worker: CallWorker | None = None
        self._splits = 0
        # the open child groups, also those that the program has dropped: close() here waits for
        # their started calls. close() of a child removes it
        self._children: list[Group] = []
        self._parent: Group | None = None

    def __repr__(self) -> str:
        return (
            f"Group({self.axis}: rank {self.rank} of {self.size}, world ranks {self.world_ranks})"
        )

    # ------------------------------------------------------------------------------- point to point

    def send(self, x: Any, dst: int) -> None:
        """Send an array to rank `dst`; return when `x` may change again. A rank may send to itself.

        Args:    x (...): of any shape and dtype but object. dst: a rank in the group.
        Raises:  ConfigError, ShapeError, DtypeError, CommError: as all verbs (see Group).
        Cost:    one message of x.nbytes; none if dst is this rank.
        """
        self.start_send(x, dst).wait()

    def start_send(self, x: Any, dst: int) -> Pending:
        """Start send. Returns: a Pending; after its wait() x may change. Any number of messages may
        be in progress.

        Args, Raises: as send; errors that this rank cannot detect yet are raised by wait().
        """
        return self._messages.send(x, self.rank_in("dst", dst))

    def recv(self, src: int, *, out: Any = None) -> Any:
        """Receive the next array from rank `src`; its shape and dtype arrive with it.

        Args:    src: a rank in the group. out: of the arriving shape and dtype (default: a new
                 array).
        Returns: (...), as sent.
        Raises:  ConfigError, ShapeError, DtypeError, CommError: as all verbs (see Group).
        """
        return self.start_recv(src, out=out).wait()

    def start_recv(self, src: int, *, out: Any = None) -> Pending:
        """Start recv. Returns: a Pending; its wait() returns recv's result.

        Args, Raises: as recv; errors that this rank cannot detect yet are raised by wait().
        """
        return self._messages.recv(self.rank_in("src", src), out)

    def exchange(self, x: Any, dst: int, src: int, *, out: Any = None) -> Any:
        """Send `x` to `dst` and receive from `src` at once, so the order of the two cannot
        deadlock.

        Args:    x (...): to send, to rank dst. src: the rank to receive from.
                 out: of the arriving shape and dtype; may be x.
        Returns: (...), the array received.
        Raises:  ConfigError, ShapeError, DtypeError, CommError: as all verbs (see Group).
        Cost:    one message of x.nbytes. The other ranks may call send and recv, or exchange.
        """
        return self.start_exchange(x, dst, src, out=out).wait()

    def start_exchange(self, x: Any, dst: int, src: int, *, out: Any = None) -> Pending:
        """Start exchange. Returns: a Pending; its wait() returns exchange's result.

        Args, Raises: as exchange; errors that this rank cannot detect yet are raised by wait().
        """
        return self._messages.exchange(x, self.rank_in("dst", dst), self.rank_in("src", src), out)

    # -------------------------------------------------------------------------------- from one root

    def broadcast(
        self, x: Any = None, root: int = 0, *, out: Any = None, algorithm: str = "auto"
    ) -> Any:
        """Copy the root's array to every rank.

        Args:    x (...): at the root; elsewhere None, or anything of the root's shape and dtype.
                 root: its rank. out: of x's shape and dtype.
                 algorithm: naive, tree, ring, hierarchical, native, shared.
        Returns: (...), the root's shape and dtype.
        Raises:  ConfigError, ShapeError, DtypeError, CommError: as all verbs (see Group).
        """
        return self._run(verbs.from_root(self, "broadcast", x, root, out, algorithm))

    def start_broadcast(
        self, x: Any = None, root: int = 0, *, out: Any = None, algorithm: str = "auto"
    ) -> Pending:
        """Start broadcast. Returns: a Pending; its wait() returns broadcast's result.

        Args, Raises: as broadcast; errors that this rank cannot detect yet are raised by wait().
        """
        return self._start(verbs.from_root(self, "broadcast", x, root, out, algorithm))

    def scatter(
        self, x: Any = None, root: int = 0, *, out: Any = None, algorithm: str = "auto"
    ) -> Any:
        """Cut the root's array along the first dim, as numpy.array_split does, and send part r to
        rank r.

        Args:    x: (n, ...) at the root; elsewhere None, or anything of the root's shape and dtype.
                 root: its rank. out: of the part's shape and dtype. algorithm: naive, tree, native.
        Returns: part `rank`, (ceil(n/P) or floor(n/P), ...), x's dtype.
        Raises:  ConfigError, ShapeError, DtypeError, CommError: as all verbs (see Group).
        """
        return self._run(verbs.from_root(self, "scatter", x, root, out, algorithm))

    def start_scatter(
        self, x: Any = None, root: int = 0, *, out: Any = None, algorithm: str = "auto"
    ) -> Pending:
        """Start scatter. Returns: a Pending; its wait() returns scatter's result.

        Args, Raises: as scatter; errors that this rank cannot detect yet are raised by wait().
        """
        return self._start(verbs.from_root(self, "scatter", x, root, out, algorithm))

    # ---------------------------------------------------------------------------------- to one root

    def reduce(
        self, x: Any, op: str = "sum", root: int = 0, *, out: Any = None, algorithm: str = "auto"
    ) -> Any:
        """Combine all ranks' arrays elementwise at the root; None elsewhere (`out` is ignored).

        Args:    x (...): one shape and dtype on all ranks. op: sum, mean, max, min, prod (see
                 calls/reduction.py).
                 root: its rank. out: as x. algorithm: naive, tree, hierarchical, native.
        Returns: (...), as x, at the root; None elsewhere.
        Raises:  DtypeError if op does not take the dtype (mean of integers); else as all verbs (see
                 Group).
        """
        return self._run(
            verbs.reduced(self, "reduce", x, op, out, algorithm, self.rank_in("root", root))
        )

    def start_reduce(
        self, x: Any, op: str = "sum", root: int = 0, *, out: Any = None, algorithm: str = "auto"
    ) -> Pending:
        """Start reduce. Returns: a Pending; its wait() returns reduce's result.

        Args, Raises: as reduce; errors that this rank cannot detect yet are raised by wait().
        """
        return self._start(
            verbs.reduced(self, "reduce", x, op, out, algorithm, self.rank_in("root", root))
        )

    def gather(self, x: Any, root: int = 0, *, out: Any = None, algorithm: str = "auto") -> Any:
        """Join all ranks' arrays along the first dim, at the root; None elsewhere (`out` is
        ignored).

        Args:    x: (m, ...), where m may differ between ranks; a number is one row.
                 root: its rank. out: of the result's shape and dtype. algorithm: naive, tree,
                 native.
        Returns: (sum of all m, ...), x's dtype, at the root; None elsewhere.
        Raises:  ConfigError, ShapeError, DtypeError, CommError: as all verbs (see Group).
        """
        return self._run(
            verbs.gathered(self, "gather", x, out, algorithm, self.rank_in("root", root))
        )

    def start_gather(
        self, x: Any, root: int = 0, *, out: Any = None, algorithm: str = "auto"
    ) -> Pending:
        """Start gather. Returns: a Pending; its wait() returns gather's result.

        Args, Raises: as gather; errors that this rank cannot detect yet are raised by wait().
        """
        return self._start(
            verbs.gathered(self, "gather", x, out, algorithm, self.rank_in("root", root))
        )

    # ----------------------------------------------------------------------------- from all, to all

    def all_reduce(
        self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str = "auto"
    ) -> Any:
        """Combine all ranks' arrays elementwise; the result has the same bits on every rank.

        Args:    x (...): one shape and dtype on all ranks. op: sum, mean, max, min, prod (see
                 calls/reduction.py).
                 out: may be x, which is then reduced in place, without a copy.
                 algorithm: naive, tree, ring, direct, pairwise, doubling, halving-doubling,
                 hierarchical, torus, torus-both, native, shared.
        Returns: (...), as x.
        Raises:  DtypeError if op does not take the dtype (mean of integers); else as all verbs (see
                 Group).
        """
        return self._run(verbs.reduced(self, "all_reduce", x, op, out, algorithm))

    def start_all_reduce(
        self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str = "auto"
    ) -> Pending:
        """Start all_reduce. Returns: a Pending; its wait() returns all_reduce's result.

        Args, Raises: as all_reduce; errors that this rank cannot detect yet are raised by wait().
        """
        return self._start(verbs.reduced(self, "all_reduce", x, op, out, algorithm))

    def reduce_scatter(
        self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str = "auto"
    ) -> Any:
        """Return chunk `rank` of all_reduce's result, flattened to one dim and cut into `size`
        chunks as numpy.array_split does.

        Args:    x (...) of n elements: one shape and dtype on all ranks. op: sum, mean, max, min,
                 prod.
                 out: may be that chunk of x.
                 algorithm: naive, ring, pairwise, halving-doubling, hierarchical, torus, native,
                 shared.
        Returns: (ceil(n/P) or floor(n/P),), x's dtype.
        Raises:  DtypeError if op does not take the dtype (mean of integers); else as all verbs (see
                 Group).
        """
        return self._run(verbs.reduce_scatter(self, x, op, out, algorithm))

    def start_reduce_scatter(
        self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str = "auto"
    ) -> Pending:
        """Start reduce_scatter. Returns: a Pending; its wait() returns reduce_scatter's result.

        Args, Raises: as reduce_scatter; errors that this rank cannot detect yet are raised by
        wait().
        """
        return self._start(verbs.reduce_scatter(self, x, op, out, algorithm))

    def all_gather(self, x: Any, *, out: Any = None, algorithm: str = "auto") -> Any:
        """Join all ranks' arrays along the first dim, on every rank.

        Args:    x: (m, ...), where m may differ between ranks; a number is one row. It may be its
                 own part of `out`.
                 out: of the result's shape and dtype.
                 algorithm: naive, ring, halving-doubling, hierarchical, torus, native, shared.
        Returns: (sum of all m, ...), x's dtype.
        Raises:  ConfigError, ShapeError, DtypeError, CommError: as all verbs (see Group).
        """
        return self._run(verbs.gathered(self, "all_gather", x, out, algorithm))

    def start_all_gather(self, x: Any, *, out: Any = None, algorithm: str = "auto") -> Pending:
        """Start all_gather. Returns: a Pending; its wait() returns all_gather's result.

        Args, Raises: as all_gather; errors that this rank cannot detect yet are raised by wait().
        """
        return self._start(verbs.gathered(self, "all_gather", x, out, algorithm))

    def all_to_all(
        self, x: Sequence[Any], *, out: Sequence[Any] | None = None, algorithm: str = "auto"
    ) -> list[Any]:
        """Send an array from every rank to every rank.

        Args:    x: one array for each rank, of one dtype and any shapes. out: `size` arrays of the
                 arriving shapes.
                 algorithm: naive, pairwise, bruck, native, shared.
        Returns: a list of `size` arrays: from rank 0, from rank 1, ...
        Raises:  ConfigError, ShapeError, DtypeError, CommError: as all verbs (see Group).
        """
        return list(self._run(verbs.all_to_all(self, x, out, algorithm)))

    def start_all_to_all(
        self, x: Sequence[Any], *, out: Sequence[Any] | None = None, algorithm: str = "auto"
    ) -> Pending:
        """Start all_to_all. Returns: a Pending; its wait() returns all_to_all's result.

        Args, Raises: as all_to_all; errors that this rank cannot detect yet are raised by wait().
        """
        return self._start(verbs.all_to_all(self, x, out, algorithm))

    def barrier(self, *, algorithm: str = "auto") -> None:
        """Return when every rank of the group has called it.

        Args:    algorithm: naive, dissemination, native, shared.
        Raises:  ConfigError, CommError: as all verbs (see Group).
        """
        self._run(verbs.barrier(self, algorithm))

    def start_barrier(self, *, algorithm: str = "auto") -> Pending:
        """Start barrier. Returns: a Pending; its wait() returns barrier's result.

        Args, Raises: as barrier; errors that this rank cannot detect yet are raised by wait().
        """
        return self._start(verbs.barrier(self, algorithm))

    # ----------------------------------------------------------------------------- groups of groups

    @overload
    def split(self, color: int, key: int | None = None, *, axis: str | None = None) -> "Group": ...

    @overload
    def split(
        self, color: int | None, key: int | None = None, *, axis: str | None = None
    ) -> "Group | None": ...

    def split(
        self, color: int | None, key: int | None = None, *, axis: str | None = None
    ) -> "Group | None":
        """Make a group of the ranks that pass the same color, in the order of their keys (then of
        their ranks).

        Args:    color: an integer, or None to belong to no group; key: place in the order (None:
                 this rank's number).
                 axis: the purpose of the group: the ledger counts its messages under this name;
                 "world.split" where the parent is "world".
        Returns: the Group, or None for color None. Overlapping and nested groups may be used at the
        same time.
        Raises:  ConfigError for a color or key that is no integer of 64 bits, or an axis that is no
                 name; CommError as all verbs (see Group).
        Cost:    one all_gather of four integers, counted under "control".
        """
        row = subgroups.row(self, color, key, axis)
        with self.ledger.control():
            table = self.all_gather(row)
        self._splits += 1
        return (
            None
            if color is None
            else self._child(*subgroups.of_color(self, self._splits, color, table, axis))
        )

    def without(self, gone: Iterable[int]) -> "Group":
        """Make a group of the ranks that remain when the ranks `gone` are lost, in their order.

        Each remaining rank calls it with the same `gone`. It sends nothing: lost ranks would not
        answer.

        Args:    gone: ranks in this group.
        Returns: a group of the same axis; this one stays open.
        Raises:  ConfigError for a rank that the group does not have, or if this rank is gone.
        """
        return self._child(*subgroups.without(self, gone))

    def _child(self, id: int, axis: str, ranks: list[int], places: list[int]) -> "Group":
        child = Group(
            self.transport,
            self.ledger,
            [self.world_ranks[rank] for rank in ranks],
            axis=axis,
            id=id,
            nodes=[self.nodes[rank] for rank in ranks],
            places=places,
        )
        self._children.append(child)
        child._parent = self
        return child

    def tell_step(self, step: int) -> None:
        """Record this rank's training step; an error about a lost rank then names the step. Sends
        nothing.

        Args:    step: its number, from 0.
        """
        self.transport.waits.step = step
        self.ledger.flight.start_step(step)

    def expendable(self) -> None:
        """Let the job continue without this rank: if it ends, only waits for it raise
        PeerLostError; not under mpirun.

        Raises:  PeerLostError if this rank's connection to the job's monitor is closed.
        """
        self.transport.waits.spare()

    def close(self) -> None:
        """Carry out the started calls of this group and of groups split from it, then close them; a
        second call does nothing.

        The world group waits until the ranks that share this rank's GPU close, too.

        Raises:  the error of a started call whose wait() was never called.
        """
        self.guard.close()
        if self._parent is not None:
            self._parent._children.remove(self)
            self._parent = None
        for child in list(self._children):
            child.close()
        self._messages.close()
        if self.id == WORLD and self.guard.failure is None:
            self.ledger.flight.end()
        if self._worker is not None:
            worker = self._worker
            self._worker = None
            worker.close()
        if self.transport.device is not None:
            self.transport.device.finish()
            if self.id == WORLD:
                self.transport.device.close()
        if self.board is not None:
            self.board.close()

    def _run(self, call: Call) -> Any:
        """Run the call's algorithm, call.work (verbs.py has chosen it): in this thread, if no
        earlier call is still in the worker."""
        if self._worker is not None and self._worker.busy():
            return self._worker.submit(call).wait()
        with self.guard, call:
            return call.settle(call.deliver(call.work(call), call.device))

    def _start(self, call: Call) -> Pending:
        """Hand the call to the worker, which is created at its first use."""
        self.guard.check_alone()
        if self._worker is None:
            self._worker = CallWorker(f"rank {self.world_rank} {self.axis}", self.transport)
        return self._worker.submit(call)
