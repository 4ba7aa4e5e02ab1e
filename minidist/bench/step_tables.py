"""The tables of `minidist bench step --device`: contenders, memory by category, and the parts of the floor."""

from typing import Any

from rich.console import Console

from minidist.bench.step import OURS
from minidist.bench.step_device import COMPILED, EAGER
from minidist.bench.tables import new_table


def show_device(result: dict[str, Any], console: Console) -> None:
    """A row for each contender, then what the step must do at least, part by part."""
    model, rows, cuda = result["model"], result["rows"], result["device"] == "cuda"
    sizes = ", ".join(f"{name} {value}" for name, value in model.items())
    where = result["ceilings"]["about"]["name"] if cuda else "cpu, one thread"
    table = new_table(f"training step, {where}, {result['precision']}: {sizes}")
    for column in ("", "ms a step", "tokens/s", "beside eager", "beside compile", "of products' rate", "of the floor",
                   "peak MiB held" if cuda else "peak MiB above import"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        table.add_row(row["name"], f"{row['step_seconds'] * 1e3:,.2f}", f"{row['tokens_per_second']:,.0f}",
                      _beside(row, rows, EAGER), _beside(row, rows, COMPILED), f"{row['utilisation']:.1%}",
                      f"{row['of_floor']:.1%}", f"{row['peak_bytes'] / 2 ** 20:,.0f}")
    console.print(table)
    _show_parts(result, console)
    held = next(row["memory"] for row in rows if row["name"] == OURS)
    console.print("minidist's peak by category, MiB: " + ", ".join(
        f"{name} {nbytes / 2 ** 20:,.1f}" for name, nbytes in held.items() if nbytes), style="dim")
    for line in result["left_out"]:
        console.print(line, style="dim", markup=False)


def _beside(row: dict[str, Any], rows: list[dict[str, Any]], name: str) -> str:
    """Its tokens/s over that contender's."""
    other = next((other for other in rows if other["name"] == name and other is not row), None)
    return "" if other is None else f"{row['tokens_per_second'] / other['tokens_per_second']:.2f}×"


def _show_parts(result: dict[str, Any], console: Console) -> None:
    """The floor, part by part."""
    ceilings = result["ceilings"]
    table = new_table("the floor: what a step computes and moves at least, at the measured rates")
    for column in ("part", "GFLOP", "MB", "ms at least"):
        table.add_column(column, justify="right" if column != "part" else "left")
    total = {name: sum(part[name] for part in result["parts"]) for name in ("operations", "bytes", "seconds")}
    for part in [*result["parts"], {"name": "step", **total}]:
        table.add_row(part["name"], f"{part['operations'] / 1e9:,.2f}" if part["operations"] else "",
                      f"{part['bytes'] / 1e6:,.1f}", f"{part['seconds'] * 1e3:,.3f}",
                      end_section=part is result["parts"][-1])
    console.print(table)
    console.print(f"measured: matrix products {ceilings['matrix'] / 1e12:,.3g} TFLOP/s, a copy "
                  f"{ceilings['copy'] / 1e9:,.3g} GB/s, read and written; {result['parameters']:,} parameters",
                  style="dim")
