"""The tables of `minidist bench step`, one per way of measuring."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console

from minidist.bench.step.device import COMPILED, EAGER
from minidist.bench.step.plan import plan_label
from minidist.bench.step.ranks import OURS, PEER, SEPARATE, STAGES
from minidist.bench.tables import INSTALL_GLOO, new_table, notes, sizes

ABOUT_SEPARATE = (
    "separate: as many processes of ours that do not communicate: what this machine's cores give"
)
WITHOUT_PYTORCH = f"PyTorch was left out: {INSTALL_GLOO}"


def show_device(result: dict[str, Any], console: Console) -> None:
    """Print a row per contender, then the floor of the step, part by part."""
    rows = result["rows"]
    cuda = result["device"] == "cuda"
    where = result["ceilings"]["about"]["name"] if cuda else "cpu, one thread"
    table = new_table(
        f"training step, {where}, {result['precision']}: {sizes(result)}",
        "",
        "ms a step",
        "tokens/s",
        "beside eager",
        "beside compile",
        "of products' rate",
        "of the floor",
        "peak MiB held" if cuda else "peak MiB above import",
    )
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['step_seconds'] * 1e3:,.2f}",
            f"{row['tokens_per_second']:,.0f}",
            _beside(row, rows, EAGER),
            _beside(row, rows, COMPILED),
            f"{row['utilisation']:.1%}",
            f"{row['of_floor']:.1%}",
            f"{row['peak_bytes'] / 2**20:,.0f}",
        )
    console.print(table)
    _show_parts(result, console)
    held = next(row["memory"] for row in rows if row["name"] == OURS)
    notes(
        console,
        [
            "minidist's peak by category, MiB: "
            + ", ".join(f"{name} {nbytes / 2**20:,.1f}" for name, nbytes in held.items() if nbytes),
            *result["left_out"],
        ],
    )


def _beside(row: dict[str, Any], rows: list[dict[str, Any]], name: str) -> str:
    """Return the row's tokens/s / those of contender `name`."""
    other = next((other for other in rows if other["name"] == name and other is not row), None)
    return "" if other is None else f"{row['tokens_per_second'] / other['tokens_per_second']:.2f}×"


def _show_parts(result: dict[str, Any], console: Console) -> None:
    """Print the floor, part by part."""
    ceilings = result["ceilings"]
    table = new_table(
        "the floor: what a step computes and moves at least, at the measured rates",
        "part",
        "GFLOP",
        "MB",
        "ms at least",
    )
    total = {
        name: sum(part[name] for part in result["parts"])
        for name in ("operations", "bytes", "seconds")
    }
    for part in [*result["parts"], {"name": "step", **total}]:
        table.add_row(
            part["name"],
            f"{part['operations'] / 1e9:,.2f}" if part["operations"] else "",
            f"{part['bytes'] / 1e6:,.1f}",
            f"{part['seconds'] * 1e3:,.3f}",
            end_section=part is result["parts"][-1],
        )
    console.print(table)
    notes(
        console,
        [
            f"measured: matrix products {ceilings['matrix'] / 1e12:,.3g} TFLOP/s, a copy "
            f"{ceilings['copy'] / 1e9:,.3g} GB/s, read and written; {result['parameters']:,} "
            "parameters"
        ],
    )


def show_step(result: dict[str, Any], console: Console) -> None:
    """Print a row per contender and rank count."""
    rows = result["rows"]
    # results before 2026-11-29 have none
    processor = ["ms of processor"] if all("processor_seconds" in row for row in rows) else []
    table = new_table(
        f"training step: {sizes(result)}",
        "",
        "ranks",
        "ms a step",
        *processor,
        "tokens/s",
        "of its 1 rank",
        "beside PyTorch",
        "peak MiB above import",
    )
    for row in rows:
        table.add_row(
            row["name"],
            str(row["ranks"]),
            f"{row['step_seconds'] * 1e3:.1f}",
            *[f"{row['processor_seconds'] * 1e3:.1f}" for _ in processor],
            f"{row['tokens_per_second']:,.0f}",
            _ratio(row, rows, name=_alone(row), ranks=1),
            _ratio(row, rows, name="PyTorch", ranks=row["ranks"]),
            f"{row['peak_bytes'] / 2**20:.0f}",
        )
    console.print(table)
    if any(row["name"] == SEPARATE for row in rows):
        notes(console, [ABOUT_SEPARATE])
    if not any(row["name"] == PEER for row in rows):
        notes(console, [WITHOUT_PYTORCH])


def show_stages(result: dict[str, Any], console: Console) -> None:
    """Print a row per contender, rank count and stage, with our speed as a multiple of each
    peer's."""
    rows = result["rows"]
    table = new_table(
        f"training step: {sizes(result)}",
        "stage",
        "",
        "ranks",
        "ms a step",
        "tokens/s",
        "ours beside it",
        "peak MiB above import",
        left=2,
    )
    for index, row in enumerate(rows):
        ours = next(
            other
            for other in rows
            if other["name"] == OURS
            and other["zero"] == row["zero"]
            and other["ranks"] == row["ranks"]
        )
        name = row["name"] if row is ours else f"PyTorch {row['name']}"
        ratio = "" if row is ours else f"{row['step_seconds'] / ours['step_seconds']:.2f}×"
        last = index + 1 == len(rows) or rows[index + 1]["name"] == OURS
        table.add_row(
            STAGES[row["zero"]],
            name,
            str(row["ranks"]),
            f"{row['step_seconds'] * 1e3:.1f}",
            f"{row['tokens_per_second']:,.0f}",
            ratio,
            f"{row['peak_bytes'] / 2**20:.0f}",
            end_section=last,
        )
    console.print(table)
    notes(console, [f"left out: {line}" for line in result["left_out"]])
    if all(row["name"] == OURS for row in rows) and not result["left_out"]:
        notes(console, [WITHOUT_PYTORCH])


def show_plans(result: dict[str, Any], console: Console) -> None:
    """Print a section per plan: our ranks, those that train separately, and PyTorch's, with our
    speed as a multiple of each."""
    rows = result["rows"]
    table = new_table(
        f"training step: {sizes(result)}",
        "plan",
        "",
        "ranks",
        "ms a step",
        "tokens/s",
        "of its 1 rank",
        "ours beside it",
        left=2,
    )
    for row in rows:
        section = [other for other in rows if other["plan"] == row["plan"]]
        ratio = (
            ""
            if row is section[0]
            else f"{section[0]['tokens_per_second'] / row['tokens_per_second']:.2f}×"
        )
        table.add_row(
            row["plan"] if row is section[0] else "",
            plan_label(row),
            str(row["ranks"]),
            f"{row['step_seconds'] * 1e3:.1f}",
            f"{row['tokens_per_second']:,.0f}",
            _ratio(row, section, name=_alone(row), ranks=1),
            ratio,
            end_section=row is section[-1],
        )
    console.print(table)
    notes(console, [ABOUT_SEPARATE, *(f"left out: {line}" for line in result["left_out"])])
    if all(row["name"] != PEER for row in rows):
        notes(console, [WITHOUT_PYTORCH])


def plan_line(rows: Sequence[dict[str, Any]]) -> str:
    """Return a plan's contenders in one line: "pp=2, 1f1b × 8: minidist on 2 251.3 ms a step,
    16,301 tokens/s; …"."""
    return f"{rows[0]['plan']}: " + "; ".join(
        f"{plan_label(row)} on {row['ranks']} {row['step_seconds'] * 1e3:.1f} ms a step, "
        f"{row['tokens_per_second']:,.0f} tokens/s"
        for row in rows
    )


def _alone(row: dict[str, Any]) -> str:
    """Return the contender whose single rank is the base of a row's scaling."""
    return OURS if row["name"] == SEPARATE else row["name"]


def _ratio(row: dict[str, Any], rows: Iterable[dict[str, Any]], *, name: str, ranks: int) -> str:
    """Return `row`'s tokens/s / those of contender `name` at `ranks`, as text."""
    for other in rows:
        if other["name"] == name and other["ranks"] == ranks and other is not row:
            return f"{row['tokens_per_second'] / other['tokens_per_second']:.2f}×"
    return ""
