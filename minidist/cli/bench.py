"""`minidist bench`: time collectives and training steps beside their peers, all contenders in one run.

    minidist bench all-reduce --sizes 1KiB:64MiB -n 2,4     our transports beside gloo and MPI
    minidist bench step                                     our training step beside PyTorch eager

A peer that is not installed is left out, and the table says so. Contenders take turns, rounds are repeated, medians are
shown: machines are shared and noisy, so read the ratios.
"""

import argparse
import platform
import sys
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from minidist.cli import bench_all_reduce, bench_step
from minidist.cli.common import counts, positive, sizes, write_json
from minidist.comm.collectives.choose import choose
from minidist.errors import ConfigError
from minidist.observe.bench_plots import bytes_text, draw_bus_bandwidth, draw_steps

REFERENCE = {"sockets": "gloo", "shm": "MPI_Allreduce", "mpi": "MPI_Allreduce"}  # who each of ours is measured against


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `minidist bench`."""
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    collective = what.add_parser("all-reduce", help="bus bandwidth over message size, as nccl-tests prints it")
    collective.add_argument("--sizes", type=sizes, default=sizes("1KiB:64MiB"), help="from:to, doubling; or a,b,c")
    collective.add_argument("-n", "--ranks", type=counts, default=[2, 4], metavar="N,N", help="rank counts (2,4)")
    collective.add_argument("--only", metavar="NAME,NAME", help="contenders, of " + ", ".join(
        (*bench_all_reduce.OURS, *bench_all_reduce.PEERS)) + "; shm:ring takes ours by that algorithm (else auto's)")
    collective.add_argument("--rounds", type=positive, default=5, help="turns each contender gets (5)")
    step = what.add_parser("step", help="tokens/s and peak memory of a training step")
    step.add_argument("-n", "--ranks", type=counts, default=[1, 2], metavar="N,N", help="rank counts (1,2)")
    step.add_argument("--rounds", type=positive, default=4, help="turns each contender gets (4)")
    step.add_argument("--steps", type=positive, default=5, help="steps a turn (5)")
    step.add_argument("--transport", choices=("sockets", "shm"), default="sockets",
                      help="ours, between ranks (sockets)")
    for name, value in vars(bench_step.Model()).items():
        what_it_is = "sequences a rank" if name == "batch" else f"the model's {name}"
        step.add_argument(f"--{name}", type=positive, default=value, help=f"{what_it_is} ({value})")
    for command in (collective, step):
        command.add_argument("--json", metavar="FILE", help="write the figures for machines")
        command.add_argument("--figure", metavar="FILE.png", help="draw the figures")


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write what was asked for."""
    console = Console(width=None if sys.stdout.isatty() else 200)  # a table in a log or a file is not folded
    with console.status("starting the ranks") as status:
        result = (_all_reduce if args.what == "all-reduce" else _step)(args, status.update)
    result["machine"] = machine()
    (_print_all_reduce if args.what == "all-reduce" else _print_step)(result, console)
    if args.figure:
        _draw(result, args.figure)
    if args.json:
        write_json(args.json, result)
    return 0


def machine() -> dict[str, Any]:
    """Date, machine, versions and command: what a figure needs to be worth something later."""
    import psutil

    versions = {}
    for name in ("minidist", "numpy", "mpi4py", "mpich", "torch"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "cores": psutil.cpu_count(),
            "processor": _processor(), "system": platform.system(), "python": platform.python_version(),
            "versions": versions, "command": " ".join(["minidist", *sys.argv[1:]])}


def _processor() -> str:
    """The processor's name where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


# ---------------------------------------------------------------- all-reduce


def _all_reduce(args: argparse.Namespace, progress: Callable[[str], None]) -> dict[str, Any]:
    contenders = _chosen(args.only)
    if min(args.sizes) < 4 or any(size % 4 for size in args.sizes):
        raise ConfigError("bench all-reduce: sizes are whole float32 numbers; choose multiples of 4 bytes")
    if min(args.ranks) < 2:
        raise ConfigError("bench all-reduce: one rank sends nothing; choose -n of at least 2")
    tables = {count: bench_all_reduce.measure_all(args.sizes, count, args.rounds, contenders, progress)
              for count in args.ranks}
    return {"what": "all-reduce", "seconds": tables, "contenders": contenders, "sizes": args.sizes}


def _chosen(only: str | None) -> list[str]:
    """The contenders asked for, or all that are here."""
    here = bench_all_reduce.contenders_here()
    if only is None:
        return here
    chosen = only.split(",")
    for name in chosen:
        base, _, algorithm = name.partition(":")
        if base not in (*bench_all_reduce.OURS, *bench_all_reduce.PEERS):
            raise ConfigError(f"bench all-reduce: no contender {name!r}; choose from {', '.join(here)}")
        if base not in here:
            raise ConfigError(f"bench all-reduce: {name} is not installed here; pip install {_package(name)}")
        if algorithm and base in bench_all_reduce.PEERS:
            raise ConfigError(f"bench all-reduce: {name}: a peer chooses its own algorithm; write {base}")
        choose("all_reduce", algorithm or "auto", 0, 2)  # refuses a name that all_reduce does not take
    return chosen


def _package(contender: str) -> str:
    return '-e ".[bench]"' if contender == "gloo" else "mpich mpi4py"


def _print_all_reduce(result: dict[str, Any], console: Console) -> None:
    for ranks, times in result["seconds"].items():
        table = Table(title=f"all-reduce, float32 sum, in place, {ranks} ranks (time µs · bus bandwidth GB/s)",
                      title_justify="left", header_style="bold cyan")
        for name in ("message", *result["contenders"]):
            table.add_column(name, justify="right")
        ratios = [name for name in result["contenders"] if _reference(name) in times]
        for name in ratios:
            table.add_column(f"{_reference(name)} / {name}", justify="right")
        for size in result["sizes"]:
            row = [_cell(size, times[name][size], ranks) for name in result["contenders"]]
            row += [f"{times[_reference(name)][size] / times[name][size]:.2f}×" for name in ratios]
            table.add_row(bytes_text(size), *row)
        console.print(table)
    if "gloo" not in result["contenders"]:
        console.print(f"gloo was left out: pip install {_package('gloo')}", style="dim", markup=False)


def _reference(contender: str) -> str | None:
    """The peer that a contender of ours is held against."""
    return REFERENCE.get(bench_all_reduce.base(contender))


def _cell(size: int, seconds: float, ranks: int) -> str:
    return f"{seconds * 1e6:,.0f} · {bench_all_reduce.bus_bandwidth(size, seconds, ranks) / 1e9:5.2f}"


# ---------------------------------------------------------------- step


def _step(args: argparse.Namespace, progress: Callable[[str], None]) -> dict[str, Any]:
    model = bench_step.Model(**{name: getattr(args, name) for name in vars(bench_step.Model())})
    model.config()  # a model that cannot be is refused before anything starts
    rows = bench_step.measure_all(model, args.ranks, args.rounds, args.steps, args.transport, progress)
    return {"what": "step", "model": vars(model), "rows": [vars(row) for row in rows], "transport": args.transport}


def _print_step(result: dict[str, Any], console: Console) -> None:
    model, rows = result["model"], result["rows"]
    table = Table(title="training step: " + ", ".join(f"{name} {value}" for name, value in model.items()),
                  title_justify="left", header_style="bold cyan")
    for column in ("", "ranks", "ms a step", "tokens/s", "of its 1 rank", "beside PyTorch", "peak MiB above import"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        table.add_row(row["name"], str(row["ranks"]), f"{row['step_seconds'] * 1e3:.1f}",
                      f"{row['tokens_per_second']:,.0f}", _ratio(row, rows, name=_alone(row), ranks=1),
                      _ratio(row, rows, name="PyTorch", ranks=row["ranks"]), f"{row['peak_bytes'] / 2**20:.0f}")
    console.print(table)
    if any(row["name"] == bench_step.SEPARATE for row in rows):
        console.print("separate: as many processes of ours that do not communicate: what this machine's cores give",
                      style="dim")
    if not any(row["name"] == bench_step.PEER for row in rows):
        console.print(f"PyTorch was left out: pip install {_package('gloo')}", style="dim", markup=False)


def _alone(row: dict[str, Any]) -> str:
    """The contender whose single rank a row scales from."""
    return bench_step.OURS if row["name"] == bench_step.SEPARATE else row["name"]


def _ratio(row: dict[str, Any], rows: Iterable[dict[str, Any]], *, name: str, ranks: int) -> str:
    """`row`'s tokens/s over those of contender `name` at `ranks`."""
    for other in rows:
        if other["name"] == name and other["ranks"] == ranks and other is not row:
            return f"{row['tokens_per_second'] / other['tokens_per_second']:.2f}×"
    return ""


# ---------------------------------------------------------------- figures


def _draw(result: dict[str, Any], file: str) -> None:
    """Bus bandwidth over size, or tokens/s by ranks, as a PNG."""
    try:
        if result["what"] == "all-reduce":
            draw_bus_bandwidth(Path(file), result["seconds"], bench_all_reduce.bus_bandwidth)
        else:
            draw_steps(Path(file), result["rows"])
    except OSError as error:
        raise ConfigError(f"bench --figure {file}: {error.strerror}") from error
