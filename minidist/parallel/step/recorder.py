"""The interface through which a strategy reports its work, as named spans of time; `parallel` may
not import `observe`."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


class Recorder(Protocol):
    """Anything that can time a named span of work, as `observe.timeline.Timeline`."""

    def span(
        self, name: str, category: str = "compute", **details: Any
    ) -> AbstractContextManager[None]:
        """Return a context whose start and stop are recorded under `name`, together with `details`
        (numbers, texts)."""
        return nullcontext()

    def announce(self, axis: str, name: str) -> None:
        """Name the next collective that is started along `axis` and has no name yet."""
        ...


class Silent(Recorder):
    """A recorder that keeps nothing."""

    def announce(self, axis: str, name: str) -> None:
        """Keep nothing."""
