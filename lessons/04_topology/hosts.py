"""Run two hosts on one machine: network namespaces joined by a shaped link. For root, on Linux with
iproute2.

    python lessons/04_topology/hosts.py [--rate 200mbit] [--delay 2ms] [--out DIR]      # a table, and hosts.png

Two launchers, one in each namespace, start four ranks each. The ranks connect over the link and
all-reduce, flat and hierarchical. If this machine does not allow it, the script says why. A delay
is the kernel's (tc's netem) where it has that. Otherwise each message between the hosts sleeps as
long before it leaves (links.py), and the table says so.
"""

import argparse
import json
import os
import re
import secrets
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.console import folder_to_write, size_text
from minidist.files import scratch
from minidist.grading import load_module
from minidist.launch import init
from minidist.launch.own_python import module_command
from minidist.lessons.namespaces import delays, joined_hosts, missing
from minidist.lessons.page import page_console

HERE = Path(__file__).resolve().parent
PER_HOST = 4
PORT = 29500
ROUNDS = 3
SIZES = tuple(2**power for power in range(14, 23, 2))  # 16 KiB to 4 MiB
ALGORITHMS = ("ring", "hierarchical")


def ranks(file: Path, asleep: float = 0.0) -> None:
    """Run one rank of the job; rank 0 writes to `file` the slowest rank's times, the median over
    rounds.

    `asleep`: seconds that each message between the hosts waits before it leaves.
    """
    world = init(limit=60)
    if asleep:
        links = load_module(HERE / "links.py", "04")
        with links.machines(world, list(world.nodes), alpha=asleep, beta=0.0) as slower:
            rows = timed(slower)
    else:
        rows = timed(world)
    if world.rank == 0:
        file.write_text(
            json.dumps({"size": world.size, "hosts": len(set(world.nodes)), "rows": rows})
        )


def timed(world: Group) -> list[list[Any]]:
    """Return rows of (algorithm, bytes, seconds)."""
    rows: list[list[Any]] = []
    for nbytes in SIZES:
        for algorithm in ALGORITHMS:
            taken = []
            for _ in range(ROUNDS):
                x = np.full(nbytes // 4, float(world.rank), np.float32)
                world.barrier()
                begin = time.perf_counter()
                total = world.all_reduce(x, algorithm=algorithm)
                taken.append(float(world.all_reduce(time.perf_counter() - begin, op="max")))
                if total[0] != sum(range(world.size)):
                    raise ArithmeticError(
                        f"rank {world.rank}: {algorithm} of {nbytes} bytes gives {total[0]}"
                    )
            rows.append([algorithm, nbytes, statistics.median(taken)])
    return rows


def measure(rate: str, delay: str = "") -> dict[str, Any]:
    """Run the job on two hosts joined by a link of `rate` and `delay`, written as tc does
    ("200mbit", "2ms").

    Raises: LaunchError if this machine does not let us; CalledProcessError if the job fails.
    """
    environ = {**os.environ, "MINIDIST_TOKEN": secrets.token_hex(16)}
    by_kernel = delay if delay and delays() else ""
    asleep = ["--asleep", str(seconds_of(delay))] if delay and not by_kernel else []
    with joined_hosts(rate, by_kernel) as hosts, scratch(prefix="minidist-lesson-") as folder:
        file = folder / "figures.json"
        launch = module_command(
            "minidist",
            "launch",
            "-n",
            str(PER_HOST),
            "--nnodes",
            "2",
            "--master-addr",
            hosts[0].address,
            "--master-port",
            str(PORT),
        )
        program = [str(Path(__file__).resolve()), "--ranks", str(file), *asleep]
        nodes = [
            subprocess.Popen(
                [*host.enter, *launch, "--node-rank", str(number), *program], env=environ
            )
            for number, host in enumerate(hosts)
        ]
        for node in nodes:
            if node.wait(timeout=120):
                raise subprocess.CalledProcessError(node.returncode, node.args)
        return {
            "rate": rate,
            "delay": delay,
            "by_kernel": bool(by_kernel),
            **json.loads(file.read_text()),
        }


def bytes_per_second(rate: str) -> float:
    """Return the bytes per second of a rate: 200mbit -> 25e6. tc counts in powers of ten."""
    match = re.fullmatch(r"(\d+)(k|m|g)bit", rate)
    if match is None:
        raise argparse.ArgumentTypeError(f"{rate!r} is no rate; choose one like 200mbit")
    return int(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]] / 8


def seconds_of(delay: str) -> float:
    """Return the seconds of a delay: 2ms -> 0.002."""
    match = re.fullmatch(r"(\d+)(us|ms|s)", delay)
    if match is None:
        raise argparse.ArgumentTypeError(f"{delay!r} is no delay; choose one like 2ms")
    return int(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]]


def waits(algorithm: str, size: int, hosts: int) -> int:
    """Return how often a rank waits for the link: 2(P-1) steps of a ring of all ranks, 2(M-1) of a
    ring of leaders."""
    return 2 * ((size if algorithm == "ring" else hosts) - 1)


def crossing(algorithm: str, size: int, hosts: int) -> float:
    """Return how often the array crosses the link in each direction: 2(P-1)/P in a ring of all
    ranks, 2(M-1)/M in a ring of leaders."""
    around = size if algorithm == "ring" else hosts
    return 2 * (around - 1) / around


def show(measured: dict[str, Any]) -> None:
    """Print the table: each measured time, and the link's part of it (bytes divided by its rate,
    and waits for its delay)."""
    from rich.table import Table

    delay = measured["delay"]
    table = Table(
        title=f"all_reduce, {measured['hosts']} hosts x {PER_HOST} ranks, {measured['rate']} "
        "between them" + f", {delay} each way" * bool(delay),
        title_justify="left",
        header_style="bold cyan",
        caption="this kernel delays no packets: each message between hosts sleeps before it leaves"
        if delay and not measured["by_kernel"]
        else None,
        caption_justify="left",
    )
    for column in (
        "bytes",
        *(name for algorithm in ALGORITHMS for name in (algorithm, "the link's part")),
    ):
        table.add_column(column, justify="right")
    times = {(algorithm, nbytes): took for algorithm, nbytes, took in measured["rows"]}
    for nbytes in SIZES:
        cells = []
        for algorithm in ALGORITHMS:
            across = crossing(algorithm, measured["size"], measured["hosts"]) * nbytes
            least = across / bytes_per_second(measured["rate"])
            if delay:
                least += waits(algorithm, measured["size"], measured["hosts"]) * seconds_of(delay)
            cells += [f"{1e3 * times[algorithm, nbytes]:.1f} ms", f"{1e3 * least:.1f} ms"]
        table.add_row(size_text(nbytes), *cells)
    page_console().print(table)


def draw(measured: dict[str, Any], folder: Path) -> None:
    """Draw hosts.png: measured times as points, the link's own time as lines."""
    from minidist.lessons import figures as look

    figure = look.new_figure(
        8.2,
        5.2,
        "Two hosts: a flat ring and a hierarchical all-reduce",
        f"{measured['hosts']} network namespaces with {PER_HOST} ranks each, joined by a link of "
        f"{measured['rate']}.",
    )
    ax = look.quiet(figure.add_axes((0.11, 0.12, 0.85, 0.68)), grid="y")
    for algorithm, color in zip(ALGORITHMS, (look.RANKS[3], look.RANKS[0]), strict=True):
        points = [
            (nbytes, 1e3 * took) for name, nbytes, took in measured["rows"] if name == algorithm
        ]
        share = crossing(algorithm, measured["size"], measured["hosts"])
        ax.plot(
            *zip(*points, strict=True),
            "o",
            color=color,
            markersize=7,
            label=f"{algorithm}, measured",
        )
        ax.plot(
            SIZES,
            [1e3 * share * nbytes / bytes_per_second(measured["rate"]) for nbytes in SIZES],
            color=color,
            linewidth=1.4,
            label=f"{share:g} n over the link",
        )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(SIZES, [size_text(nbytes) for nbytes in SIZES])
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_ylabel("ms an all-reduce", color=look.SOFT, fontsize=10.5)
    ax.legend(frameon=False, fontsize=10, labelcolor=look.INK)
    look.save(figure, folder, "hosts.png")


def main() -> None:
    """Measure, print and draw; or be one of the ranks."""
    parser = argparse.ArgumentParser(description="Two hosts on one machine, as network namespaces.")
    parser.add_argument(
        "--rate", default="200mbit", help="of the link between them, as tc spells it"
    )
    parser.add_argument(
        "--delay",
        default="",
        metavar="TIME",
        help="of each packet between them, as 2ms (default: none)",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=folder_to_write,
        help="where hosts.png goes; left out: not drawn",
    )
    parser.add_argument("--ranks", metavar="FILE", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--asleep", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ranks:
        ranks(options.ranks, options.asleep)
        return
    for check, text in (
        (bytes_per_second, options.rate),
        *([(seconds_of, options.delay)] if options.delay else []),
    ):
        try:
            check(text)
        except argparse.ArgumentTypeError as error:
            parser.error(str(error))
    if options.out and options.delay:
        parser.error("--out draws the link without a delay; leave out --delay")
    why = missing()
    if why is not None:
        print(f"no two hosts on this machine: {why}")
        return
    measured = measure(options.rate, options.delay)
    show(measured)
    if options.out:
        from minidist.lessons.figures import also_in_chinese
        from minidist.lessons.phrases import figure_phrases

        phrases = figure_phrases(HERE)
        with also_in_chinese(phrases.say if phrases else None):
            draw(measured, options.out)


if __name__ == "__main__":
    main()
