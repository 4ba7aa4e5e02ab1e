"""The tables of `minidist bench compress`."""

from typing import Any

from rich.console import Console

from minidist.bench.compress.links import bandwidth_text
from minidist.bench.compress.time_to_loss import best
from minidist.bench.compress.ways import PLAIN
from minidist.bench.tables import new_table, notes, sizes
from minidist.console import size_text


def show(result: dict[str, Any], console: Console) -> None:
    """Print the times to the target, or the advice."""
    if result["advise"]:
        for each in result["advice"]:
            _show_advice(each, result, console)
        _show_claims(result["claims"], result, console)
    else:
        _show_times(result, console)
    if result["bounds"]:
        notes(console, [bound["line"] for bound in result["bounds"]])


def _show_times(result: dict[str, Any], console: Console) -> None:
    """Print a row per way: its last loss, its bytes, and over each link the time to the target and
    the time of a step."""
    table = new_table(
        f"seconds until the validation loss is {result['target']:.4f} (ms a step), "
        f"{result['ranks']} ranks, {result['parameters'] / 1e6:.2f} million parameters: "
        f"{sizes(result)}",
        "",
        "last loss",
        "beside none",
        "a rank sends a step",
        *map(bandwidth_text, result["bandwidths"]),
    )
    for row in result["rows"]:
        cells = [
            "never"
            if cell["seconds"] is None
            else f"{cell['seconds']:,.1f} ({cell['step_seconds'] * 1e3:,.0f})"
            for cell in row["cells"]
        ]
        table.add_row(
            row["way"], f"{row['loss']:.4f}", beside_plain(row), size_text(row["nbytes"]), *cells
        )
    console.print(table)
    plain = next(row for row in result["rows"] if row["way"] == PLAIN)
    lines = []
    for index, bandwidth in enumerate(result["bandwidths"]):
        row = best(result["rows"], index)
        usual = plain["cells"][index]["seconds"]
        if row is not None and usual is not None:
            sooner = usual / row["cells"][index]["seconds"]
            lines.append(
                f"{bandwidth_text(bandwidth)}: soonest {row['way']}, {sooner:.1f} "
                f"times sooner than none, its last loss {beside_plain(row)}"
            )
    for cell in result["through"]:
        if cell["measured"] is not None:
            lines.append(
                f"run to the end: {cell['way']} at {bandwidth_text(cell['bandwidth'])}, "
                f"{cell['steps']} steps in {cell['measured']:,.1f} s, steps × median step "
                f"{cell['predicted']:,.1f} s ({cell['measured'] / cell['predicted'] - 1:+.1%}), "
                f"loss {cell['loss']:.4f}"
            )
    notes(console, lines)


def beside_plain(row: dict[str, Any]) -> str:
    """Return how far the last loss is above that of `none`; trainings with the adaptive ratio end
    at the target."""
    return "at the target" if row["above_plain"] is None else f"{row['above_plain']:+.1%}"


def _show_advice(each: dict[str, Any], result: dict[str, Any], console: Console) -> None:
    """Print a row per scheme: speed relative to plain buckets, predicted and measured, and
    break-evens."""
    checked = each["score"][1] > 0 or any(
        cell["measured"] for row in each["rows"] for cell in row["cells"]
    )
    table = new_table(
        f"times faster than plain buckets{', predicted · measured' * checked}, {each['ranks']} "
        "ranks: " + sizes(result),
        "",
        "a rank sends a step",
        *map(bandwidth_text, result["bandwidths"]),
        "break-even",
        *(["measured"] * checked),
    )
    for row in each["rows"]:
        edge = (
            "always faster"
            if row["always"]
            else bandwidth_text(row["break_even"])
            if row["break_even"]
            else "never"
        )
        seen = row["measured_break_even"]
        table.add_row(
            row["way"],
            size_text(row["nbytes"]),
            *map(_cell, row["cells"]),
            edge,
            *([bandwidth_text(seen) if seen else "-"] * checked),
        )
    console.print(table)
    right, counted = each["score"]
    if checked:
        notes(
            console,
            [
                f"the advice was right in {right} of {counted} cells; ✗: it was wrong; ~: the "
                "two times differ by less than 5 %, so the cell does not count"
            ],
        )
    else:
        notes(console, ["above 1: compress; --check measures each cell"])


def _cell(cell: dict[str, Any]) -> str:
    plain, scheme = cell["predicted"]
    text = f"{plain / scheme:.2f}"
    if cell["measured"] is None:
        return text
    mark = {None: " ~", True: "", False: " ✗"}[cell["right"]]
    return f"{text} · {cell['measured'][0] / cell['measured'][1]:.2f}{mark}"


def _show_claims(claims: dict[str, Any], result: dict[str, Any], console: Console) -> None:
    """Print a row per length of the warm-up."""
    table = new_table(
        f"1-bit Adam, {claims['ranks']} ranks, by the model: times fewer bytes (the notes: 5), "
        "times sooner (3.5)",
        "warm-up",
        "fewer than fp16",
        "fewer than fp32",
        *map(bandwidth_text, result["bandwidths"]),
        "3.5 times below",
    )
    for row in claims["rows"]:
        edge = row["bandwidth"]
        table.add_row(
            f"{row['warmup']:.0%} of the steps",
            f"{row['bytes_fp16']:.2f}",
            f"{row['bytes_fp32']:.2f}",
            *(f"{speed:.2f}" for speed in row["speeds"]),
            bandwidth_text(edge) if edge else "no link",
        )
    console.print(table)
    notes(console, [f"after the warm-up a number takes {claims['bits']:.2f} bits; in it 16 or 32"])
