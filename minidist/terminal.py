"""The console of commands that print texts of files: control characters in them are escaped, never
sent."""

from collections.abc import Iterable

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from minidist.reading import visible


class Console(rich.console.Console):
    """rich's console; its own colours and movements stay."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render as rich does, and escape control characters of texts."""
        for segment in super().render(renderable, options):
            yield (
                segment
                if segment.control
                else segment._replace(text=visible(segment.text, keep="\n\t"))
            )
