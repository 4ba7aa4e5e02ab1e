"""Draw the figure of lesson 07: one recorded step of DDP on each rank, and replicas that drift.

python lessons/07_ddp/figure.py [--out DIR]      # figure.png and figure.mmd
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.grading import load_module
from minidist.lessons import figures as look
from minidist.lessons.running import draw_figure
from minidist.nn import GPTConfig

HERE = Path(__file__).resolve().parent
lab = load_module(HERE / "experiments.py", "07")
# RANKS of the job. Only TIMED of them are timed, so that each has a core on a small machine.
RANKS = 4
TIMED = 2
ROUNDS = 30  # steps recorded; the quickest is drawn, which other programs disturbed least
CONFIG = GPTConfig(vocabulary=128, context=128, layers=4, width=192, heads=6)
LEGEND = {
    "forward": "forward",
    "backward": "backward",
    "all_reduce": "all-reduce, bucket by bucket",
    "wait": "wait for the last",
    "optimizer": "update",
}
# The notes' steps. Step 5 is drawn before the first bucket.
NUMBERS = {"forward": (2, 3), "backward": (4,), "optimizer": (6,)}
COLORS = {
    "forward": look.PHASES["forward"],
    "backward": look.PHASES["backward"],
    "wait for gradients": look.PHASES["wait"],
    "optimizer": look.PHASES["optimizer"],
}


def record(group: Group) -> dict[str, Any]:
    """Return on rank 0 the spans of a step on TIMED ranks and of one on all, a list per rank, and
    the drift experiments."""
    pair = group.split(0 if group.rank < TIMED else 1)
    timed = []
    if group.rank < TIMED:
        timed = lab.record_step(
            pair, CONFIG, sequences=16, bucket_bytes=1 << 20, steps=ROUNDS, quickest=True
        )
    group.barrier()  # the other ranks wait here, asleep
    small = lab.record_step(group, steps=3)
    drifts = [lab.drift(group, way) for way in ("batch", "epoch", "never")]
    return {
        "timed": [[asdict(span) for span in timeline.spans] for timeline in timed],
        "all": [[asdict(span) for span in timeline.spans] for timeline in small],
        "drift": drifts,
    }


def draw(recorded: dict[str, Any], folder: Path) -> None:
    """Draw figure.png and figure.mmd from what was recorded."""
    figure = look.new_figure(
        13.5,
        6.4,
        f"One training step of DDP on {TIMED} ranks, as recorded",
        f"GPT of {CONFIG.layers} layers, width {CONFIG.width}; the quickest of {ROUNDS} steps. "
        "Buckets travel while backward still runs. Circled: the notes' six steps (N0:403).",
    )
    _gantt(figure.add_axes((0.075, 0.12, 0.565, 0.66)), recorded["timed"])
    _apart(figure.add_axes((0.735, 0.545, 0.25, 0.235)), recorded["drift"])
    _loss(figure.add_axes((0.735, 0.12, 0.25, 0.235)), recorded["drift"])
    look.save(figure, folder)
    look.save_mermaid(mermaid(recorded["all"]), folder)


def _gantt(ax: Any, steps: list[list[dict[str, Any]]]) -> None:
    """Draw each rank's computing above its buckets; in milliseconds from the begin of the first
    rank."""
    begin = min(span["start"] for spans in steps for span in spans if span["name"] == "forward")
    stop = max(span["stop"] for spans in steps for span in spans if span["name"] == "optimizer")
    look.quiet(ax, grid="x")
    for rank, spans in enumerate(steps):
        free = 0.0  # where the last number below a narrow bucket ends
        first = min(span["start"] for span in spans if span["name"].startswith("all_reduce bucket"))
        look.step_number(ax, 1e3 * (first - begin) - 1.0, rank + 0.19, 5, ha="right")
        for span in spans:
            left = 1e3 * (span["start"] - begin)
            width = 1e3 * (span["stop"] - span["start"])
            if span["name"] in COLORS:
                ax.barh(
                    rank - 0.19,
                    width,
                    0.34,
                    left,
                    color=COLORS[span["name"]],
                    edgecolor="white",
                    linewidth=0.8,
                )
                for place, number in enumerate(NUMBERS.get(span["name"], ())):
                    look.step_number(
                        ax,
                        left + (1 + place) * width / (1 + len(NUMBERS[span["name"]])),
                        rank - 0.19,
                        number,
                        look.INK if span["name"] == "forward" else "white",
                        ha="center",
                    )
            elif span["name"].startswith("all_reduce bucket"):
                number = span["name"].split()[-1]
                ax.barh(
                    rank + 0.19,
                    width,
                    0.28,
                    left,
                    color=look.PHASES["all_reduce"],
                    edgecolor="white",
                    linewidth=0.8,
                )
                wide = width > 0.022e3 * (stop - begin)
                middle = left + width / 2 if wide else max(left + width / 2, free)
                free = free if wide else middle + 0.024e3 * (stop - begin)
                ax.text(
                    middle,
                    rank + (0.19 if wide else 0.385),
                    number,
                    ha="center",
                    va="center_baseline",
                    fontsize=9 if wide else 8,
                    color="white" if wide else look.PHASES["all_reduce"],
                )
    ax.legend(
        [look.patch(look.PHASES[kind]) for kind in LEGEND],
        list(LEGEND.values()),
        frameon=False,
        fontsize=10,
        ncols=5,
        loc="upper left",
        bbox_to_anchor=(-0.09, 1.115),
        labelcolor=look.INK,
        handlelength=1.3,
        columnspacing=1.5,
    )
    ax.set_yticks(range(len(steps)), [f"rank {rank}" for rank in range(len(steps))], fontsize=12)
    for label in ax.get_yticklabels():
        label.set_fontweight("bold")
        label.set_color(look.INK)
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(steps) - 0.5, -0.5)
    ax.set_xlim(0, 1.01e3 * (stop - begin))
    ax.set_xlabel(
        "milliseconds; upper bar: computing; lower bar: communication in the background, "
        "waiting included",
        color=look.SOFT,
        fontsize=10.5,
    )


DRIFT = {
    "batch": ("every batch: DDP", look.PHASES["optimizer"]),
    "epoch": ("every epoch", look.PHASES["all_reduce"]),
    "never": ("never", look.MEMORY["activations"]),
}


def _apart(ax: Any, drifts: list[dict[str, Any]]) -> None:
    """Draw the distance between the replicas after each batch."""
    look.quiet(ax, grid="y")
    for run in drifts:
        name, color = DRIFT[run["synchronise"]]
        ax.plot(
            np.arange(1, len(run["apart"]) + 1) / run["batches"],
            run["apart"],
            color=color,
            linewidth=1.8,
            label=name,
        )
    ax.set_ylim(-0.02, 1.55 * max(drifts[-1]["apart"]))
    ax.legend(
        frameon=False,
        fontsize=9.5,
        labelcolor=look.INK,
        ncols=2,
        loc="upper left",
        title="synchronised",
        title_fontsize=9.5,
        alignment="left",
        borderaxespad=0.1,
    )
    ax.set_xlabel("epoch", color=look.SOFT, fontsize=10.5)
    look.caption(ax, "Replicas apart (largest weight = 1)")


def _loss(ax: Any, drifts: list[dict[str, Any]]) -> None:
    """Draw the held-out loss of the mean of all replicas at the end of each epoch."""
    look.quiet(ax, grid="y")
    for run in drifts:
        name, color = DRIFT[run["synchronise"]]
        ax.plot(
            np.arange(1, len(run["mean"]) + 1),
            run["mean"],
            color=color,
            linewidth=1.8,
            marker="o",
            markersize=4,
        )
    ax.set_xlim(0, len(drifts[0]["mean"]) + 0.1)
    ax.set_xlabel("epoch", color=look.SOFT, fontsize=10.5)
    look.caption(ax, "Held-out loss of the replicas' mean")


def mermaid(steps: list[list[dict[str, Any]]]) -> str:
    """Return the recorded step in the form of N2:51: what each rank computes, then the messages of
    bucket 0."""
    size = len(steps)
    lines = [
        "sequenceDiagram",
        *(f"    participant r{rank} as rank {rank}" for rank in range(size)),
    ]

    def every_rank(note: str, name: str) -> None:
        lines.append(f"    Note over r0, r{size - 1}: {note}")
        lines.extend(
            f"    r{rank}->>r{rank}: {name}"
            for rank, spans in enumerate(steps)
            if any(span["name"] == name for span in spans)
        )

    every_rank("2, 3: its own part of the batch", "forward")
    every_rank("4: its own gradients", "backward")
    buckets = sum(span["name"].startswith("all_reduce bucket") for span in steps[0])
    lines.append(
        f"    Note over r0, r{size - 1}: 5, during 4: bucket 0 of {buckets}, every message"
    )
    for hop in range(2 * (size - 1)):
        for rank, spans in enumerate(steps):
            sent = [
                span
                for span in spans
                if span["row"] == "messages"
                and span["details"].get("verb") == "all_reduce"
                and span["details"].get("hop") == hop
            ]
            first = min(sent, key=lambda span: span["start"])["details"]
            lines.append(f"    r{rank}->>r{first['dst']}: c{first['chunk']}")
    every_rank("6: the same update", "optimizer")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    draw_figure(record, draw, HERE, size=RANKS, transport="auto")
