"""The tables of `minidist bench kernels`: times on a GPU, or counts without one."""

from typing import Any

from rich.console import Console

from minidist.bench.kernels.case import COPY, EAGER
from minidist.bench.tables import new_table, notes, sizes


def show_kernels(result: dict[str, Any], console: Console) -> None:
    """Print the times, or the counts if nothing was timed."""
    (_show_counts if result["counts"] else _show_times)(result, console)


def _show_times(result: dict[str, Any], console: Console) -> None:
    """Print a row per contender: time, rate, fraction of the ceiling, speed relative to eager, and
    the last rung's verdict."""
    gpu = result["gpu"]
    ceilings = result["ceilings"]
    table = new_table(
        f"kernels at the sizes of a step of GPT-2 124M, {gpu['name']}, medians of "
        f"{result['rounds']}",
        "kernel",
        "",
        "dtype",
        "µs",
        "rate",
        "of a copy",
        "of cuBLAS",
        "beside eager",
        "aim",
        left=3,
    )
    table.columns[-1].justify = "left"
    rows = result["rows"]
    for index, row in enumerate(rows):
        first = index == 0 or rows[index - 1]["kernel"] != row["kernel"]
        last = index + 1 == len(rows) or rows[index + 1]["kernel"] != row["kernel"]
        table.add_row(
            row["kernel"] if first else "",
            row["contender"],
            row["dtype"],
            *_figures(row),
            row["verdict"],
            end_section=last,
        )
    console.print(table)
    matrix = ", ".join(
        f"{rate / 1e12:.0f} TFLOP/s in {kind}" for kind, rate in ceilings["matrix"].items()
    )
    notes(
        console,
        [
            f"measured: a copy of 1 GiB {ceilings['copy'] / 1e9:,.0f} GB/s, read and written; "
            f"cuBLAS {matrix}; driver {gpu['driver'] or '?'}, CuPy {gpu['cupy']}"
        ],
    )
    if any(row["kernel"] == "attention" and row["contender"] == EAGER for row in rows):
        notes(console, ["attention beside PyTorch is beside its flash backend"])
    notes(console, [f"left out: {line}" for line in result["left_out"]])


def _figures(row: dict[str, Any]) -> list[str]:
    """Return time, rate, fraction in its ceiling's column, speed relative to eager."""
    if row["seconds"] is None:
        return ["-"] * 5
    moves = row["held"] == COPY
    rate = f"{row['rate'] / 1e9:,.0f} GB/s" if moves else f"{row['rate'] / 1e12:,.1f} TFLOP/s"
    share = f"{row['fraction']:.1%}"
    beside = (
        ""
        if row["beside_eager"] is None or row["contender"] == EAGER
        else f"{row['beside_eager']:.2f}×"
    )
    return [
        f"{row['seconds'] * 1e6:,.1f}",
        rate,
        share if moves else "",
        "" if moves else share,
        beside,
    ]


def _show_counts(result: dict[str, Any], console: Console) -> None:
    """Print a row per rung: bytes by formula, asked for and fetched; the needed share; shared
    memory."""
    table = new_table(
        f"kernels, counted on the CPU build: {sizes(result)}",
        "kernel",
        "rung",
        "dtype",
        "launches",
        "least bytes",
        "asked for",
        "requests",
        "sectors",
        "asked / fetched",
        "needed",
        "shared bytes",
        "barriers",
        left=3,
    )
    rows = result["counts"]
    for index, row in enumerate(rows):
        first = index == 0 or rows[index - 1]["kernel"] != row["kernel"]
        last = index + 1 == len(rows) or rows[index + 1]["kernel"] != row["kernel"]
        numbers = [
            f"{row[name]:,}" for name in ("launches", "least", "asked", "requests", "sectors")
        ]
        table.add_row(
            row["kernel"] if first else "",
            row["rung"],
            row["dtype"],
            *numbers,
            f"{row['asked'] / row['fetched']:.2f}",
            f"{row['needed']:.1%}",
            f"{row['shared']:,}",
            f"{row['barriers']:,}",
            end_section=last,
        )
    console.print(table)
    notes(
        console,
        [
            "least bytes: each input and each output once. Sectors: of 32 bytes, that a warp's "
            "requests touch; fetched: 32 bytes for each, as if there were no caches",
            "asked / fetched: above 1 where lanes share a number. Needed: least bytes of those "
            "fetched. Small sizes: what a block reads or writes but once weighs more here than "
            "in a step",
            "time needs a GPU: minidist bench kernels; registers and spills: python -m "
            "minidist.kernels",
        ],
    )
