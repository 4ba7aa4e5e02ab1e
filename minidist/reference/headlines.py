"""Each result in one line, for the first page of docs/measured: ratios, computed from the file of the
result."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from minidist.bench.step.ranks import OURS, PEER

Values = dict[str, Any]
PEERS = {"tcp": "gloo", "shm": "MPI_"}
"""{transport: the beginning of the peer's name that carries bytes the same way}."""
LEAST_BYTES = {"tcp": 0, "shm": 1 << 20}
"""{transport: smallest message of its headline}; shm is compared from 1 MiB up."""


def headline(values: Values) -> str:
    """Return the line of a result; "" for a kind that has none.

    Args:    values: what the file of the result holds.
    """
    if "faults" in values:
        return (
            f"{values['recovered']} of {values['faults']} faults survived, {values['kept']:.1%} of "
            "the steps kept"
        )
    if "seconds" in values:
        return _collective(values)
    if values["what"] == "step":
        return _step(values)
    line = _LINES.get(values["what"])
    return line(values) if line else ""


def _collective(values: Values) -> str:
    """Return our speed as a multiple of the peer's: geometric mean over the sizes, per rank
    count."""
    parts = []
    for transport, peer in PEERS.items():
        means = []
        for ranks, seconds in values["seconds"].items():
            theirs = [times for name, times in seconds.items() if name.startswith(peer)]
            if transport not in seconds or not theirs:
                continue
            ratios = [
                theirs[0][size] / mine
                for size, mine in seconds[transport].items()
                if int(size) >= LEAST_BYTES[transport]
            ]
            means.append(f"{_geometric_mean(ratios):.2f} ({ranks} ranks)")
        if means:
            least = " from 1 MiB up" if LEAST_BYTES[transport] else ""
            parts.append(f"{transport}{least} {', '.join(means)} times as fast as {_name(peer)}")
    return "; ".join(parts)


def _name(peer: str) -> str:
    return "MPICH" if peer == "MPI_" else peer


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))


def _step(values: Values) -> str:
    rows = values["rows"]
    if "device" in values:
        return ", ".join(f"{row['name']} {row['step_seconds'] * 1e3:.1f} ms" for row in rows)
    parts = []
    for given, key in (("zero", "zero"), ("plans", "plan")):
        if values.get(given):
            for value in dict.fromkeys(row[key] for row in rows):
                parts += _of_section(key, value, [row for row in rows if row[key] == value])
            return "; ".join(parts)
    for ranks in dict.fromkeys(row["ranks"] for row in rows):
        there = {row["name"]: row for row in rows if row["ranks"] == ranks}
        if OURS in there and PEER in there:
            ratio = there[PEER]["step_seconds"] / there[OURS]["step_seconds"]
            said = f"{ranks} rank{'s' * (ranks > 1)}: {ratio:.2f} times PyTorch's speed"
            if "processor_seconds" in there[OURS]:
                ratio = there[PEER]["processor_seconds"] / there[OURS]["processor_seconds"]
                said += f" ({ratio:.2f} in processor time)"
            parts.append(said)
    return "; ".join(parts)


def _of_section(key: str, value: Any, rows: Sequence[Values]) -> list[str]:
    """Return our speed compared with the best peer's, of one ZeRO stage or plan, per rank count."""
    title = str(value) if key == "plan" else f"ZeRO-{value}" if value else "DDP"
    parts = []
    for ranks in sorted({row["ranks"] for row in rows}):
        there = [row for row in rows if row["ranks"] == ranks]
        if key == "plan":
            there = [row for row in there if row["cut"]]
        ours = [row["step_seconds"] for row in there if row["name"] == OURS]
        theirs = [row["step_seconds"] for row in there if row["name"] != OURS]
        if ours and theirs:
            parts.append(f"{title} on {ranks}: {min(theirs) / ours[0]:.2f} times PyTorch's speed")
    return parts


def _overlap(values: Values) -> str:
    return "; ".join(
        f"{row['name']}: {row['of_longer']:.2f} times the longer of the two"
        for row in values["rows"]
        if row["name"] == "delayed"
    )


def _overlap_step(values: Values) -> str:
    hidden = ", ".join(
        f"{row['name'].removesuffix(', delayed')} {row['share']:.0%}"
        for row in values["rows"]
        if row["link"] == "delayed"
    )
    return f"hidden over slow links: {hidden}"


def _save(values: Values) -> str:
    return "; ".join(
        f"{row['name']}, {row['way']}: {row['mib_per_second']:.0f} MiB/s" for row in values["rows"]
    )


_LINES: dict[str, Callable[[Values], str]] = {
    "overlap": _overlap,
    "overlap-step": _overlap_step,
    "save": _save,
}
