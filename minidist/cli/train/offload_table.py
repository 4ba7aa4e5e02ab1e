"""Offloading: bytes on host and disk, and bytes moved in a step, beside the formulas."""

from typing import Any

from rich.console import Console
from rich.table import Table

from minidist.parallel.hybrid.hybrid import Trainer
from minidist.parallel.memory.offload_costs import moved_to_disk, moved_to_host
from minidist.parallel.zero.memory_formula import Each


def offload_record(trainer: Trainer) -> dict[str, Any]:
    """One rank's host memory, disk bytes and moves in training steps; empty if the plan offloads nothing."""
    if trainer.plan.offload == "none":
        return {}
    return {"host_memory": trainer.store.host.snapshot(), "disk_bytes": trainer.store.disk_bytes(),
            "moved_bytes": dict(trainer.store.traffic.step),
            "moved_formula": {way: trainer.steps_done * nbytes for way, nbytes in moved_formula(trainer).items()}}


def moved_formula(trainer: Trainer) -> dict[str, int]:
    """Bytes that this rank should move in a step, by way."""
    plan, strategy = trainer.plan, trainer.strategy.data_axis   # type: Any, Any
    weights, masters = next(trainer.model.parameters()), plan.precision != "fp32"
    each = Each.of(weights.dtype.itemsize, moments=len(trainer.optimizer.state_names), masters=masters)
    learning = sum(piece.data.size for _, piece in strategy.updated())
    if plan.offload == "optimizer":
        return moved_to_host(learning, each, passes=plan.accumulate if strategy.reduces_each_pass else 1)
    units = sum(flat.chunk_size for unit in strategy.units for flat in unit.flats)
    return moved_to_disk(units, sum(flat.chunk_size for flat in strategy.root.flats), learning, each,
                         masters=masters, passes=plan.accumulate, keeps=plan.keep_gathered)


def on_device(held: dict[str, float], offload: str, zero: int) -> dict[str, float]:
    """Of the bytes by category that a rank holds, the part that stays on the device."""
    gone = {"none": (), "optimizer": ("optimizer",) if zero == 1 else ("optimizer", "gradients"),
            "all": ("optimizer", "gradients", "parameters")}[offload]
    return {category: 0 if category in gone else nbytes for category, nbytes in held.items()}


def print_offload(console: Console, metrics: dict[str, Any]) -> None:
    """Print the table of moves, and the bytes on rank 0's host and disk."""
    first, steps = metrics["ranks"][0], len(metrics["losses"])
    console.rule("what rank 0 moved in a step, in bytes, measured and by formula", style="dim", align="left")
    table = Table("way", header_style="bold")
    for column in ("bytes", "formula"):
        table.add_column(column, justify="right")
    for way, nbytes in sorted(first["moved_formula"].items()):
        table.add_row(way, f"{first['moved_bytes'].get(way, 0) // steps:,}", f"{nbytes // steps:,}")
    console.print(table)
    held = {name: now["peak"] for name, now in first["host_memory"].items() if now["peak"]}
    told = ", ".join(f"{name} {nbytes:,}" for name, nbytes in held.items())
    console.print(f"host memory of rank 0 at its peak: {told} bytes; on disk: {first['disk_bytes']:,}\n", markup=False)
