"""The report of `minidist train` on the terminal: tables of measured values and formulas."""

import shlex
from math import log
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from minidist.cli.train import axis_traffic, central_traffic, compressed_traffic
from minidist.cli.train.save_interval import summary
from minidist.console import exactly, plural
from minidist.observe.energy import energy_in_words
from minidist.observe.step_log import loss_text
from minidist.observe.why_report import causes_line, foresight_line, headline, why_table
from minidist.parallel.zero.memory_formula import STATE, Each, state_bytes

Metrics = dict[str, Any]
BARS = "▁▂▃▄▅▆▇█"


def print_report(console: Console, metrics: Metrics, sample: str | None, folder: Path) -> None:
    """Print losses, the sample, the traffic and memory tables with their formulas, and where the
    files are.

    Args:    metrics: without "formula" if that work failed; then the tables are left out.
             sample: None if none could be written.
    """
    _print_summary(console, metrics)
    if sample is not None:
        _rule(console, "a sample: lines it has not seen, and how it goes on (▸)")
        console.print(f"{sample}\n", markup=False, soft_wrap=True)
    if "formula" in metrics:
        _print_measured(console, metrics)
    if "why" in metrics:
        _rule(console, f"why step {metrics['why']['step']} took as long as it did")
        console.print(headline(metrics["why"]), markup=False, soft_wrap=True)
        console.print(why_table(metrics["why"], title=""))
        console.print(causes_line(metrics["why"]), markup=False, soft_wrap=True)
        console.print(foresight_line(metrics["why"]["foresight"]), markup=False, soft_wrap=True)
    there = {
        name: name
        for name in ("trace.json", "loss.png", "why.png", "model.safetensors")
        if name in metrics["files"]
    }
    if "trace.json" in there:
        there["trace.json"] += " (open at https://ui.perfetto.dev)"
    console.print(
        f"{folder}/: metrics.json, metrics.jsonl (a line a step), {', '.join(there.values())}",
        markup=False,
        soft_wrap=True,
    )
    if "trace" in metrics and (left_out := metrics["trace"]["left_out"]):
        console.print(
            f"trace.json shows the begin and the end of the run: {metrics['trace']['spans']:,} "
            f"spans, {left_out:,} between them are left out",
            markup=False,
            soft_wrap=True,
        )
    _print_what_next(console, metrics, folder)


def _print_what_next(console: Console, metrics: Metrics, folder: Path) -> None:
    """Print commands that show the run, write text, explain its strategy, and continue it."""
    saved = metrics["checkpoint"]
    quoted = shlex.quote(str(folder))
    lesson = lesson_of(metrics["plan"])
    beginning = '--prompt "…"' if metrics["vocabulary"] else "--ids 1,2,3"
    for line in (
        f"see it all:  minidist report {quoted}  (one HTML page)",
        f"write text:  minidist sample {quoted} {beginning}",
        f"how it works:  minidist lesson {lesson}  (what moved in these steps, and why)",
    ):
        console.print(line, markup=False, soft_wrap=True)
    if saved is None:
        return
    if saved["folder"] is not None:
        steps = len(metrics["losses"])
        console.print(
            f"train more:  minidist train --resume {quoted} --steps {2 * steps}",
            markup=False,
            soft_wrap=True,
        )
    told = f"{plural(len(saved['steps']), 'checkpoint')} saved" + (
        f" in {sum(saved['seconds']):.2f} s" if saved["steps"] else ""
    )
    failed = f", {plural(saved['failed'], 'save')} failed" if saved["failed"] else ""
    console.print(
        f"{told}{failed}; look into them:  minidist checkpoint {quoted}",
        markup=False,
        soft_wrap=True,
    )
    if saved["goodput"] is not None:
        console.print(summary(saved["goodput"]), markup=False, soft_wrap=True)


def lesson_of(plan: Metrics) -> str:
    """Return the number of the lesson that explains what a plan does beyond one process."""
    axes = [axis for axis in ("pp", "ep", "cp", "tp") if plan[axis] > 1]
    if len(axes) > 1 or (axes and plan["dp"] > 1):
        return "17"
    if axes:
        return {"pp": "11", "ep": "18", "cp": "13", "tp": "12"}[axes[0]]
    if plan["strategy"] != "ddp":
        return {"data-parallel": "05", "parameter-server": "06"}[plan["strategy"]]
    if plan["offload"] != "none":
        return "20"
    if plan["zero"]:
        return str(13 + plan["zero"])
    if plan["local_steps"] is not None or plan["compress"] != "none":
        return "21"
    return "07" if plan["dp"] > 1 else "00"


def _rule(console: Console, title: str) -> None:
    console.rule(title, style="dim", align="left")


def _print_summary(console: Console, metrics: Metrics) -> None:
    """Print losses and speed."""
    recent = metrics["losses"][-max(1, len(metrics["losses"]) // 20) :]
    console.print(
        f"\ntraining loss {fmean(recent):.4f} (mean of the last {plural(len(recent), 'step')}), "
        f"validation loss {loss_text(metrics['validation_loss'])} nats a token; "
        f"guessing blindly gives {log(metrics['config']['vocabulary']):.2f}",
        markup=False,
    )
    console.print(
        f"{metrics['step_seconds'] * 1e3:,.1f} ms a step (median), "
        f"{metrics['tokens_per_second']:,.0f} tokens/s, {metrics['parameters']:,} parameters, "
        f"{plural(metrics['size'], 'rank')} over {metrics['transport']}, "
        f"{plural(metrics['threads'], 'BLAS thread')} each",
        markup=False,
    )
    if metrics["energy"] is not None:
        console.print(energy_in_words(metrics["energy"]), markup=False, soft_wrap=True)
    if "elastic" in metrics:
        sizes = [str(generation["size"]) for generation in metrics["elastic"]]
        told = ", ".join(sizes if len(sizes) <= 8 else ["…", *sizes[-8:]])
        console.print(
            f"{plural(len(sizes), 'generation')} of {told} ranks (elastic.jsonl); the tables are "
            "of the last",
            markup=False,
        )
    if "adapt" in metrics:
        for line in adapt_lines(metrics["adapt"]):
            console.print(line, markup=False, soft_wrap=True)
    if metrics["skipped_steps"]:
        console.print(
            f"{plural(metrics['skipped_steps'], 'step')} skipped, whose gradients overflowed "
            "float16 under the loss scale",
            markup=False,
        )
    console.print()


def adapt_lines(adapt: Metrics) -> list[str]:
    """Return what --adapt did, in lines: each change with its gain and its price, then what the
    tables count."""
    changes = adapt["changes"]
    asked = f"the planner was asked {plural(adapt['questions'], 'time')}"
    if not changes:
        return [f"{asked}; no change of plan paid"]
    return [
        *(change["line"] for change in changes),
        f"{asked}; the tables are of the steps under the last plan",
    ]


def _print_measured(console: Console, metrics: Metrics) -> None:
    """Print traffic, experts and memory, with their formulas."""
    if metrics["steps"]:
        _print_traffic(console, metrics)
    if metrics["steps"] and "experts" in metrics:
        _rule(console, "how many tokens a step chose each expert, over the run")
        console.print(expert_table(metrics))
        if "copies" in metrics["experts"]:
            console.print(copies_line(metrics), markup=False, soft_wrap=True)
    _print_memory(console, metrics)
    if metrics["steps"] and metrics["plan"]["offload"] != "none":
        _print_offload(console, metrics)
    _print_activations(console, metrics)


def _print_traffic(console: Console, metrics: Metrics) -> None:
    """Print the bytes sent in a step, and the formula."""
    tables, lines = traffic_tables(metrics)
    for title, table in tables:
        _rule(console, title)
        console.print(table)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def traffic_tables(metrics: Metrics) -> tuple[list[tuple[str, Table]], list[str]]:
    """Return (title, table) of the bytes sent in a step with the formula, by device or server, by
    axis, or by rank; and lines."""
    lines = [compressed_traffic.saving(metrics)] if metrics["plan"]["compress"] != "none" else []
    if metrics["plan"]["strategy"] != "ddp":
        return [
            (
                "what each sent in a step, in bytes and messages, measured and by formula",
                central_traffic.traffic_table(metrics),
            )
        ], lines
    if "axes" in metrics["formula"]:
        return [
            (
                "what all ranks sent in a step along each axis, in bytes, measured and by formula",
                axis_traffic.traffic_table(metrics),
            )
        ], lines
    if metrics["plan"]["compress"] != "none":
        return [
            (
                "what each rank sent in a step, in bytes and messages, measured and by the "
                "scheme's formula",
                compressed_traffic.traffic_table(metrics),
            )
        ], lines
    if metrics["size"] > 1:
        what = (
            "gradients and weights in a step" if metrics["plan"]["zero"] else "gradients in a step"
        )
        if (every := metrics["plan"]["local_steps"]) is not None:
            what = f"outer gradients in {plural(every, 'step')}"
        return [
            (
                f"what each rank sent for {what}, in bytes and messages, measured and by formula",
                traffic_table(metrics),
            )
        ], lines
    return [], lines


def _print_memory(console: Console, metrics: Metrics) -> None:
    """Print rank 0's memory, and its bytes per parameter."""
    _rule(console, "what fills the memory of rank 0, in bytes, measured and by formula")
    console.print(memory_table(metrics))
    console.print(
        f"parameters + gradients + optimizer: {in_words(bytes_a_parameter(metrics))} bytes a "
        "parameter",
        markup=False,
    )
    if metrics["plan"]["ep"] > 1:
        console.print(
            f"of the experts' {in_words(bytes_a_parameter(metrics, experts=True))}, which ep has "
            "divided before",
            markup=False,
        )
    if shared := metrics["ranks"][0].get("shared_bytes"):
        console.print(
            "beside it, of what ranks of one host share (the transport's rings and boards), at "
            f"most {shared:,} bytes are rank 0's",
            markup=False,
            soft_wrap=True,
        )
    console.print()


def _print_offload(console: Console, metrics: Metrics) -> None:
    """Print the bytes that rank 0 moved in a step, and its bytes on host and disk."""
    first = metrics["ranks"][0]
    steps = metrics["steps"]
    _rule(console, "what rank 0 moved in a step, in bytes, measured and by formula")
    table = Table(
        "way",
        *(Column(name, justify="right") for name in ("bytes", "formula")),
        header_style="bold",
    )
    for way, nbytes in sorted(first["moved_formula"].items()):
        table.add_row(way, f"{first['moved_bytes'].get(way, 0) // steps:,}", f"{nbytes // steps:,}")
    console.print(table)
    told = ", ".join(
        f"{name} {now['peak']:,}" for name, now in first["host_memory"].items() if now["peak"]
    )
    console.print(
        f"host memory of rank 0 at its peak: {told} bytes; on disk: {first['disk_bytes']:,}\n",
        markup=False,
    )


def _print_activations(console: Console, metrics: Metrics) -> None:
    """Print a line on the inputs that blocks kept, and one on the choice of a memory budget."""
    kept = metrics["ranks"][0].get("kept_inputs")
    choice = metrics.get("activation_choice")
    if kept is not None and metrics["steps"]:
        console.print(
            "inputs of blocks kept by rank 0 in a step: "
            f"{kept['input_bytes'] // metrics['steps']:,} bytes, "
            f"as {kept['kept_bytes'] // metrics['steps']:,} "
            f"({metrics['plan']['keep_activations']})\n",
            markup=False,
            soft_wrap=True,
        )
    if choice is not None:
        console.print(
            f"activation memory {metrics['plan']['activation_memory']:,} bytes: computed again are "
            f"{choice.count('all')} of {len(choice)} blocks, of {choice.count('scores')} the "
            "scores\n",
            markup=False,
            soft_wrap=True,
        )


def short(number: float) -> str:
    """Return a number with at most two decimals: 4.0 -> "4", 2.6667 -> "2.67"."""
    return f"{number:.2f}".rstrip("0").rstrip(".")


def in_words(each: dict[str, float]) -> str:
    """Return a sum in words: `4 + 4 + 8 = 16`."""
    return f"{' + '.join(map(short, each.values()))} = {short(sum(each.values()))}"


def bytes_a_parameter(metrics: Metrics, *, experts: bool = False) -> dict[str, float]:
    """Return the bytes per parameter that a rank holds between steps by theory, by category.

    ZeRO divides some of them.

    Args:    experts: for the experts' parameters, which ep has divided already; ZeRO divides them
             over dp and cp.
    """
    plan = metrics["plan"]
    each = Each.of(
        metrics["parameter_bytes"] // metrics["parameters"],
        moments=metrics["optimizer_moments"],
        masters=plan["precision"] != "fp32",
    )
    ranks = plan["dp"] * plan["cp"] * (1 if experts else plan["ep"])
    held = state_bytes(
        1, each, zero=plan["zero"], ranks=ranks, shard=None if experts else plan["shard"]
    )
    elsewhere = {
        "none": (),
        "optimizer": ("optimizer",) if plan["zero"] == 1 else ("optimizer", "gradients"),
        "all": STATE,
    }[plan["offload"]]
    # a rank's own weights and the common weights; servers have the outer momentum
    if plan["local_steps"] is not None:
        momentum = plan["strategy"] == "ddp" and (
            plan["outer"] == "nesterov" or bool(plan["outer_momentum"])
        )
        held |= {
            "parameters": 2 * each.parameters,
            "optimizer": each.optimizer + momentum * each.parameters,
        }
    elif plan["strategy"] == "parameter-server":
        elsewhere = ("optimizer",)  # rank 0 is a worker
    return {category: 0.0 if category in elsewhere else held[category] for category in STATE}


def periods(metrics: Metrics) -> float:
    """Return the number of steps.

    With local steps the number of rounds, perhaps a fraction in a resumed run.
    """
    return float(metrics["steps"] / (metrics["plan"]["local_steps"] or 1))


def traffic_header(metrics: Metrics) -> tuple[str, str]:
    """Return bytes and messages of a rank in a step, as formulas for the table's header."""
    size = metrics["size"]
    plan = metrics["plan"]
    formula = metrics["formula"]
    # gathered or reduced: at least 2Ψ
    whole = int(formula["sent_bytes"] / periods(metrics)) // (size - 1)
    if plan["shard"] not in (None, size):
        copies = f"{size // plan['shard']} copies of {plan['shard']} ranks"
        return f"by formula, {copies}", f"by formula, {copies}"
    if plan["zero"] >= 2:
        return f"(P-1)/P × {whole:,}", f"(P-1) × {formula['buckets']} collectives"
    return f"2(P-1)/P × {whole // 2:,}", f"2(P-1) × {formula['buckets']} buckets"


def traffic_table(metrics: Metrics) -> Table:
    """Return a table of each rank's bytes and messages per step, without scalars, and the formula.

    The sums are exact.
    """
    size = metrics["size"]
    steps = periods(metrics)
    formula = metrics["formula"]
    share = formula["sent_bytes"] / steps / size
    by_formula = traffic_header(metrics)
    columns = ("rank", "bytes", by_formula[0], "messages", by_formula[1])
    table = Table(*(Column(name, justify="right") for name in columns), header_style="bold")
    sent, messages = (
        [
            sum(
                count
                for axis, verbs in rank[kind].items()
                if axis != "control"
                for count in verbs.values()
            )
            / steps
            for rank in metrics["ranks"]
        ]
        for kind in ("sent_bytes", "messages")
    )
    for rank in range(size):
        table.add_row(
            str(rank),
            exactly(sent[rank]),
            exactly(share),
            exactly(messages[rank]),
            exactly(formula["messages"] / steps / size),
            end_section=rank == size - 1,
        )
    table.add_row(
        "all",
        exactly(sum(sent)),
        exactly(formula["sent_bytes"] / steps),
        exactly(sum(messages)),
        exactly(formula["messages"] / steps),
    )
    return table


def expert_table(metrics: Metrics) -> Table:
    """Return a table with a row per layer: fewest and most tokens of an expert, the even share, and
    a bar for each expert."""
    chosen, taken = (
        np.array(metrics["experts"][kind]) / metrics["steps"] for kind in ("chosen", "taken")
    )
    columns = ("layer", "even share", "fewest", "most", "most / even", "dropped")
    table = Table(
        *(Column(name, justify="right") for name in columns),
        "experts, the fullest bar twice the even share",
        header_style="bold",
    )
    for layer, (tokens, kept) in enumerate(zip(chosen, taken, strict=True)):
        even = tokens.mean()
        heights = np.clip(tokens / (2 * even) * len(BARS), 0, len(BARS) - 1).astype(int)
        table.add_row(
            str(layer),
            f"{even:,.1f}",
            f"{tokens.min():,.1f}",
            f"{tokens.max():,.1f}",
            f"{tokens.max() / even:.2f}",
            f"{1 - kept.sum() / tokens.sum():.1%}",
            "".join(BARS[height] for height in heights),
        )
    return table


def copies_line(metrics: Metrics) -> str:
    """Return a line: the traffic to experts on other nodes per step, and the copies with a measured
    placement."""
    steps = metrics["steps"]
    copies = metrics["experts"]["copies"]
    nbytes = sum(
        count
        for rank in metrics["ranks"]
        for axis, count in rank["sent_to_nodes"].items()
        if axis.partition(".")[0] == "ep"
    )
    now, placed = (fmean(copies[kind]) for kind in ("now", "placed"))
    return (
        f"to experts on other nodes: {nbytes / steps:,.0f} bytes a step; lately {now:.3f} copies "
        f"of a token and layer, and {placed:.3f} with experts placed by these choices "
        "(--expert-placement RUN)"
    )


def memory_table(metrics: Metrics) -> Table:
    """Return a table of rank 0's memory by category, now and at the peak, and the formula."""
    experts = metrics["formula"].get("held_experts", 0)
    count = metrics["formula"].get("held", metrics["parameters"]) - experts
    parts = [
        (count, bytes_a_parameter(metrics)),
        (experts, bytes_a_parameter(metrics, experts=True)),
    ]
    table = Table(
        "what",
        *(Column(name, justify="right") for name in ("now", "peak", "formula")),
        header_style="bold",
    )
    for category, held in metrics["ranks"][0]["memory"].items():
        if category == "residuals" and not held["peak"]:  # of schemes of chapter 21
            continue
        formula = ""
        if category in STATE:
            terms = " + ".join(
                f"{short(each[category])} × {numbers:,}" for numbers, each in parts if numbers
            )
            formula = (
                f"{terms} = {exactly(sum(each[category] * numbers for numbers, each in parts))}"
            )
        table.add_row(
            category,
            f"{held['now']:,}",
            f"{held['peak']:,}",
            formula,
            end_section=category == "workspace",
        )
    return table
