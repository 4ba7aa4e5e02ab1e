"""The progress engine: of the threads that wait, one leads and drives all transfers; the others
follow.

    thread A     wait() -> leads:  pass  pass  spin  sleep  pass   its transfer is complete: steps down
    thread B         wait() -> follows: asleep on a condition ...........................  -> leads, or is done
    no wait      the helper thread takes a pass now and then, so that started transfers still move

A pass moves the bytes that can be moved without blocking (stream.py). One thread at a time leads.
So the receiving side of a link needs no lock, and waiting for one transfer drives every other one
too: `start_send; start_recv; wait both` cannot deadlock. A leader with nothing to move yields its
core `spins` times (a reply often arrives within microseconds), then sleeps in the kernel until a
link is ready, another thread starts a transfer, or a thread calls abort(). Where there are fewer
cores than ranks it yields once before its first look, too.
"""

import math
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable

from minidist.comm.handle import Handle
from minidist.comm.health.wait_state import QUIET
from minidist.comm.transport import Tag, Transport
from minidist.comm.transports.progress.mailbox import loopback
from minidist.device.cores import of_all_ranks
from minidist.errors import CommError, LinkLostError, PeerLostError, TimeoutError

# seconds between the helper's passes: while bytes move, while none do
_QUICK = 0.0002
_SLOW = 0.005
_HEARSAY = 2.0  # maximum seconds to wait for the reason of a lost peer; usually milliseconds
_LOOK = 0.005  # seconds between two checks for it
_ASK = 0.2  # seconds between questions whether the peer has left
LEFT = "it has left the job (its transport was closed)"
_HEARS = 1.0  # maximum seconds of one sleep; see Engine

yield_core = getattr(os, "sched_yield", lambda: time.sleep(0))


def _nap(deadline: float) -> float:
    """Return the seconds of the next sleep."""
    return min(_HEARS, max(0.0, deadline - time.monotonic()))


class Operation(Handle):
    """A transfer in progress; str() describes what it waits for. Engine.finish writes `error` and
    `finished` once. A subclass sets engine, peer and tag."""

    engine: "Engine"
    peer: int
    tag: Tag
    incoming = False  # whether it is a message from the peer
    finished = False
    error: Exception | None = None

    def wait(self) -> None:
        if not self.finished:
            self.engine.drive(self)
        if self.error is not None:
            raise self.engine.explained(self.error, str(self))

    def done(self) -> bool:
        return self.finished or self.engine.waits.error is not None

    def peers(self) -> tuple[int, ...]:
        """Return the world ranks for which it waits; each of them can delay it."""
        return () if self.finished else (self.peer,)

    def in_vain(self) -> str:
        """Return its text for the TimeoutError."""
        return f"for {self}; did rank {self.peer} make the matching call?"


class Engine(Transport):
    """A transport whose waiting threads do the work. No thread holds `lock` during a sleep, or in
    accept or reduce.

    A thread sleeps at most _HEARS seconds at a time. Python runs a signal handler in the main
    thread, between two of its lines; a signal that arrives just before the sleep begins, or in
    another thread, does not end the sleep.
    """

    def __init__(
        self, name: str, world_rank: int, world_size: int, limit: float, spins: int
    ) -> None:
        self.name = name
        self.world_rank = world_rank
        self.world_size = world_size
        self.limit = limit
        self.lock = threading.Lock()
        self.lost: dict[int, PeerLostError] = {}  # peers without which the job continues
        self.spins = spins
        self._crowded = world_size > of_all_ranks()
        self._turn = threading.Condition(self.lock)
        self._leading = self._asleep = False  # a thread leads; it sleeps, or is about to
        self._news = False  # a transfer that the leader's last pass may not have seen
        self._led = 0  # number of times a thread has waited, or passed
        self._followers = 0
        self.unfinished = 0  # transfers started and not finished; under the lock
        self._closing = self._helper_awake = False
        self._helper_call = threading.Event()
        self._helper = threading.Thread(
            target=self._help, name=f"{name} helper of rank {world_rank}", daemon=True
        )
        self._helper.start()

    # --- what a transport supplies
    # -----------------------------------------------------------------------------------

    @abstractmethod
    def _pass(self) -> bool:
        """Move the bytes that can be moved without blocking; return whether any moved. Called by
        the leader, without the lock."""

    @abstractmethod
    def _sleep(self, seconds: float) -> None:
        """Sleep until a pass may find something to move, _wake() is called, or `seconds` are
        over."""

    @abstractmethod
    def _wake(self) -> None:
        """End the leader's current sleep, or else its next. From any thread."""

    # --- waiting
    # -----------------------------------------------------------------------------------------------------

    def drive(self, operation: Operation) -> None:
        """Return when `operation` is finished; lead while no other thread does. Report a long wait
        (wait_state.py).

        Raises: TimeoutError after `limit` seconds; the error given to abort().
        """
        start = time.monotonic()
        limit = self.limit
        if not self._drive_until(operation, start + min(QUIET, limit)):
            with self.waits.lasting(str(operation), operation.peers, incoming=operation.incoming):
                if self._drive_until(operation, start + limit):
                    return
                state = self.waits.state()
            raise TimeoutError(
                f"rank {self.world_rank} waited {self.limit:g} s {operation.in_vain()}"
                f"{self.waits.described(state)}"
            )

    def _drive_until(self, operation: Operation, deadline: float) -> bool:
        """Drive until the deadline; return whether `operation` finished. Raises the error given to
        abort()."""
        while not operation.finished:
            if self._step_up():
                try:
                    self._lead(operation, deadline)
                finally:
                    self._step_down()
            else:
                self._follow(operation, deadline)
            if operation.finished:
                break
            if self.waits.error is not None:
                raise self.explained(self.waits.error, str(operation))
            if time.monotonic() >= deadline:
                return False
        return True

    def _step_up(self) -> bool:
        """Lead, unless another thread does; return whether this thread leads now."""
        with self.lock:
            leads = not self._leading
            self._leading = True
            self._led += 1
            return leads

    def _step_down(self) -> None:
        """Stop leading: wake the followers; without followers call the helper if transfers are
        left."""
        with self.lock:
            self._leading = False
            if self._followers:
                self._turn.notify_all()
            elif self.unfinished and not self._helper_awake:
                self._call_helper()

    def _lead(self, operation: Operation, deadline: float) -> None:
        idle = 0
        if self._crowded:
            yield_core()  # to a peer on this core, whose message cannot be there yet
        while not operation.finished:
            self._news = False
            moved = self._pass()
            if operation.finished or self.waits.error is not None or time.monotonic() >= deadline:
                return  # after a pass, so that bytes that arrived during the sleep still count
            if moved:
                idle = 0
            elif idle < self.spins:
                idle += 1
                yield_core()
            else:
                with self.lock:
                    # from now on, a transfer that starts or ends calls _wake(); the message of one
                    # that started before may lie in a link's buffer, which no sleep looks at
                    self._asleep = not (operation.finished or self._news)
                if self._asleep:
                    self._sleep(_nap(deadline))
                    self._asleep = False

    def _follow(self, operation: Operation, deadline: float) -> None:
        with self.lock:
            if self._leading and not operation.finished:
                self._followers += 1
                self._turn.wait(_nap(deadline))
                self._followers -= 1

    def explained(self, error: Exception, what: str) -> Exception:
        """Return the error to raise: for a lost peer the monitor's error, which arrives a moment
        later and gives the reason.

        A peer that left may cause a deadlock, which the arbiter reports: so this wait is reported,
        except after a broken link, which causes none. A link also breaks if this rank continues to
        send to a peer that has left: the monitor knows which of the two happened.
        """
        if not isinstance(error, PeerLostError):
            return error
        lost = error.world_rank
        if (
            isinstance(error, LinkLostError)
            and lost is not None
            and self._await_reason(lost, self.waits.left)
        ):
            error = PeerLostError(f"rank {self.world_rank} lost rank {lost}: {LEFT}", lost)
        if isinstance(error, LinkLostError):
            error = LinkLostError(
                f"{error}; neither rank has died: the link between rank {self.world_rank} and rank "
                f"{lost} is lost; look at the network between them",
                lost,
            )
        elif lost is not None and self.waits.error is None:
            with self.waits.lasting(what, lambda: (lost,)):
                self._await_reason(lost)
        error = self.waits.error or self.lost.get(self.world_rank if lost is None else lost, error)
        return (
            self.waits.located(error, self.world_rank)
            if isinstance(error, PeerLostError)
            else error
        )

    def _await_reason(self, lost: int, left: Callable[[int], bool] = lambda rank: False) -> bool:
        """Wait until the reason of a peer's loss is known, or _HEARSAY s; True as soon as
        `left(rank)` is true."""
        asked = -math.inf
        deadline = time.monotonic() + (
            _HEARSAY if self.waits.hearsay is None else self.waits.hearsay
        )
        while (
            self.waits.error is None
            and lost not in self.lost
            and (now := time.monotonic()) < deadline
        ):
            if now - asked > _ASK:
                asked = now
                if left(lost):
                    return True
            time.sleep(_LOOK)
        return False

    # --- the life of an operation: under the lock
    # --------------------------------------------------------------------

    def finish(self, operation: Operation, error: Exception | None = None) -> None:
        """Mark a transfer, counted in `unfinished`, as complete, or as failed with `error`; wake the
        followers."""
        operation.error = error
        operation.finished = True
        self.unfinished -= 1
        if self._asleep:  # another thread leads, and may be waiting for just this
            self._wake()
        if self._followers:
            self._turn.notify_all()

    # --- the helper
    # --------------------------------------------------------------------------------------------------

    def _call_helper(self) -> None:
        self._helper_awake = True
        self._helper_call.set()

    def _help(self) -> None:
        """Take a pass now and then while no thread waits; sleep while there is nothing to move, or
        a thread leads."""
        pause = _SLOW
        led = self._led
        while not self._closing:
            time.sleep(pause)
            with self.lock:
                self._helper_awake = (
                    self.unfinished > 0 and not self._leading and self.waits.error is None
                )
            if self._helper_awake:
                moved = self._led == led and self._step_up() and self._pass_until_still()
                pause = _QUICK if moved else min(2 * pause, _SLOW)
            else:
                self._helper_call.wait()
                self._helper_call.clear()
            led = self._led

    def _pass_until_still(self) -> bool:
        moved = False
        try:
            while self.waits.error is None and self._pass():
                moved = True
        finally:
            self._step_down()
        return moved

    def loopback(self) -> Transport:
        return loopback(self.world_rank, self.limit, self.waits)

    # --- ending
    # ------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the helper, and every wait with a CommError; afterwards no thread works here."""
        self._closing = True
        self.abort(CommError(f"rank {self.world_rank} has closed its {self.name} transport"))
        self._helper_call.set()
        self._helper.join()
        with self.lock:
            self._followers += 1
            self._turn.wait_for(lambda: not self._leading, timeout=1.0)
            self._followers -= 1
        if self.device is not None:
            self.device.close()
