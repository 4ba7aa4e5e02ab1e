"""`minidist report RUN`: the run as one HTML page, RUN/report.html, made only from the run folder.

minidist report runs/one                    # open runs/one/report.html in a browser; it needs
                                            # no network
minidist report runs/one --out one.html
"""

import argparse
from pathlib import Path

from minidist.cli.train.report import memory_table, traffic_tables
from minidist.cli.train.run_folder import PAGE
from minidist.console import size_text, written
from minidist.errors import ConfigError
from minidist.files import as_utf8, check_writable
from minidist.observe.report.page import page, sections_of
from minidist.observe.report.run_files import METRICS, RunFiles, read_run
from minidist.observe.report.section import PlainTable, plain_table
from minidist.reading import consistent
from minidist.terminal import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minidist report` to the parser."""
    parser.add_argument(
        "run", metavar="RUN", help="a run folder of minidist train, also of a run that died"
    )
    parser.add_argument("--out", metavar="FILE", help=f"the page (default: RUN/{PAGE})")


def run(args: argparse.Namespace) -> int:
    """Read the folder, write the page.

    Returns: 0. Raises: ConfigError if it is no run, or --out cannot be written.
    """
    check_writable("--out", args.out)
    found = read_run(args.run)
    ledger, lines, account = _tables(found) if found.metrics else ([], [], [])
    text = page(found, sections_of(found, ledger, lines, account))
    place = Path(args.out) if args.out else found.folder / PAGE
    with written("--out", place, member=not args.out) as draft:
        draft.write_bytes(as_utf8(text))
    Console(highlight=False, soft_wrap=True).print(
        f"{place}: {size_text(len(as_utf8(text)))}, open it in a browser", markup=False
    )
    return 0


def _tables(run: RunFiles) -> tuple[list[PlainTable], list[str], list[PlainTable]]:
    """Return the ledger's tables and lines, and the memory account's, as the terminal shows them at
    the end of a run.

    If the numbers of metrics.json are not consistent, the file counts as missing.
    """
    metrics = run.metrics
    sentence = "What fills the memory of rank 0, in bytes, measured and by formula"
    # the run died while its results were being written
    if "ranks" not in metrics or "formula" not in metrics:
        return [], [], []
    try:
        with consistent(f"the numbers of {METRICS}"):
            tables, lines = traffic_tables(metrics) if metrics["steps"] else ([], [])
            return (
                [plain_table(table, title[0].upper() + title[1:]) for title, table in tables],
                lines,
                [plain_table(memory_table(metrics), sentence)],
            )
    except ConfigError as error:
        run.missing[METRICS] = str(error)
        run.metrics.clear()
        return [], [], []
