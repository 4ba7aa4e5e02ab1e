"""The section of CALIBRATION.md on NCCL: all-reduces that others measured, and what library.py says
of them.

    python lessons/24_simulate/collectives.py          # the section alone, some seconds
    python lessons/24_simulate/collectives.py --fit    # the constants that fit all tables best

The tables are minidist/simulate/published/collectives/*.csv. The constants of clusters.toml that
say "measured: published/collectives" are those of --fit, rounded. A table is judged twice: by these
constants, and by constants that were fitted to all other tables.
"""

import argparse
import csv
from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from minidist.simulate.calibrate import PUBLISHED
from minidist.simulate.cluster import Cluster
from minidist.simulate.library import Chosen, Library
from minidist.simulate.messages import Operands
from minidist.simulate.walk import library_of

MIB = 1 << 20
FITTED = (
    ("nvlink3", "start"),
    ("nvlink3", "ll128"),
    ("nvlink3", "fill"),
    ("nvlink4", "start"),
    ("nvlink4", "fill"),
    ("ib-hdr", "ll128"),
    ("ib-ndr", "ll128"),
)
"""Constants of clusters.toml, by wire and key. NVLink 4's LL128 keeps NCCL's share: only trees show
it."""
SHORT = 0.25  # weight of an array below 1 MiB
ROUNDS = 12  # of the search

HEAD = """## NCCL's all-reduce

Tables of `nccl-tests`, and one of `torch.distributed`, that others published
(`minidist/simulate/published/collectives/`), beside `library.py`. An error is predicted / measured - 1. "Left out" has
the constants that were fitted to the other tables only (a wire that no other table has keeps the defaults). The tables
differ among themselves: 8 A100s add 16 MiB in 213 to 274 µs.
"""


class Measured(NamedTuple):
    """An all-reduce that was measured."""

    table: str
    cluster: str  # "a100-80g:1x8"
    nbytes: int
    seconds: float


Constants = Mapping[tuple[str, str], float]
"""By wire and key."""
DEFAULT: Constants = MappingProxyType({})
"""Those of clusters.toml."""


@lru_cache(maxsize=1)
def tables() -> dict[str, list[Measured]]:
    """Return the rows of every table."""
    found = {}
    for path in sorted((PUBLISHED / "collectives").glob("*.csv")):
        with path.open(encoding="utf-8") as lines:
            found[path.stem] = [
                Measured(
                    path.stem,
                    f"{row['cluster']}:{row['devices']}",
                    int(row["bytes"]),
                    float(row["microseconds"]) * 1e-6,
                )
                for row in csv.DictReader(line for line in lines if line[0] != "#")
            ]
    return found


@lru_cache(maxsize=64)
def _library(cluster: str) -> Library:
    parsed = Cluster.parse(cluster)
    return library_of(parsed, tuple(range(parsed.size)))


@lru_cache(maxsize=1024)
def _chosen(cluster: str, nbytes: int) -> Chosen:
    """Return what NCCL chooses, on which no fitted constant acts."""
    return _library(cluster).chosen("all_reduce", Operands(nbytes))


def predicted(rows: Iterable[Measured], constants: Constants = DEFAULT) -> np.ndarray:
    """Return the seconds that library.py says, with these constants in place of the defaults."""
    wires: dict[str, dict[str, float]] = {}
    for (wire, key), value in constants.items():
        wires.setdefault(wire, {})[key] = value
    libraries: dict[str, Library] = {}
    seconds = []
    for row in rows:
        if row.cluster not in libraries:
            usual = _library(row.cluster)
            libraries[row.cluster] = Library(usual.members, usual.cluster.rewired(wires))
        chosen = _chosen(row.cluster, row.nbytes)
        seconds.append(libraries[row.cluster].seconds(chosen, row.nbytes))
    return np.array(seconds)


def errors(rows: Iterable[Measured], constants: Constants = DEFAULT) -> np.ndarray:
    """Return predicted / measured - 1 of rows."""
    rows = list(rows)
    return predicted(rows, constants) / [row.seconds for row in rows] - 1


def fit(known: Mapping[str, list[Measured]]) -> Constants:
    """Return the constants with the smallest mean error of these tables, where every machine of a
    table counts as much as every other.

    Each constant in turn is multiplied and divided by a factor, and keeps what is better; the
    factor shrinks where neither is. A constant that no row depends on keeps its default.
    """
    machines: dict[tuple[str, str], list[Measured]] = {}
    for row in (row for rows in known.values() for row in rows):
        machines.setdefault((row.table, row.cluster), []).append(row)

    def worth(constants: Constants) -> float:
        means = []
        for rows in machines.values():
            apart = np.abs(np.log1p(errors(rows, constants)))
            weights = [1.0 if row.nbytes >= MIB else SHORT for row in rows]
            means.append(np.average(apart, weights=weights))
        return float(np.mean(means))

    now = defaults()
    best = worth(now)
    factors = dict.fromkeys(FITTED, 1.4)
    for _ in range(ROUNDS):
        for constant in FITTED:
            for value in (now[constant] * factors[constant], now[constant] / factors[constant]):
                other = {**now, constant: value}
                found = worth(other)
                if found < best:
                    now = other
                    best = found
                    break
            else:
                factors[constant] **= 0.6
    return now


def defaults() -> dict[tuple[str, str], float]:
    """Return the constants of clusters.toml."""
    wires = {}
    for cluster in {row.cluster for rows in tables().values() for row in rows}:
        topology = _library(cluster).cluster.topology
        wires |= {wire.name: wire for wire in (topology.inside, topology.between) if wire}
    return {(wire, key): getattr(wires[wire], key) for wire, key in FITTED}


SHOWN = (1, 2, 4, 8, 16, 32, 64, 256, 1024)  # MiB


def section() -> str:
    """Return the section: a summary, and the errors of every table by size."""
    summary = [
        "| table | rows | 1 to 64 MiB: mean | worst | from 128 MiB: mean | left out: 1 to 64 MiB | "
        "from 128 MiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    by_size = [
        "| table, devices | " + " | ".join(f"{size} MiB" for size in SHOWN) + " |",
        "| --- |" + " ---: |" * len(SHOWN),
    ]
    means = []
    for table, rows in tables().items():
        others = fit({name: known for name, known in tables().items() if name != table})
        cells = []
        for constants in (defaults(), others):
            short = [row for row in rows if MIB <= row.nbytes <= 64 * MIB]
            long = [row for row in rows if row.nbytes > 64 * MIB]
            apart = np.abs(errors(short, constants))
            cells += [f"{apart.mean():.1%}", f"{apart.max():.1%}"]
            cells.append(f"{np.abs(errors(long, constants)).mean():.1%}" if long else "–")
            means.append((apart.mean(), np.abs(errors(long, constants)).mean() if long else np.nan))
        del cells[4]
        summary.append(f"| {table} | {len(rows)} | {' | '.join(cells)} |")
        for cluster in dict.fromkeys(row.cluster for row in rows):
            of = {row.nbytes // MIB: row for row in rows if row.cluster == cluster}
            told = [
                f"{errors([of[size]])[0]:+.0%}, {_told(of[size])}" if size in of else "–"
                for size in SHOWN
            ]
            by_size.append(f"| {table}, {cluster.split(':')[1]} | {' | '.join(told)} |")
    (short, long), (left, left_long) = (np.nanmean(np.array(means)[at::2], axis=0) for at in (0, 1))
    summary.append(
        f"| mean of the tables | | {short:.1%} | | {long:.1%} | {left:.1%} | {left_long:.1%} |"
    )
    return "\n".join(
        [
            HEAD,
            *summary,
            "",
            "The errors by size, and what NCCL is taken to choose:",
            "",
            *by_size,
            "",
        ]
    )


def _told(row: Measured) -> str:
    chosen = _chosen(row.cluster, row.nbytes)
    return chosen.name if "switch" in chosen.name else f"{chosen.name} {chosen.protocol.name}"


def main() -> None:
    """Print the section, or the constants."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fit", action="store_true", help="fit the constants, and print them")
    if parser.parse_args().fit:
        for (wire, key), value in fit(tables()).items():
            print(f"[wire.{wire}] {key} = {value:.3g}")
    else:
        print(section())


if __name__ == "__main__":
    main()
