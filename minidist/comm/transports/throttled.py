"""Slow links: any transport, with each message delayed by α + n·β seconds, without use of the
processor.

    with delayed(world, alpha=50e-6, beta=8e-9) as slow:        # a gigabit network: 50 µs, 125 MB/s
        slow.all_reduce(x)

On one host a transfer keeps the processor busy, so two cores cannot show communication hidden
behind computation, nor the cost of an algorithm's steps on a network. With delayed links they can:
during the time of a transfer the thread sleeps.

Each rank has one port, as a machine has one network card: its messages leave one after the other,
n·β seconds each, and arrive α seconds after the last byte has left. A thread of the rank waits for
this time and then passes the message to the inner transport; receiving is not slowed.

notes: N4 §1.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from minidist.comm.group import Group
from minidist.comm.handle import Handle
from minidist.comm.subgroups import derived_id
from minidist.comm.transport import Accept, Likely, Reduce, Tag, Transport
from minidist.errors import CommError, ConfigError, PeerLostError, TimeoutError


@dataclass(eq=False)
class _Held(Handle):
    """A message that is to be passed on at time `due`."""

    port: "Delayed"
    peer: int
    tag: Tag
    view: np.ndarray
    meta: bytes
    due: float
    handed: threading.Event = field(default_factory=threading.Event)
    below: Handle | None = None  # the inner transport's handle, once passed on
    error: CommError | None = None

    def wait(self) -> None:
        if not self.handed.wait(self.port.limit):
            raise TimeoutError(
                f"rank {self.port.world_rank} waited {self.port.limit:g} s for its delayed link "
                f"to pass on {self.view.nbytes} bytes for rank {self.peer}; raise the limit or "
                "lower beta"
            )
        if self.error is not None:
            raise self.error
        if self.below is not None:
            self.below.wait()

    def done(self) -> bool:
        return self.handed.is_set() and (self.below is None or self.below.done())


class Delayed(Transport):
    """The transport `inner`, with its messages delayed by `alpha` seconds each and `beta` per byte,
    in order.

    Raises: ConfigError if one of them is negative or no number.
    """

    def __init__(self, inner: Transport, *, alpha: float, beta: float) -> None:
        for name, value in (("alpha", alpha), ("beta", beta)):
            if not 0 <= value < float("inf"):
                raise ConfigError(
                    f"delayed links: {name} is {value!r}; choose a number of seconds from 0 up"
                )
        self.inner = inner
        self.alpha = alpha
        self.beta = beta
        self.name = inner.name
        self.world_rank = inner.world_rank
        self.world_size = inner.world_size
        self.waits = inner.waits
        self._free_at = 0.0  # when the port has sent all it was given
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Held | None] = queue.SimpleQueue()
        self._receivers: list[int] = []  # of the messages that are held, in order
        self._ended = threading.Event()  # after an error, no message is delayed
        self._thread = threading.Thread(
            target=self._run, name=f"rank {self.world_rank} port", daemon=True
        )
        self._thread.start()
        self.waits.held.append(self._receivers.copy)
        self.waits.ends.append(self._drop)

    @property
    def limit(self) -> float:
        return self.inner.limit

    @limit.setter
    def limit(self, seconds: float) -> None:
        self.inner.limit = seconds

    def start_send(self, peer: int, tag: Tag, view: np.ndarray, meta: bytes = b"") -> Handle:
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + view.nbytes * self.beta
            held = _Held(self, peer, tag, view, meta, self._free_at + self.alpha)
            self._receivers.append(peer)
            self._queue.put(held)
        return held

    def start_recv(
        self,
        peer: int,
        tag: Tag,
        accept: Accept,
        reduce: Reduce | None = None,
        likely: Likely | None = None,
    ) -> Handle:
        return self.inner.start_recv(peer, tag, accept, reduce, likely)

    def loopback(self) -> Transport:
        return self.inner.loopback()

    def lose(self, error: PeerLostError) -> None:
        self.inner.lose(error)

    def close(self) -> None:
        """Pass on the messages still delayed, and end the port's thread; the inner transport stays
        open."""
        self._queue.put(None)
        self._thread.join()
        self.waits.held.remove(self._receivers.copy)
        self.waits.ends.remove(self._drop)

    def _drop(self, error: CommError) -> None:
        """Delay no message any longer: current and later messages raise `error`."""
        self._ended.set()

    def _run(self) -> None:
        """Pass on each message at its time; end when the port is closed and empty."""
        while (held := self._queue.get()) is not None:
            self._ended.wait(max(0.0, held.due - time.monotonic()))
            held.error = self.waits.error
            if held.error is None:
                try:
                    held.below = self.inner.start_send(held.peer, held.tag, held.view, held.meta)
                except CommError as error:  # the sender's wait() raises it
                    held.error = error
            self._receivers.pop(0)  # only now: at no moment is it neither held nor sent
            handed = held.handed
            del held  # else its array would live until the next message
            handed.set()


@contextlib.contextmanager
def delayed(group: Group, *, alpha: float, beta: float) -> Iterator[Group]:
    """Yield a group of the same ranks over delayed links; both groups may be used at once.

    All ranks of the group enter and leave together, as with `split`.
    """
    transport = Delayed(group.transport, alpha=alpha, beta=beta)
    slow = Group(
        transport,
        group.ledger,
        group.world_ranks,
        axis=f"{group.axis}.delayed",
        id=derived_id(group.id, "delayed"),
        nodes=group.nodes,
    )
    try:
        yield slow
        slow.close()
    finally:
        transport.close()
