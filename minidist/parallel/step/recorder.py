"""Where a strategy reports its work, as named spans of time.

A strategy is given a recorder and opens spans on it; `observe.timeline.Timeline` is one. Strategies know only this
small interface, because `observe` may import `parallel`, and never the other way.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


class Recorder(Protocol):
    """Anything that can time a named stretch of work."""

    def span(self, name: str, category: str = "compute", **details: Any) -> AbstractContextManager[None]:
        """A context whose start and stop are recorded under `name`; `details` (numbers, texts) travel with it."""
        ...

    def announce(self, axis: str, name: str) -> None:
        """The next collective started along `axis`, which has no name yet, is called `name`."""
        ...


class Silent:
    """The recorder that keeps nothing."""

    def span(self, name: str, category: str = "compute", **details: Any) -> AbstractContextManager[None]:
        """A context that does nothing."""
        return nullcontext()

    def announce(self, axis: str, name: str) -> None:
        """Nothing is kept."""
