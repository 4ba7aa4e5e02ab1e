"""Start a lesson: its command line, its ranks, and the recording of its figure."""

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from threadpoolctl import threadpool_limits

from minidist.comm.group import Group
from minidist.console import folder_to_write
from minidist.errors import MinidistError
from minidist.files import DISK_FAILED, whole
from minidist.launch import init, run, speaks_first
from minidist.lessons.figures import also_in_chinese
from minidist.lessons.page import Page
from minidist.lessons.phrases import figure_phrases
from minidist.streams import standard_output

LIMIT = 600.0  # seconds for a lesson or the recording of a figure, on a busy machine


@dataclass(frozen=True)
class Break:
    """An experiment of a story's "Break it", and its result.

    Args:    experiment: what is run. says: a part of the error in which it ends, or else of what it
             prints; a test holds it. error: the type of that error; None for an experiment that
             prints its result.
    """

    experiment: Callable[[], None]
    says: str
    error: type[MinidistError] | None = None

    def __call__(self) -> None:
        """Run the experiment."""
        self.experiment()


def arguments(description: str | None, breaks: Mapping[str, Break]) -> argparse.ArgumentParser:
    """Return the parser of a lesson's command line, which may add its own options.

    Args:    description: the lesson's docstring; its first line is shown. breaks: the README's
             experiments by name.
    """
    first = (description or "").strip().splitlines()
    parser = argparse.ArgumentParser(description=first[0] if first else None)
    parser.add_argument("--json", metavar="FILE", help="write the tables as JSON")
    parser.add_argument(
        "--break", dest="broken", choices=sorted(breaks), help="run one of the README's 'Break it'"
    )
    return parser


def run_lesson(
    options: argparse.Namespace,
    tour: Callable[[Group, Page], None],
    breaks: Mapping[str, Break],
    *,
    alone: int = 4,
) -> None:
    """Run `tour(group, page)` on the ranks that a launcher started, or on `alone` threads without a
    launcher.

    With `--break NAME` run this experiment instead.
    """
    if options.broken:
        run_break(options.broken, breaks[options.broken])
        return

    def body(group: Group) -> None:
        page = Page(group)
        tour(group, page)
        page.save(options.json)

    with standard_output() as output:
        try:
            _on_ranks(body, alone)
        except OSError as error:
            if error.errno not in DISK_FAILED:
                raise
            _end(error, str(error))
    if output.problem is not None and output.lost:
        _end(output.problem, output.lost)


def run_break(name: str, chosen: Break) -> None:
    """Run an experiment; print the error in which it ends.

    Raises:  SystemExit, status 1, if it ends otherwise than it states.
    """
    error: MinidistError | None = None
    try:
        chosen()
    except MinidistError as raised:
        error = raised
        print(f"{type(error).__name__}: {error}")
    if chosen.error is None and error is not None:
        raise SystemExit(
            f"lesson: --break {name} has not shown its result: it ended in the error above"
        )
    if chosen.error is not None and (
        type(error) is not chosen.error or chosen.says not in str(error)
    ):
        raise SystemExit(
            f"lesson: --break {name} was to end in {chosen.error.__name__}: … {chosen.says} …"
        )


def _end(error: OSError, told: str) -> NoReturn:
    """Report `error` to the job; end with status 1 and one line.

    Only rank 0 writes files, so only rank 0 ends here.
    """
    speaks_first(error)
    raise SystemExit(f"lesson: {told}")


def _on_ranks(body: Callable[[Group], None], alone: int) -> None:
    """Call `body` on the ranks that a launcher started, or on `alone` threads without a
    launcher."""
    world = init()
    if world.size > 1:
        world.transport.limit = LIMIT  # the others wait while one rank measures
        body(world)
    else:
        with threadpool_limits(1, user_api="blas"):  # all ranks use this process's BLAS threads
            run(body, size=alone, transport="threads", limit=LIMIT)


def draw_figure(
    record: Callable[[Group], Any],
    draw: Callable[[Any, Path], None],
    home: Path,
    *,
    size: int,
    transport: str = "threads",
) -> None:
    """Record a run on `size` ranks, then draw it: `python lessons/NN_name/figure.py [--out DIR]`.

    Without --out the figure is written below `figures/` in the current folder; drawn.py draws the
    figures in the lessons' own folders.

    Args:    record: record(world) -> what rank 0 recorded. draw: draw(recorded, folder). home: the
             lesson's folder.
    """
    parser = argparse.ArgumentParser(
        description="Record a run and draw this lesson's figure from it."
    )
    add_out(parser, home)
    folder = parser.parse_args().out
    try:
        recorded = run(record, size=size, transport=transport, limit=LIMIT)[0]
        phrases = figure_phrases(home)
        with also_in_chinese(phrases.say if phrases else None):
            draw(recorded, folder)
    except (MinidistError, OSError) as error:
        raise SystemExit(f"figure: {error}") from None
    if folder.resolve() == home and (home / "figure.mmd").exists():
        insert_mermaid(home / "README.md", (home / "figure.mmd").read_text(encoding="utf-8"))
    print(f"{folder / 'figure.png'}: drawn from a run on this machine")


def add_out(parser: argparse.ArgumentParser, home: Path) -> None:
    """Add the option of each script that draws: another folder, so that the lesson's own figure is
    kept."""
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=folder_to_write,
        default=str(Path("figures", home.name)),
        help="where the figure goes, a folder that is made if need be (default: %(default)s)",
    )


def insert_mermaid(readme: Path, diagram: str) -> None:
    """Replace the README's Mermaid block by `diagram`."""
    text = readme.read_text(encoding="utf-8")
    fresh = re.sub(
        r"```mermaid\n.*?```", lambda _: f"```mermaid\n{diagram}```", text, count=1, flags=re.DOTALL
    )
    if fresh != text:
        with whole(readme) as draft:
            draft.write_text(fresh, encoding="utf-8")
