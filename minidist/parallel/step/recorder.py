"""Where a strategy reports its work, as named spans of time: an interface, as `parallel` may not
import `observe`."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


class Recorder(Protocol):
    """Anything that can time a named stretch of work, as `observe.timeline.Timeline`."""

    def span(
        self, name: str, category: str = "compute", **details: Any
    ) -> AbstractContextManager[None]:
        """A context whose start and stop are recorded under `name`; `details` (numbers, texts)
        travel with it."""
        return nullcontext()

    def announce(self, axis: str, name: str) -> None:
        """The next collective started along `axis`, which has no name yet, is called `name`."""
        ...


class Silent(Recorder):
    """The recorder that keeps nothing."""

    def announce(self, axis: str, name: str) -> None:
        """Nothing is kept."""
