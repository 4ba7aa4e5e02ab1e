"""The page of the whole family, lessons/COLLECTIVES.md: formulas of cost/volume.py, times measured
on this machine.

python lessons/02_collectives/family.py [--out FILE]      # about a minute
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from minidist.comm.collectives.select import ALGORITHMS
from minidist.comm.cost.volume import FORMULAS
from minidist.comm.group import Group
from minidist.console import size_text
from minidist.files import scratch, whole
from minidist.grading import load_module
from minidist.launch import init, run
from minidist.launch.own_python import module_command
from minidist.observe.machine import machine

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "COLLECTIVES.md"
BEGIN = "<!-- measured by: python lessons/02_collectives/family.py -->\n"
END = "<!-- end -->\n"
RANKS = 4
SIZES = {"1 KiB": 1 << 10, "64 KiB": 1 << 16, "1 MiB": 1 << 20}
TRANSPORTS = ("TCP", "shm", "MPI")
NEAR = 1.1  # times within this factor of the fastest count as fastest too
LIBRARIES = ("bench", "all-reduce", "--sizes", "1KiB,64KiB,1MiB", "-n", "2,4", "--rounds", "3")
# of each figure; seconds a round may take
ROUNDS = 3
BUDGET = 0.04

WHEN = {
    "naive": "two ranks, or few over links that cost little; one root's link is then the limit "
    "whatever one does",
    "tree": "short arrays, one root, many ranks: few waits",
    "ring": "long arrays: no link carries more than it must, and none is idle",
    "direct": "very short arrays: one wait",
    "pairwise": "all links alike: the least bytes, few waits",
    "doubling": "short arrays where messages are dear: the fewest after direct, no fan-out",
    "halving-doubling": "middling arrays on 2^k ranks: the ring's bytes in log2 P waits",
    "hierarchical": "several machines: only leaders use the link between them",
    "torus": "ranks wired as a grid",
    "torus-both": "ranks wired as a torus of any dims, whose links carry as much both ways at once",
    "bruck": "very short parts for very many ranks",
    "dissemination": "ranks that share no memory: no rank waits for a root",
    "native": "over MPI: its own C; what it sends inside, no ledger sees",
    "shared": "ranks of one host that share memory: one copy in, one out",
}

Figures = dict[str, dict[tuple[str, str, str], float]]


def measured_calls(group: Group) -> list[list[Any]]:
    """Return [verb, algorithm, size, seconds]: the slowest rank's time, median over calls, least
    over rounds."""
    names = load_module(HERE / "lesson.py", "02").algorithms_here
    figures: dict[tuple[str, str, str], list[float]] = {}
    for _ in range(ROUNDS):
        for verb in ALGORITHMS:
            for size, nbytes in SIZES.items():
                for algorithm in names(group, verb):
                    figures.setdefault((verb, algorithm, size), []).append(
                        _median(group, verb, algorithm, nbytes)
                    )
    return [[*key, min(rounds)] for key, rounds in figures.items()]


def _median(group: Group, verb: str, algorithm: str, nbytes: int) -> float:
    """Return the median of the slowest rank's times over as many calls as BUDGET allows.

    n is the size of the larger buffer.
    """
    whole = np.ones(nbytes // 4, np.float32)
    part = np.ones(nbytes // 4 // group.size, np.float32)
    x: Any = {"gather": part, "all_gather": part, "all_to_all": [part] * group.size}.get(
        verb, whole
    )
    arguments = () if verb == "barrier" else (x,)
    times: list[float] = []
    repeats = 4
    while len(times) < repeats:
        group.barrier()
        begin = time.perf_counter()
        getattr(group, verb)(*arguments, algorithm=algorithm)
        times.append(time.perf_counter() - begin)
        if len(times) == 4:
            slowest = float(group.all_reduce(times[-1], op="max"))
            repeats = int(min(40, max(5, BUDGET / slowest)))
    return float(np.median(group.all_reduce(np.array(times[1:]), op="max")))


def measure() -> Figures:
    """Return {transport: {(verb, algorithm, size): seconds}}, measured on RANKS processes of this
    machine."""
    rows = {
        "TCP": run(measured_calls, size=RANKS, transport="tcp", limit=120.0)[0],
        "shm": run(measured_calls, size=RANKS, transport="shm", limit=120.0)[0],
        "MPI": _under_mpirun(),
    }
    return {
        transport: {
            (verb, algorithm, size): seconds for verb, algorithm, size, seconds in rows[transport]
        }
        for transport in TRANSPORTS
    }


def _under_mpirun() -> list[list[Any]]:
    """Run measured_calls on ranks that mpirun starts."""
    with scratch(prefix="minidist-lesson-") as folder:
        file = folder / "figures.json"
        program = [sys.executable, str(Path(__file__).resolve()), "--ranks", str(file)]
        subprocess.run(["mpirun", "-n", str(RANKS), *program], check=True, timeout=120)
        return json.loads(file.read_text())


def tables(figures: Figures) -> str:
    """Return one table per verb: formulas, times in µs (the fastest bold), and when each algorithm
    is best."""
    lines = []
    for verb, algorithms in ALGORITHMS.items():
        sizes = ["1 KiB"] if verb == "barrier" else list(SIZES)
        columns = [
            transport if verb == "barrier" else f"{transport} {size}"
            for transport in TRANSPORTS
            for size in sizes
        ]
        lines += [
            "",
            f"## {verb}",
            "",
            f"| algorithm | messages | bytes | waits | {' | '.join(columns)} | best when |",
            f"| {' | '.join(['---'] * (5 + len(columns)))} |",
        ]
        for algorithm in algorithms:
            formula = FORMULAS[verb, algorithm]
            cells = [
                _cell(figures[transport], verb, algorithm, size)
                for transport in TRANSPORTS
                for size in sizes
            ]
            lines.append(
                f"| {algorithm} | {formula.messages} | {formula.nbytes} | {formula.steps} | "
                f"{' | '.join(cells)} | {WHEN[algorithm]} |"
            )
    return "\n".join(lines) + "\n"


def _cell(seconds: dict[tuple[str, str, str], float], verb: str, algorithm: str, size: str) -> str:
    """Return a cell in µs, bold if near the fastest; a dash if the algorithm does not run on this
    transport."""
    if (verb, algorithm, size) not in seconds:
        return "–"
    best = min(took for (of, _, at), took in seconds.items() if (of, at) == (verb, size))
    took = seconds[verb, algorithm, size]
    return f"**{1e6 * took:.0f}**" if took <= NEAR * best else f"{1e6 * took:.0f}"


def libraries() -> dict[str, Any]:
    """Run `minidist bench all-reduce`; return its seconds: ours, MPI's, and gloo's where PyTorch is
    installed."""
    with scratch(prefix="minidist-lesson-") as folder:
        file = folder / "bench.json"
        subprocess.run(
            module_command("minidist", *LIBRARIES, "--json", str(file)),
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=300,
        )
        return json.loads(file.read_text())["seconds"]


def libraries_table(seconds: dict[str, Any]) -> str:
    """Return a table with one row per library: µs by number of ranks and size."""
    columns = [(count, size) for count in seconds for size in next(iter(seconds[count].values()))]
    lines = [
        "",
        "## Beside the libraries",
        "",
        f"all_reduce of float32 in place, µs: `minidist {' '.join(LIBRARIES)}`.",
        "",
        f"| | {' | '.join(f'{count} ranks, {size_text(int(size))}' for count, size in columns)} |",
        f"| {' | '.join(['---'] * (1 + len(columns)))} |",
    ]
    for name in next(iter(seconds.values())):
        lines.append(
            f"| {name} | "
            f"{' | '.join(f'{1e6 * seconds[count][name][size]:.0f}' for count, size in columns)} "
            "|"
        )
    return "\n".join(lines) + "\n"


def heading() -> str:
    """Return a sentence that says where and when the times were taken."""
    here = machine()
    versions = ", ".join(
        f"{name} {version}" for name, version in here["versions"].items() if name != "torch"
    )
    return (
        f"Measured {here['date'][:10]} on {here['cores']} cores of {here['processor']}, {RANKS} "
        "ranks, "
        f"Python {here['python']}, {versions}: `python lessons/02_collectives/family.py`.\n"
    )


def spread(figures: Figures) -> str:
    """Return how much faster the fastest is than the slowest at each size: the median over verbs
    that have a choice."""
    parts = []
    for size in SIZES:
        gains = []
        for seconds in figures.values():
            for verb in ALGORITHMS:
                times = [took for (of, _, at), took in seconds.items() if (of, at) == (verb, size)]
                gains.append(max(times) / min(times))
        parts.append(f"{statistics.median(gains):.1f} times at {size}")
    return (
        "The choice of algorithm is worth, slowest against fastest of a verb, "
        f"{', '.join(parts)} (median).\n"
    )


def main() -> None:
    """Measure, and write what was measured into the page."""
    parser = argparse.ArgumentParser(
        description="Measure every algorithm here and write the page of the family."
    )
    parser.add_argument(
        "--out", metavar="FILE", type=Path, default=PAGE, help="another place for the page"
    )
    parser.add_argument("--ranks", metavar="FILE", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ranks:
        world = init()
        figures = measured_calls(world)
        if world.rank == 0:
            options.ranks.write_text(json.dumps(figures))
        return
    write_page(measure(), libraries(), options.out)


def write_page(figures: Figures, beside: dict[str, Any], out: Path) -> None:
    """Write the page with its measured part replaced."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    fresh = "\n".join([heading(), spread(figures)]) + tables(figures) + libraries_table(beside)
    with whole(out) as draft:
        draft.write_text(
            before + BEGIN + "\n" + fresh + "\n" + END + rest.split(END)[1], encoding="utf-8"
        )
    print(
        f"{out}: {len(FORMULAS)} algorithms, measured on {RANKS} ranks over "
        f"{' and '.join(TRANSPORTS)}"
    )


if __name__ == "__main__":
    main()
