"""Chapter 24 · All-reduces that others measured, beside what library.py says of them.

    tables()                                   # rows of published/collectives/*.csv, by table
    errors(tables()["vidur-a100"])             # predicted / measured - 1
    fit(tables())                              # the constants of clusters.toml that fit best

    python -m minidist.simulate.measured_calls     # prints them: some seconds

The constants of clusters.toml with the source "measured: published/collectives" are from fit() on
these tables and two more, whose source could not be named and which are not kept. fit() on these
alone moves them by up to 14 %, and is as far from the tables in the mean. Lesson 24's CALIBRATION.md
tells the errors, and those of constants that were fitted without the table that they are tried on.
"""

import csv
from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from minidist.simulate.cluster import Cluster
from minidist.simulate.library import Chosen, Library
from minidist.simulate.messages import Operands
from minidist.simulate.runs import PUBLISHED
from minidist.simulate.topology import Wire
from minidist.simulate.walk import library_of

MIB = 1 << 20
FITTED = (
    ("nvlink3", "start"),
    ("nvlink3", "ll128"),
    ("nvlink3", "fill"),
    ("nvlink4", "start"),
    ("nvlink4", "fill"),
)
"""Constants of clusters.toml, by wire and key. NVLink 4's LL128 keeps NCCL's share: only trees show
it."""
SHORT = 0.25  # weight of an array below 1 MiB
ROUNDS = 12  # of the search


class MeasuredCall(NamedTuple):
    """An all-reduce that was measured."""

    table: str
    cluster: str  # "a100-80g:1x8"
    nbytes: int
    way: str  # that NCCL was told to take; "": it chose
    seconds: float


Constants = Mapping[tuple[str, str], float]
"""By wire and key."""
DEFAULT: Constants = MappingProxyType({})
"""Those of clusters.toml."""


@lru_cache(maxsize=1)
def tables() -> dict[str, list[MeasuredCall]]:
    """Return the rows of every table."""
    found = {}
    for path in sorted((PUBLISHED / "collectives").glob("*.csv")):
        with path.open(encoding="utf-8") as lines:
            found[path.stem] = [
                MeasuredCall(
                    path.stem,
                    f"{row['cluster']}:{row['devices']}",
                    int(row["bytes"]),
                    row.get("way") or "",
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
def chosen(cluster: str, nbytes: int, way: str) -> Chosen:
    """Return what NCCL chooses, on which no fitted constant acts."""
    return _library(cluster).chosen("all_reduce", Operands(nbytes), way)


def predicted(rows: Iterable[MeasuredCall], constants: Constants = DEFAULT) -> np.ndarray:
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
        seconds.append(
            libraries[row.cluster].seconds(chosen(row.cluster, row.nbytes, row.way), row.nbytes)
        )
    return np.array(seconds)


def errors(rows: Iterable[MeasuredCall], constants: Constants = DEFAULT) -> np.ndarray:
    """Return predicted / measured - 1 of rows."""
    rows = list(rows)
    return predicted(rows, constants) / [row.seconds for row in rows] - 1


def fit(known: Mapping[str, list[MeasuredCall]]) -> Constants:
    """Return the constants with the smallest mean error of these tables, where every machine of a
    table counts as much as every other.

    Each constant in turn is multiplied and divided by a factor, and keeps what is better; the
    factor shrinks where neither is. A constant that no row depends on keeps its default.
    """
    machines: dict[tuple[str, str], list[MeasuredCall]] = {}
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
    wires: dict[str, Wire] = {}
    for cluster in {row.cluster for rows in tables().values() for row in rows}:
        topology = _library(cluster).cluster.topology
        wires |= {wire.name: wire for wire in (topology.inside, topology.between) if wire}
    return {(wire, key): getattr(wires[wire], key) for wire, key in FITTED}


if __name__ == "__main__":
    for (_wire, _key), _value in fit(tables()).items():
        print(f"[wire.{_wire}] {_key} = {_value:.3g}")
