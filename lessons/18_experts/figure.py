"""Draw the figure of lesson 18: which token goes to which expert; loads by step; traffic and
formula.

python lessons/18_experts/figure.py [--out DIR]
"""

from pathlib import Path
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.grading import load_module
from minidist.lessons import figures as look
from minidist.lessons.running import draw_figure
from minidist.parallel.experts.expert_parallel import elements_sent

HERE = Path(__file__).resolve().parent
lab = load_module(HERE / "experiments.py", "18")
RANKS = 4
STEPS = 60


def record(group: Group) -> dict[str, Any]:
    """Return the first step's routing with a capacity, the loads of three long runs, and what the
    first sent."""
    first = lab.train(group, lab.moe_config(capacity=1.0), 1)
    routing = first.load.layers[0].routing
    with group.ledger.control():
        chosen = group.all_gather(routing.chosen.reshape(-1, 2))
        kept = group.all_gather(routing.kept.reshape(-1, 2))
        each = group.all_gather(np.array([routing.chosen.shape[0] * routing.chosen.shape[1]]))
    sent = [
        first.sent[axis].get(verb, 0)
        for axis, verb in (("ep", "all_to_all"), ("dp,ep", "all_reduce"))
    ]
    far = int(lab.summed(group, [first.rows])[0])
    formula = [
        4 * far * lab.CONFIG.width * 8,
        8 * elements_sent(first.strategy.model, ranks=group.size, rows=0),
    ]
    shares = {
        name: lab.shares(lab.train(group, lab.moe_config(name), STEPS, lopsided=True).loads)
        for name in lab.BALANCES
    }
    owners = [
        rank
        for rank, part in enumerate(first.load.layers[0].experts.own)
        for _ in range(part.stop - part.start)
    ]
    return {
        "chosen": chosen,
        "kept": kept,
        "tokens": each,
        "owners": owners,
        "shares": shares,
        "far": far,
        "sent": lab.summed(group, sent).tolist(),
        "formula": formula,
    }


def draw(recorded: dict[str, Any], folder: Path) -> None:
    """Draw figure.png from what was recorded."""
    figure = look.new_figure(
        14,
        8.2,
        "Each token goes to two experts, most of them on other ranks",
        f"Recorded on {RANKS} ranks: {lab.EXPERTS} experts, {lab.SEQUENCES} sequences of "
        f"{lab.CONFIG.context} tokens. Colour: the rank that a token comes from, or an expert's "
        f"rank at the left.",
    )
    _matrix(figure.add_axes((0.105, 0.53, 0.875, 0.29)), recorded)
    for place, name in enumerate(lab.BALANCES):
        _loads(
            figure.add_axes((0.05 + 0.245 * place, 0.085, 0.205, 0.29)),
            recorded,
            name,
            first=place == 0,
        )
    _traffic(figure.add_axes((0.80, 0.085, 0.18, 0.29)), recorded)
    look.save(figure, folder)


def _matrix(ax: Any, recorded: dict[str, Any]) -> None:
    """Draw a mark for each token and each expert it chose; an empty one where the sequence's places
    were full."""
    look.quiet(ax)
    homes = np.repeat(np.arange(RANKS), recorded["tokens"])
    for rank in range(RANKS):
        for choice in (0, 1):
            for kept in (True, False):
                here = np.flatnonzero((homes == rank) & (recorded["kept"][:, choice] == kept))
                color = look.RANKS[rank]
                ax.scatter(
                    here,
                    recorded["chosen"][here, choice],
                    s=30,
                    marker="s",
                    linewidths=1.0,
                    edgecolors=color,
                    facecolors=color if kept else "none",
                )
        start = np.flatnonzero(homes == rank)[0]
        ax.text(
            start, -1.05, f"tokens of rank {rank}", fontsize=10, color=look.RANKS[rank], va="bottom"
        )
    for edge in range(0, len(homes), lab.CONFIG.context):
        ax.axvline(edge - 0.5, color=look.GRID, linewidth=1, zorder=0)
    for edge in range(1, lab.EXPERTS):
        if recorded["owners"][edge] != recorded["owners"][edge - 1]:
            ax.axhline(edge - 0.5, color="#9aa5b1", linewidth=1, zorder=0)
    ax.set_yticks(
        range(lab.EXPERTS),
        [f"expert {e}, rank {owner}" for e, owner in enumerate(recorded["owners"])],
    )
    for label, owner in zip(ax.get_yticklabels(), recorded["owners"], strict=True):
        label.set_color(look.RANKS[owner])
    ax.set_xlim(-1, len(homes))
    ax.set_ylim(lab.EXPERTS - 0.5, -1.1)
    ax.set_xticks([])
    dropped = int((~recorded["kept"]).sum())
    ax.set_xlabel(
        f"tokens; vertical lines part sequences.  Hollow: dropped, since {dropped} of "
        f"{recorded['kept'].size} choices found the expert's places in their sequence full "
        "(capacity 1.0)",
        fontsize=10.5,
        color=look.SOFT,
    )


def _loads(ax: Any, recorded: dict[str, Any], name: str, *, first: bool) -> None:
    """Draw the experts' shares over the steps, stacked."""
    shares = recorded["shares"][name]
    ax.stackplot(
        np.arange(1, len(shares) + 1),
        shares.T,
        colors=look.RANKS[: lab.EXPERTS],
        linewidth=0.4,
        edgecolor=look.PAPER,
    )
    look.quiet(ax)
    ax.set_xlim(1, len(shares))
    ax.set_ylim(0, 1)
    ax.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"] if first else ["", "", ""])
    ax.set_xlabel("step", fontsize=10.5, color=look.SOFT)
    late = shares[-10:].mean(axis=0)
    look.caption(ax, f"{lab.BALANCES[name]}: busiest {late.max():.0%}, idlest {late.min():.0%}")


def _traffic(ax: Any, recorded: dict[str, Any]) -> None:
    """Draw measured bytes as bars, the formulas as lines."""
    look.quiet(ax)
    sent = np.array(recorded["sent"]) / 1024
    formula = np.array(recorded["formula"]) / 1024
    ax.bar([0, 1], sent, 0.6, color=[look.PHASES["all_reduce"], look.PHASES["forward"]])
    for place, value in enumerate(formula):
        ax.plot(
            [place - 0.4, place + 0.4],
            [value, value],
            color=look.INK,
            linewidth=1.5,
            linestyle="--",
        )
    ax.set_xticks([0, 1], [f"tokens: 4 R h\nR = {recorded['far']}", "dense: 2(P-1) n"])
    look.caption(ax, "KiB a step; dashed: formula")


if __name__ == "__main__":
    draw_figure(record, draw, HERE, size=RANKS)
