"""Calls in progress: the handle that a `start_…` verb returns, and the worker that carries out a
group's calls in order."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from minidist.comm.call_site import entries
from minidist.comm.calls.call import Call
from minidist.comm.device_lane import program
from minidist.comm.handle import Handle
from minidist.comm.health.failure import words
from minidist.comm.health.wait_state import QUIET, RunningCall
from minidist.comm.signature import Signature
from minidist.comm.transport import Transport
from minidist.device import account
from minidist.errors import CommError

# seconds without a call after which the worker's thread ends; the next call starts another
_IDLE = 0.5
_LOOK = 1.0  # seconds between checks that the worker still lives


@entries
class Pending(ABC):
    """A started call. Until wait() has returned, do not change its argument or read `out`."""

    @abstractmethod
    def wait(self) -> Any:
        """Wait until the call has ended. May be called again, and from any thread.

        Returns: the call's result; a send's and a barrier's is None.
        Raises:  what the call raised.
        """

    @abstractmethod
    def done(self) -> bool:
        """Check without waiting. Returns: whether wait() would return or raise at once."""


@entries
class PendingCall(Pending, RunningCall):
    """A collective in a worker's queue; on a GPU the worker uses the stream of the thread that
    started it."""

    def __init__(self, call: Call, worker: "CallWorker") -> None:
        self.call = call
        self.worker = worker
        self.program = program()
        self.signature = call.signature
        self.world_ranks = call.world_ranks
        self.finished = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def wait(self) -> Any:
        ledger = self.call.ledger
        # a wait for a call that has ended is reported only to subscribers of waits
        reported = not self.finished.is_set() or bool(ledger.watchers)
        start = time.perf_counter() if reported else 0.0
        try:
            with self:
                if not self.finished.wait(QUIET):
                    with self.worker.transport.waits.lasting("this rank's worker", tuple):
                        # each wait inside the call, in the worker, has a limit
                        while not self.finished.wait(_LOOK):
                            if not self.worker.alive():
                                raise CommError(
                                    f"the group was closed before {self.signature.describe()} was "
                                    "carried out"
                                )
                if self.error is not None:
                    self.worker.told = True  # the program has received it
                    raise self.error
                return self.call.settle(self.result)
        finally:
            if reported:
                for observer in ledger.observers:
                    observer.on_wait(self.call, start)

    def done(self) -> bool:
        return self.finished.is_set()

    def ended_within(self, seconds: float) -> bool:
        """Return whether the call ends within `seconds`. Observers and the monitor are not informed
        of this wait."""
        return self.finished.wait(seconds)


@entries
class PendingMessage(Pending, RunningCall):
    """A send, a receive, or both, already started in the transport; wait() drives them in the
    calling thread."""

    def __init__(
        self,
        signature: Signature,
        world_ranks: tuple[int, ...],
        handles: list[Handle],
        deliver: Callable[[], Any],
        over: Callable[[bool, float], None],
    ) -> None:
        """`over(failed, seconds of the wait)` is called when wait() has the result."""
        self.signature = signature
        self.world_ranks = world_ranks
        self.handles = handles
        self.deliver = deliver
        self.over = over
        self.result: Any = None
        self.delivered = False

    def wait(self) -> Any:
        if not self.delivered:
            start = time.perf_counter()
            with self:
                try:
                    for handle in self.handles:
                        handle.wait()
                    self.result = self.deliver()
                    self.delivered = True
                finally:
                    self.over(not self.delivered, time.perf_counter() - start)
        return self.result

    def done(self) -> bool:
        return all(handle.done() for handle in self.handles)


class CallWorker:
    """The thread that carries out a group's started calls, one after the other, in the order of
    their start.

    It uses the memory account of the thread that made it. An error is raised by the call's wait(),
    and aborts the transport, so that the rank's next wait of any kind raises it; the calls after it
    in the queue end with the same error.
    """

    def __init__(self, name: str, transport: Transport) -> None:
        self.unfinished = 0
        self.error: BaseException | None = None  # of the first call that failed
        self.told = False  # a wait() has raised it
        self.transport = transport
        self._account = account.current()
        self._queue: SimpleQueue[PendingCall | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._name = name
        self._thread: threading.Thread | None = None

    def submit(self, call: Call) -> PendingCall:
        """Put a call at the end of the queue."""
        pending = PendingCall(call, self)
        call.started = True
        call.queued()
        with self._lock:
            self.unfinished += 1
            self._queue.put(pending)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self.transport.waits.workers.add(self._thread.ident)
        return pending

    def busy(self) -> bool:
        """Return whether a call is queued or in progress: a later call must then be queued."""
        with self._lock:
            return self.unfinished > 0

    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Carry out the queued calls, then end the thread. Raises: the error of a call whose wait()
        was never called."""
        self._queue.put(None)
        with self._lock:  # another thread may be starting it
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        if self.error is not None and not self.told:
            raise self.error

    def _run(self) -> None:
        with account.use(self._account):
            while (pending := self._next()) is not None:
                finished = pending.finished
                self._carry_out(pending)
                del pending  # before wait() returns: then only its caller keeps the arrays
                with self._lock:  # change both at once: not busy if and only if all are finished
                    self.unfinished -= 1
                    if not self.unfinished:
                        self.transport.waits.workers.discard(threading.get_ident())
                    finished.set()

    def _next(self) -> PendingCall | None:
        """Return the next call, or None to end the thread: after close(), or after _IDLE s without
        a call."""
        while True:
            with suppress(Empty):
                return self._queue.get(timeout=_IDLE)
            with self._lock:
                if self._queue.empty():
                    self._thread = None
                    return None

    def _carry_out(self, pending: PendingCall) -> None:
        """Run the call's algorithm, call.work (verbs.py has chosen it); keep its result or error
        for wait()."""
        call = pending.call
        try:
            with pending.program, call:
                pending.result = call.deliver(call.work(call), call.device)
        except BaseException as error:  # raised by wait()
            pending.error, self.error = error, self.error or error
            self.transport.abort(
                error
                if isinstance(error, CommError)
                else CommError(
                    f"{call.signature.describe()} failed: {type(error).__name__}: {words(error)}"
                )
            )
