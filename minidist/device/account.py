"""The memory account: bytes of live arrays by category, now and at the peak.

An account sums the *distinct* buffers that are registered by `hold`. A view counts as its owner,
and a buffer once, under its first category. A weak reference ends the count when the buffer is
freed. Registering costs a microsecond.

    memory = account.current()                       # of the calling thread: each rank has its own
    memory.hold(weights, "parameters")
    memory.now["parameters"], memory.peak["total"]   # bytes; the total's peak is the peak of the
    sum
    memory.limit = 64 << 20       # from now on an array that does not fit raises MemoryLimitError

The account holds a rank's own arrays, also those that a transport packs or receives into. It does
not hold the memory between processes (socket buffers, buffers of MPI, shared memory, which
Transport.shared_bytes counts). So a limit means the same for every transport.
notes:   N2 显存占用分析, N4 §4
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from minidist.device.backend import Array, is_array
from minidist.errors import ConfigError, MemoryLimitError

SomeArray = TypeVar("SomeArray")
CATEGORIES = (
    "parameters",
    "gradients",
    "residuals",
    "optimizer",
    "activations",
    "communication",
    "workspace",
)


def owner_of(array: Array) -> Array:
    """Return the array that owns `array`'s buffer: the end of its chain of `.base` (NumPy and
    CuPy)."""
    base = array.base
    while base is not None and is_array(base):
        array = base
        base = base.base
    return array


class _CountedBuffer(weakref.ref[Any]):
    """A weak reference to a counted buffer. It makes `hold` a tenth cheaper than a reference and a
    callback with a key."""

    __slots__ = ("key", "category", "nbytes")
    key: int
    category: str
    nbytes: int


class MemoryAccount:
    """Bytes of the distinct live buffers that were registered, by category. Safe to use from
    several threads.

    Args:    limit: the most bytes of all categories together; whose: the memory's name in errors,
             `instead` the remedy.
    Attributes: follower: called with the live bytes by category whenever a buffer is counted. It
                must be quick, because other threads wait for it, and must keep no reference to
                them. None: no follower.
    """

    def __init__(self, *, limit: int | None = None, whose: str = "device memory") -> None:
        self.limit = limit
        self.whose = whose
        self.instead = "raise it, or hold less at once"
        self._lock = threading.Lock()
        self._held: dict[int, _CountedBuffer] = {}
        self._freed: deque[_CountedBuffer] = deque()
        self._now = dict.fromkeys((*CATEGORIES, "total"), 0)
        self._peak = dict(self._now)
        self.follower: Callable[[dict[str, int]], None] | None = None

    def hold(self, array: SomeArray, category: str) -> SomeArray:
        """Count the buffer that owns `array` under `category` until the buffer is freed. Returns:
        `array` itself.

        Raises:  ConfigError for an unknown category; MemoryLimitError, without counting it, if it
                 passes the limit.
        """
        owner = owner_of(array)
        key = id(owner)
        if key in self._held:
            return array
        if category not in CATEGORIES:
            raise ConfigError(
                f"memory account: no category {category!r}; choose one of {', '.join(CATEGORIES)}"
            )
        with self._lock:
            if key in self._held:  # another thread was faster
                return array
            if self._freed:
                self._settle()
            if self.limit is not None and self._now["total"] + owner.nbytes > self.limit:
                now = (
                    ", ".join(
                        f"{name} {self._now[name]:,}" for name in CATEGORIES if self._now[name]
                    )
                    or "nothing"
                )
                raise MemoryLimitError(
                    f"{self.whose}: {owner.nbytes:,} bytes more for {category} do not fit under "
                    f"the limit of {self.limit:,}: held are {self._now['total']:,} ({now}); "
                    f"{self.instead}"
                )
            held = self._held[key] = _CountedBuffer(owner, self._released)
            held.key = key
            held.category = category
            held.nbytes = owner.nbytes
            self._add(category, held.nbytes)
        return array

    @property
    def now(self) -> dict[str, int]:
        """Return live bytes by category, and their "total"."""
        with self._lock:
            self._settle()
            return dict(self._now)

    @property
    def peak(self) -> dict[str, int]:
        """Return the highest bytes of each category since the last reset, and the highest sum
        ("total")."""
        with self._lock:
            return dict(self._peak)

    def reset_peak(self) -> None:
        """Set all peaks to the bytes that are live now."""
        with self._lock:
            self._settle()
            self._peak = dict(self._now)

    def raise_peak(self, peak: dict[str, int]) -> None:
        """Raise each peak to the one in `peak` where that is higher: to include the time before a
        reset_peak."""
        with self._lock:
            self._peak = {
                name: max(nbytes, peak.get(name, 0)) for name, nbytes in self._peak.items()
            }

    def snapshot(self) -> dict[str, dict[str, int]]:
        """Return {"parameters": {"now": bytes, "peak": bytes}, …, "total": {…}}, for
        metrics.json."""
        now = self.now
        peak = self.peak
        return {name: {"now": now[name], "peak": peak[name]} for name in now}

    def _released(self, held: Any) -> None:
        """Note that a buffer was freed. Takes no lock, because this thread may hold it."""
        self._freed.append(self._held.pop(held.key))

    def _settle(self) -> None:
        """Subtract the buffers that were freed since the last call; always called before adding, so
        that peaks are exact."""
        while self._freed:
            held = self._freed.popleft()
            self._now[held.category] -= held.nbytes
            self._now["total"] -= held.nbytes

    def _add(self, category: str, nbytes: int) -> None:
        for name in (category, "total"):
            self._now[name] = now = self._now[name] + nbytes
            if now > self._peak[name]:
                self._peak[name] = now
        if self.follower is not None:
            self.follower(self._now)


class _Ambient(threading.local):
    def __init__(self) -> None:
        self.account = MemoryAccount()


_ambient = _Ambient()


def current() -> MemoryAccount:
    """Return the calling thread's account; each rank that runs as a thread has its own."""
    return _ambient.account


@contextmanager
def use(account: MemoryAccount) -> Iterator[MemoryAccount]:
    """Context manager: make `account` the calling thread's account, for a worker thread or a
    test."""
    before = _ambient.account
    _ambient.account = account
    try:
        yield account
    finally:
        _ambient.account = before
