"""Show a lesson's story in a terminal: its head as lines, pictures as paths, tables without cut
words."""

import re
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Markdown, TableElement
from rich.table import Table
from rich.text import Text

from minidist.lessons import Lesson
from minidist.lessons.mermaid import as_text
from minidist.lessons.page import NARROW, records

WORDS = {
    "en": ("Figure: ", "*(answers: minidist lesson {} --answers)*\n"),
    "zh": ("图：", "*（答案：minidist lesson {} --answers）*\n"),
}
"""{language: what stands before a picture's title, and in place of hidden answers}."""


class StoryTable(TableElement):
    """A table that breaks lines between words.

    A word that is too long for its column continues on the next line.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for table in super().__rich_console__(console, options):
            if isinstance(table, Table):
                for column in table.columns:
                    column.overflow = "fold"
                rows = [self.header.row] if self.header and self.header.row else []
                rows += self.body.rows if self.body else []
                cells = [[cell.content.plain for cell in row.cells] for row in rows]
                if not fit_words(table, cells, options.max_width) and options.max_width < NARROW:
                    yield Text("\n".join(records(cells[0], cells[1:])))
                    continue
            yield table


class Story(Markdown):
    """A story's Markdown, in which no word is cut."""

    elements = {**Markdown.elements, "table_open": StoryTable}


def fit_words(table: Table, rows: Sequence[Sequence[str]], width: int) -> bool:
    """Set the column widths of a table that is too wide: each gets its longest word, and a share of
    the remaining columns.

    Args:    rows: the cells' text, heads too; width: columns of the terminal.
    Returns: whether the longest words fit; if not, the table is unchanged.
    """
    texts = list(zip(*rows, strict=True))
    least = [
        max((cell_len(word) for text in column for word in text.split()), default=0)
        for column in texts
    ]
    most = [max(cell_len(line) for text in column for line in text.split("\n")) for column in texts]
    left = width - sum(least) - 3 * len(least) - 1
    wanted = sum(most) - sum(least)
    if 0 <= left < wanted:
        for column, low, high in zip(table.columns, least, most, strict=True):
            column.width = low + left * (high - low) // wanted
    return left >= 0


def for_terminal(lesson: Lesson, *, answers: bool, language: str = "en") -> str:
    """Return the lesson's story in a language for a terminal: pictures become paths.

    Hidden answers stay hidden unless `answers`.
    """
    figure, hidden = WORDS[language]
    text = lesson.story(language).read_text(encoding="utf-8")
    text = re.sub(
        r"^\|(.*)\|\n\|[-| ]+\|\n\|(.*)\|\n", _as_lines, text, count=1, flags=re.MULTILINE
    )
    text = re.sub(
        r"!\[([^\]]*)\]\(([^)]*)\)", lambda m: f"*{figure}{m[1]}* `{lesson.folder / m[2]}`", text
    )
    text = re.sub(
        r"```mermaid\n(.*?)```", lambda m: f"```text\n{as_text(m[1])}\n```", text, flags=re.DOTALL
    )
    if answers:
        return re.sub(r"</?(details|summary)>", "", text)
    told = hidden.format(lesson.number)
    return re.sub(r"<details>.*?</details>\n?", told, text, flags=re.DOTALL)


def _as_lines(head: re.Match[str]) -> str:
    """Return the one-row table at the head of a story as one line per column, so that a narrow
    terminal shows commands whole."""
    names, cells = ([cell.strip() for cell in row.split("|")] for row in head.groups())
    return "".join(f"* {name}: {cell}\n" for name, cell in zip(names, cells, strict=True))
