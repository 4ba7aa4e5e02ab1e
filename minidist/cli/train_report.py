"""What a training run leaves: metrics, tables that hold measured beside formula, and the run folder."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import minidist
from minidist.cli.common import write_json
from minidist.comm.costs import sent_bytes, sent_messages
from minidist.comm.group import Group
from minidist.errors import ConfigError
from minidist.observe.page import size_text
from minidist.observe.plots import draw_loss
from minidist.observe.timeline import Timeline, write_perfetto
from minidist.parallel.ddp import DDP
from minidist.parallel.hybrid import Trainer

Metrics = dict[str, Any]


def rank_record(trainer: Trainer, world: Group) -> dict[str, Any]:
    """What one rank tells of itself: its place, what it sent in training steps, what fills its memory."""
    formula = gradient_formula(trainer, world.rank)
    return {"rank": world.rank, "coordinates": {axis: place for axis, place in trainer.mesh.coordinates.items()
                                                if axis == "dp" or trainer.mesh.shape[axis] > 1},
            "sent_bytes": world.ledger.sent_bytes("step"), "messages": world.ledger.messages("step"),
            "memory": trainer.account.snapshot(), "formula": formula, "weights_sha256": trainer.weights_sha256()}


def gradient_formula(trainer: Trainer, rank: int) -> dict[str, int]:
    """Bytes and messages that the all-reduces of all steps should have sent from rank `rank`: the sum over buckets."""
    strategy = trainer.strategy
    if not isinstance(strategy, DDP):
        return {"bytes": 0, "messages": 0}
    size, algorithm = strategy.group.size, strategy.algorithm
    nbytes = messages = 0
    for bucket in strategy.buckets:
        nbytes += sent_bytes("all_reduce", algorithm, size, rank, bucket.data.size, bucket.data.itemsize)
        messages += sent_messages("all_reduce", algorithm, size, rank)
    return {"bytes": nbytes * trainer.steps_done, "messages": messages * trainer.steps_done}


def parameter_counts(trainer: Trainer) -> dict[str, int]:
    """Numbers and bytes of the model's parameters."""
    arrays = [p.data for p in trainer.model.parameters()]
    return {"parameters": sum(a.size for a in arrays), "parameter_bytes": sum(a.nbytes for a in arrays)}


def moments(trainer: Trainer) -> int:
    """Arrays like the parameters that the optimizer keeps: 2 for Adam."""
    return len(trainer.optimizer.state_names)


def median_rate(step_seconds: Sequence[float], tokens: int) -> tuple[float, float]:
    """Median seconds a step, and the tokens/s of a step of `tokens` tokens at that pace."""
    median = statistics.median(step_seconds)
    return median, tokens / median


# ---------------------------------------------------------------------------------------------------- the run folder

def write_folder(folder: Path, metrics: Metrics, timelines: list[Timeline], weights: dict[str, np.ndarray]) -> None:
    """metrics.json, trace.json, loss.png and model.safetensors.

    Raises:  ConfigError if the folder cannot be written.
    """
    from safetensors.numpy import save_file

    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "metrics.json", metrics)
        write_perfetto(folder / "trace.json", timelines)
        draw_loss(folder / "loss.png", metrics["losses"], validation=metrics["validation_loss"],
                  title=f"{metrics['parameters']:,} parameters, {metrics['size']} ranks over {metrics['transport']}")
        save_file({name: np.ascontiguousarray(array) for name, array in weights.items()}, folder / "model.safetensors",
                  metadata={"config": json.dumps(metrics["config"]), "minidist": minidist.__version__})
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error.strerror or error}") from error


# --------------------------------------------------------------------------------------------------------- the screen

def print_report(console: Console, metrics: Metrics, sample: str, folder: Path) -> None:
    """Losses, the sample, the ledger and the memory account beside their formulas, and where the files are."""
    recent = metrics["losses"][-max(1, len(metrics["losses"]) // 20):]
    console.print(f"\ntraining loss {statistics.fmean(recent):.4f} (mean of the last {len(recent)} steps), "
                  f"validation loss {metrics['validation_loss']:.4f} nats a token; "
                  f"guessing blindly gives {np.log(metrics['config']['vocabulary']):.2f}", markup=False)
    console.print(f"{metrics['step_seconds'] * 1e3:,.1f} ms a step (median), {metrics['tokens_per_second']:,.0f} tokens/s, "
                  f"{metrics['parameters']:,} parameters, {metrics['size']} rank{'s' * (metrics['size'] > 1)} over "
                  f"{metrics['transport']}, {metrics['threads']} BLAS thread{'s' * (metrics['threads'] > 1)} each\n",
                  markup=False)
    console.rule("a sample of what it learned", style="dim", align="left")
    console.print(sample, markup=False, soft_wrap=True)
    console.print(traffic_table(metrics))
    console.print(memory_table(metrics))
    console.print(f"{folder}/: metrics.json, trace.json (open at https://ui.perfetto.dev), loss.png, model.safetensors",
                  markup=False, soft_wrap=True)


def traffic_table(metrics: Metrics) -> Table:
    """Each rank's gradient bytes and messages a step beside the formula."""
    size, steps = metrics["size"], len(metrics["losses"])
    ideal = 2 * (size - 1) / size * metrics["parameter_bytes"]
    table = Table(title=f"sent for gradients, a step and rank; 2(P-1)/P × {size_text(metrics['parameter_bytes'])} of "
                        f"gradients = {size_text(ideal)}", title_justify="left", header_style="bold")
    for column in ("rank", "bytes", "formula, chunk by chunk", "2(P-1)/P × gradient bytes", "messages", "2(P-1) × buckets"):
        table.add_column(column, justify="right")
    for rank in metrics["ranks"]:
        sent = rank["sent_bytes"].get("dp", {}).get("all_reduce", 0)
        messages = rank["messages"].get("dp", {}).get("all_reduce", 0)
        table.add_row(str(rank["rank"]), f"{sent // steps:,}", f"{rank['formula']['bytes'] // steps:,}", f"{ideal:,.1f}",
                      f"{messages // steps:,}", f"{rank['formula']['messages'] // steps:,}")
    return table


def memory_table(metrics: Metrics) -> Table:
    """Rank 0's memory by category, now and at the peak, beside what theory says of it."""
    count, nbytes = metrics["parameters"], metrics["parameter_bytes"]
    itemsize, moments = nbytes // count, metrics["optimizer_moments"]
    formulas = {"parameters": (itemsize, f"{itemsize} bytes a parameter"),
                "gradients": (itemsize, f"{itemsize} bytes a parameter"),
                "optimizer": (itemsize * moments, f"{itemsize * moments} bytes a parameter ({moments} × {itemsize})")}
    table = Table(title=f"memory of rank 0; parameters + gradients + optimizer = {itemsize * (2 + moments)} bytes a parameter",
                  title_justify="left", header_style="bold")
    for column in ("what", "now", "peak", "formula"):
        table.add_column(column, justify="left" if column == "what" else "right")
    table.add_column("", justify="left")
    for category, bytes_of in metrics["ranks"][0]["memory"].items():
        each, words = formulas.get(category, (0, ""))
        table.add_row(category, f"{bytes_of['now']:,}", f"{bytes_of['peak']:,}", f"{each * count:,}" if each else "", words,
                      end_section=category == "workspace")
    return table
