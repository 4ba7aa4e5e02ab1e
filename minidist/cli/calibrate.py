"""`minidist calibrate --from runs.csv --cluster a100-80g`: fit the cost model to measured step
times.

    minidist calibrate --from runs.csv --cluster a100-80g --out profile.json
    minidist simulate --profile profile.json --cluster a100-80g:64x8 …

Each line of the file is a run. Its columns may be in any order; `seconds`, `devices`, `batch` and a
model are required:

{columns}

Lines that begin with # are skipped. `minidist bench calibrate` is a different command: it measures
this machine.
"""

import argparse
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from minidist.console import write_json
from minidist.errors import ConfigError
from minidist.files import DISK_FAILED, check_writable
from minidist.progress import progress
from minidist.simulate.calibrate import CONSTANTS, CostFit, fit
from minidist.simulate.few_passes import FewPasses
from minidist.simulate.runs import COLUMNS, Run, read_runs
from minidist.simulate.sure import of_fit
from minidist.terminal import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minidist calibrate` to the parser."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    columns = "\n".join(f"    {name:19}{what}" for name, what in COLUMNS.items())
    parser.description = (__doc__ or "").format(columns=columns)
    parser.add_argument(
        "--from", dest="runs", required=True, metavar="FILE.csv", help="the measured steps"
    )
    parser.add_argument(
        "--cluster", required=True, metavar="NAME", help="where: a100-80g, or FILE:NAME"
    )
    parser.add_argument(
        "--fit", metavar="NAME,NAME", help="only these constants, of " + ", ".join(CONSTANTS)
    )
    parser.add_argument(
        "--out", metavar="FILE", default="cost-profile.json", help="the profile (cost-profile.json)"
    )
    parser.add_argument("--json", metavar="FILE", help="write runs, predictions and errors as JSON")


def run(args: argparse.Namespace) -> int:
    """Fit, print the errors, write the profile. Returns: 0. Raises: ConfigError."""
    for option in ("out", "json"):
        check_writable(f"--{option}", getattr(args, option))
    runs = read_runs(args.runs, args.cluster)
    names = args.fit.split(",") if args.fit else CONSTANTS
    console = Console(highlight=False)
    with progress("reading") as show:
        fitted = fit(runs, FewPasses(), args.cluster, names, show)
    _show(console, runs, fitted, args.out)
    try:
        fitted.profile.save(Path(args.out))
    except OSError as error:
        if error.errno in DISK_FAILED:
            raise
        raise ConfigError(f"--out {args.out}: {error.strerror}") from error
    if args.json:
        rows = zip(runs, fitted.predicted, fitted.errors, fitted.left_out, strict=True)
        write_json(
            args.json,
            {
                "fit": dict(fitted.profile.fit),
                "runs": [
                    {
                        "label": each.label,
                        "seconds": each.seconds,
                        "predicted": predicted,
                        "error": error,
                        "left_out": left_out,
                    }
                    for each, predicted, error, left_out in rows
                ],
            },
        )
    return 0


def _show(console: Console, runs: list[Run], fitted: CostFit, out: str) -> None:
    """Print each run, the constants, and the errors of three sets of constants."""
    table = Table(title="Seconds a step", title_justify="left", header_style="bold cyan")
    for name in ("run", "measured", "predicted", "error", "left out"):
        table.add_column(name, justify="left" if name == "run" else "right")
    for each, predicted, error, left_out in zip(
        runs, fitted.predicted, fitted.errors, fitted.left_out, strict=True
    ):
        table.add_row(
            escape(each.label),
            f"{each.seconds:.4g}",
            f"{predicted:.4g}",
            f"{error:+.1%}",
            f"{left_out:+.1%}",
        )
    console.print(table)
    found = fitted.summary()
    for name, what in (
        ("default", "by the default constants"),
        ("fitted", "by the fitted constants"),
        ("left_out", "of a run left out, by the constants fitted without it"),
    ):
        mean = found[f"{name}_mean"]
        worst = found[f"{name}_worst"]
        console.print(
            f"error {mean:6.1%} in the mean, {worst:6.1%} at worst, {what}", soft_wrap=True
        )
    sure = of_fit(fitted.profile.fit)
    console.print(
        f"known to by this profile: seconds within a factor of {sure.spread:.2f}; two plans of a job "
        f"can be told apart where they differ by more than {sure.apart - 1:.0%}",
        soft_wrap=True,
    )
    rates = {name: value for name, value in vars(fitted.profile.rates).items() if name in CONSTANTS}
    console.print(
        "constants: " + ", ".join(f"{name} {value:.3g}" for name, value in rates.items()),
        soft_wrap=True,
    )
    for wire, numbers in fitted.profile.wires.items():
        console.print(
            escape(
                f"{wire}: " + ", ".join(f"{name} {value:.3g}" for name, value in numbers.items())
            )
        )
    console.print(
        escape(f"profile: {out}; minidist simulate --profile {out} takes it"), soft_wrap=True
    )
