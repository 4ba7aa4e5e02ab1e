"""`minidist diagnose RUN`: which rank broke a job or holds it up, where and why, from its records;
status 1 if any.

minidist diagnose runs/one                      # a run of minidist train: one that ended, hangs
                                                # or still runs
minidist diagnose rings                         # the folder of minidist launch --flight rings,
                                                # or of dumps (SIGUSR2)
minidist diagnose /tmp/minidist-flight-*.json   # recorders, or their dumps, by name
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from minidist.console import positive_number, write_json
from minidist.errors import ConfigError
from minidist.files import check_writable
from minidist.observe.diagnose.fault import Fault, ranks_text
from minidist.observe.diagnose.flights import RankFlight, read_flight_files, read_flights
from minidist.observe.diagnose.hangs import STUCK
from minidist.observe.diagnose.rules import diagnose
from minidist.observe.rank_steps import RankSteps, read_rank_steps
from minidist.reading import consistent
from minidist.terminal import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minidist diagnose` to the parser."""
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="+",
        help="a run folder of minidist train, or a folder of flight recorders; or recorders and "
        "dumps, file by file",
    )
    parser.add_argument(
        "--stuck",
        type=positive_number,
        default=STUCK,
        metavar="SECONDS",
        help="age from which an open call of a job that runs counts as a hang (default: "
        "%(default)g)",
    )
    parser.add_argument("--json", metavar="FILE", help="also write what is printed as JSON")


def run(args: argparse.Namespace) -> int:
    """Read, diagnose, print.

    Returns: 0 if nothing is wrong, else 1. Raises: ConfigError if nothing was recorded.
    """
    check_writable("--json", args.json)
    records = _records(args.run)
    with consistent(f"the records of {args.run[0]}"):
        found = diagnose(*records, stuck=args.stuck)
    console = Console(highlight=False, soft_wrap=True)
    console.print(found.summary, markup=False)
    if not found.findings:
        console.print("nothing wrong was found")
    else:
        console.print(_table(found.findings))
    for finding in found.findings:
        _show(console, finding)
    if args.json:
        findings: list[dict[str, Any]] = [asdict(finding) for finding in found.findings]
        write_json(
            args.json, {"healthy": not findings, "summary": found.summary, "findings": findings}
        )
    return 1 if found.findings else 0


def _records(places: Sequence[str]) -> tuple[list[RankFlight], dict[int, RankSteps]]:
    """Return the flight recorders and the records of steps.

    One kind is enough: a run ended by SIGTERM keeps no recorders.
    """
    place, *more = places
    if more or os.path.isfile(place):
        return read_flight_files(places), {}
    steps = read_rank_steps(place)
    try:
        return read_flights(place), steps
    except ConfigError:
        if not steps:
            raise
        return [], steps


def _table(findings: list[Fault]) -> Table:
    table = Table(
        "culprit", "cause", Column("where", overflow="fold"), "how sure", header_style="bold"
    )
    for finding in findings:
        culprit = ranks_text(finding.ranks) if finding.ranks else "no rank"
        table.add_row(
            culprit,
            f"[bold red]{escape(finding.cause)}[/bold red]",
            escape(finding.where),
            finding.sure,
        )
    return table


def _show(console: Console, finding: Fault) -> None:
    """Print a finding: what it is, the evidence, and what to do."""
    console.print(f"\n{finding.what}", markup=False, style="bold")
    for line in finding.evidence:
        console.print(f"  {line}", markup=False)
    console.print(f"  what to do: {finding.advice}", markup=False)
