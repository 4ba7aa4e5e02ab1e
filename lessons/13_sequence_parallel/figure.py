"""The figure of lesson 13: a ring of keys and values as its messages were recorded, the blocks
multiplied, and memory.

python lessons/13_sequence_parallel/figure.py [--out DIR]      # figure.png
"""

from pathlib import Path
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.grading import load_module
from minidist.lessons import figures as look
from minidist.lessons.running import draw_figure

HERE = Path(__file__).resolve().parent
lab = load_module(HERE / "experiments.py", "13")
RANKS = 4
LENGTH = 48
SHORT = 64


def record(group: Group) -> dict[str, Any]:
    """Return on rank 0 the ring as run, the scores by rank, and the peaks."""
    walked = lab.walk(group, LENGTH)
    long = lab.config_for(RANKS, SHORT * RANKS)
    short = lab.config_for(RANKS, SHORT)
    memory = [
        (f"one process,\n{SHORT} tokens", lab.peaks(group, short, "one process")),
        (f"one process,\n{SHORT * RANKS} tokens", lab.peaks(group, long, "one process")),
    ]
    memory += [
        (f"{lab.TITLES[name]},\n{SHORT * RANKS} tokens", lab.peaks(group, long, name))
        for name in lab.NAMES
    ]
    scores = {
        "consecutive": [
            int((lab.consecutive(LENGTH, rank, RANKS) + 1).sum()) for rank in range(RANKS)
        ],
        "zigzag": [lab.scores_seen(LENGTH, rank, RANKS) for rank in range(RANKS)],
    }
    return {**walked, "memory": memory, "scores": scores}


def draw(recorded: dict[str, Any], folder: Path) -> None:
    """Draw figure.png from what was recorded."""
    figure = look.new_figure(
        13.5,
        10.4,
        f"Ring attention on {RANKS} ranks, as recorded",
        "A sequence in 8 blocks; rank r has blocks r and 7 - r. One colour is one rank's tokens.",
    )
    _ring(figure.add_axes((0.07, 0.50, 0.51, 0.35)), recorded)
    _matrix(figure.add_axes((0.66, 0.48, 0.32, 0.38)), recorded["pairs"])
    _scores(figure.add_axes((0.07, 0.07, 0.30, 0.31)), recorded["scores"])
    _memory(figure.add_axes((0.56, 0.07, 0.42, 0.31)), recorded["memory"])
    look.save(figure, folder)


def _ring(ax: Any, recorded: dict[str, Any]) -> None:
    """Draw the pieces at each hop; an arrow is a recorded message."""
    held = {(rank, hop): source for rank, hop, source, *_ in recorded["pairs"]}
    blocks: dict[tuple[int, int], list[str]] = {}
    for rank, hop, _, queries, keys in recorded["pairs"]:
        blocks.setdefault((rank, hop), []).append(f"{queries}·{keys}")
    for (rank, hop), source in held.items():
        ax.barh(rank, 0.56, 0.62, hop - 0.28, color=look.RANKS[source], alpha=0.9)
        ax.text(
            hop,
            rank - 0.1,
            f"kv {source}",
            ha="center",
            va="center",
            color="white",
            fontsize=11,
            fontweight="bold",
        )
        ax.text(
            hop,
            rank + 0.15,
            "  ".join(blocks[rank, hop]),
            ha="center",
            va="center",
            color="white",
            fontsize=8,
        )
    sent = dict.fromkeys(range(RANKS), 0)
    for src, dst, _, _ in sorted(recorded["messages"], key=lambda message: message[2]):
        hop = sent[int(src)]
        color = look.RANKS[held[int(src), sent[int(src)]]]
        sent[int(src)] += 1
        ax.annotate(
            "",
            (hop + 0.72, dst),
            (hop + 0.28, src),
            arrowprops={
                "arrowstyle": "-|>",
                "color": color,
                "linewidth": 1.6,
                "shrinkA": 0,
                "shrinkB": 0,
            },
        )
    look.quiet(ax)
    ax.set_xticks(range(RANKS), [f"hop {hop}" for hop in range(RANKS)])
    ax.set_yticks(range(RANKS), [f"rank {rank}" for rank in range(RANKS)])
    ax.tick_params(length=0)
    ax.set_ylim(RANKS - 0.5, -0.5)
    ax.set_xlim(-0.4, RANKS - 0.6)
    look.caption(
        ax,
        f"{len(recorded['messages'])} messages. In a box: whose keys and values are there, and "
        "which "
        "blocks of\nqueries · keys are multiplied while they travel on",
    )


def _matrix(ax: Any, pairs: list[list[int]]) -> None:
    """Draw the blocks of scores: the rank that computes each, and at which hop."""
    size = 2 * RANKS
    for rank, hop, _, queries, keys in pairs:
        ax.barh(queries, 0.96, 0.96, keys - 0.48, color=look.RANKS[rank])
        ax.text(
            keys, queries, str(hop), ha="center", va="center_baseline", color="white", fontsize=10
        )
    look.quiet(ax)
    ax.set_xticks(range(size))
    ax.set_yticks(range(size))
    ax.tick_params(length=0)
    ax.set_xlim(-0.55, size - 0.45)
    ax.set_ylim(size - 0.45, -0.55)
    ax.set_aspect("equal")
    ax.set_xlabel("block of keys", color=look.SOFT, fontsize=10.5)
    ax.set_ylabel("block of queries", color=look.SOFT, fontsize=10.5)
    look.caption(ax, "Which rank computes which scores, at which hop")


def _scores(ax: Any, scores: dict[str, list[int]]) -> None:
    """Draw how many scores each rank has to compute."""
    for row, (name, counts) in enumerate(scores.items()):
        for rank, count in enumerate(counts):
            where = rank + 0.42 * row - 0.21
            ax.bar(
                where,
                count,
                0.38,
                color=look.RANKS[rank],
                alpha=0.45 if name == "consecutive" else 1.0,
            )
            ax.text(where, count + 6, str(count), ha="center", color=look.SOFT, fontsize=9)
    look.quiet(ax, grid="y")
    ax.set_xticks(range(RANKS), [f"rank {rank}" for rank in range(RANKS)])
    ax.legend(
        [look.patch("#b9c2cc"), look.patch("#5f6b78")],
        list(scores),
        frameon=False,
        fontsize=10,
        labelcolor=look.INK,
        loc="upper left",
        handlelength=1.2,
    )
    look.caption(ax, f"Scores a rank computes, {LENGTH} tokens")


def _memory(ax: Any, memory: list[tuple[str, dict[str, int]]]) -> None:
    """Draw the peaks of one rank."""
    for row, (_, peak) in enumerate(memory):
        left = 0.0
        for name in ("activations", "communication"):
            ax.barh(row, peak[name] / 2**20, 0.62, left, color=look.MEMORY[name])
            left += peak[name] / 2**20
        ax.text(
            left + 0.02, row, f"{left:.2f}", va="center_baseline", color=look.SOFT, fontsize=9.5
        )
    look.quiet(ax, grid="x")
    ax.set_xlim(
        0,
        1.12
        * max(sum(peak[name] for name in ("activations", "communication")) for _, peak in memory)
        / 2**20,
    )
    ax.set_yticks(np.arange(len(memory)), [name for name, _ in memory])
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(memory) - 0.5, -0.5)
    ax.set_xlabel("MiB at the peak, rank 0", color=look.SOFT, fontsize=10.5)
    ax.legend(
        [look.patch(look.MEMORY[name]) for name in ("activations", "communication")],
        ["activations", "communication"],
        frameon=False,
        fontsize=10,
        labelcolor=look.INK,
        loc="lower right",
        handlelength=1.2,
    )
    look.caption(ax, f"A context {RANKS} times as long")


if __name__ == "__main__":
    draw_figure(record, draw, HERE, size=RANKS)
