"""The figures of lesson 04, from real runs: wirings under load; two machines over time, and this
machine's α and β.

python lessons/04_topology/figure.py [--out DIR]      # figure.png and machines.png
"""

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.patches import FancyArrowPatch

from minidist.comm.group import Group
from minidist.comm.records import gather_records
from minidist.console import size_text
from minidist.grading import load_module
from minidist.lessons import figures as look
from minidist.lessons.running import draw_figure

HERE = Path(__file__).resolve().parent
RANKS = 8
lesson = load_module(HERE / "lesson.py", "04")
wiring = lesson.wiring
FAST = look.RANKS[0]
SLOW = look.RANKS[3]


def record(group: Group) -> dict[str, Any]:
    """Return on rank 0 what the figure shows; on other ranks a part of it or {}."""
    messages = lesson.recorded(group, "halving-doubling")
    timelines = {name: over_time(group, name) for name in ("ring", "hierarchical")}
    pair = group.split(0 if group.rank < 2 else None)
    times = lesson.exchange_times(pair) if pair is not None else {}
    group.barrier()
    if pair is None:
        return {}
    cost = lesson.fitted(pair, times)
    return {
        "messages": messages,
        "timelines": timelines,
        "times": times,
        "alpha": cost.alpha,
        "beta": cost.beta,
        "misfit": cost.misfit,
        "transport": group.transport.name,
    }


def over_time(group: Group, algorithm: str) -> list[dict[str, Any]]:
    """Return the messages of one all_reduce on two machines with 20 ms between them; times in α, on
    rank 0."""
    alpha = 20e-3
    nodes = lesson.halves(group.size)
    events: list[Any] = []
    with lesson.links.machines(group, nodes, alpha=alpha, beta=0.0) as cluster:
        group.barrier()
        begin = time.perf_counter()
        stop = group.ledger.subscribe(events.append)
        cluster.all_reduce(np.ones(lesson.ELEMENTS), algorithm=algorithm)
        stop()
    mine = [
        [event.details["src"], event.details["dst"], event.start, event.stop]
        for event in events
        if event.kind == "message"
    ]
    ranks = gather_records(group, {"begin": begin, "messages": mine}) or []
    origin = max((rank["begin"] for rank in ranks), default=0.0)
    return [
        {
            "src": src,
            "dst": dst,
            "start": (start - origin) / alpha,
            "stop": (end - origin) / alpha,
            "slow": nodes[src] != nodes[dst],
        }
        for rank in ranks
        for src, dst, start, end in rank["messages"]
    ]


# ------------------------------------------------------------------------------------------ drawing


def draw(recorded: dict[str, Any], folder: Path) -> None:
    """Draw figure.png and machines.png from what was recorded."""
    look.save(draw_wirings(recorded["messages"]), folder)
    look.save(draw_machines(recorded), folder, "machines.png")


def draw_wirings(messages: list[Any]) -> Any:
    """Draw the bytes over each link of four wirings."""
    figure = look.new_figure(
        14.0,
        4.6,
        "Wires: one halving-doubling all-reduce over four wirings",
        "The recorded messages of eight ranks, each sent its shortest way. The thicker a link, the "
        "more bytes it carries; the busiest links are red.",
    )
    for place, make in enumerate(wiring.WIRINGS):
        axes = figure.add_axes((0.02 + 0.245 * place, 0.04, 0.225, 0.71))
        _wires(axes, make(RANKS), messages)
    return figure


def draw_machines(recorded: dict[str, Any]) -> Any:
    """Draw one all-reduce on two machines over time, flat and hierarchical, and the fitted line."""
    figure = look.new_figure(
        14.0,
        5.2,
        "Two machines of four ranks: one all-reduce over time; and α and β of this machine",
        "Recorded messages of eight ranks, threads of one process; between the machines each takes "
        "α (red). Right: measured times between two of the ranks.",
    )
    for place, name in enumerate(("ring", "hierarchical")):
        _space_time(
            figure.add_axes((0.055 + 0.325 * place, 0.1, 0.265, 0.6)),
            name,
            recorded["timelines"][name],
        )
    _line(figure.add_axes((0.735, 0.1, 0.245, 0.6)), recorded)
    return figure


def _places(wires: Any) -> dict[int, tuple[float, float]]:
    """Return the place of each device and switch in the drawing."""
    if wires.name == "torus":
        columns = wiring.grid(wires.devices).columns
        return {
            rank: (rank % columns - (columns - 1) / 2, 0.9 * (0.5 - rank // columns))
            for rank in range(wires.devices)
        }
    if wires.name == "two machines":
        half = (wires.devices + 1) // 2
        spots = {
            rank: (-1.35 if rank < half else 1.35, 1.2 - 0.8 * (rank % half))
            for rank in range(wires.devices)
        }
        return {**spots, wires.devices: (-0.45, 0.0), wires.devices + 1: (0.45, 0.0)}
    angles = [math.pi / 2 - 2 * math.pi * rank / wires.devices for rank in range(wires.devices)]
    return {
        **{
            rank: (1.3 * math.cos(angle), 1.3 * math.sin(angle))
            for rank, angle in enumerate(angles)
        },
        wires.devices: (0.0, 0.0),
    }


def _wires(ax: Any, wires: Any, messages: list[Any]) -> None:
    """Draw one wiring: a line for each link; its width is the bytes over its busier direction."""
    spots = _places(wires)
    unit = lesson.ELEMENTS * 8
    carried = wiring.load(wires, messages)
    busy = {link: max(carried[link], carried[link[::-1]]) / unit for link in wires.links}
    for (a, b), amount in busy.items():
        color = SLOW if amount >= 0.99 * max(busy.values()) else FAST
        bent = wires.name == "torus" and abs(spots[a][0] - spots[b][0]) > 1.5
        ax.add_patch(
            FancyArrowPatch(
                spots[a],
                spots[b],
                arrowstyle="-",
                linewidth=0.8 + 2.0 * amount,
                color=color,
                connectionstyle=f"arc3,rad={0.32 * (1 if spots[a][1] < 0 else -1)}"
                if bent
                else "arc3",
                shrinkA=0,
                shrinkB=0,
                zorder=1,
            )
        )
    for place, (x, y) in spots.items():
        if place < wires.devices + wires.switches:
            device = place < wires.devices
            ax.plot(
                [x],
                [y],
                "o" if device else "s",
                markersize=17,
                color=look.INK if device else look.SOFT,
                zorder=2,
            )
            ax.text(
                x,
                y,
                str(place) if device else "sw",
                color="white",
                ha="center",
                va="center_baseline",
                fontsize=9.5,
                zorder=3,
            )
    ax.text(
        0,
        -1.75,
        f"busiest link {max(busy.values()):.3g} n · bisection {wiring.bisection(wires)}\n"
        f"most hops {max(wiring.hops(wires))}",
        ha="center",
        va="top",
        fontsize=10,
        color=look.SOFT,
    )
    ax.set_title(wires.name, fontsize=11.5, fontweight="bold", color=look.INK, pad=2)
    ax.set_xlim(-2.1, 2.1)
    ax.set_ylim(-2.4, 1.75)
    look.bare(ax)


def _space_time(ax: Any, name: str, messages: list[dict[str, Any]]) -> None:
    """Draw ranks side by side, and time downwards in α of the link between the machines."""
    end = max(message["stop"] for message in messages)
    for rank in range(RANKS):
        ax.plot([rank, rank], [0, end], color=look.GRID, linewidth=2.5, zorder=1)
        ax.text(
            rank,
            -0.3,
            f"r{rank}",
            ha="center",
            va="bottom",
            fontsize=9.5,
            fontweight="bold",
            color=look.INK,
        )
    ax.axvline((RANKS - 1) / 2, color=look.SOFT, linewidth=1, linestyle=(0, (4, 3)))
    for message in messages:
        ax.add_patch(
            FancyArrowPatch(
                (message["src"], message["start"]),
                (message["dst"], message["stop"]),
                arrowstyle="-|>",
                mutation_scale=7,
                shrinkA=0,
                shrinkB=0,
                zorder=3 if message["slow"] else 2,
                linewidth=1.6 if message["slow"] else 0.9,
                color=SLOW if message["slow"] else FAST,
            )
        )
    look.quiet(ax, grid="y")
    ax.spines["bottom"].set_visible(False)
    ax.set_xticks([])
    ax.set_ylim(15.6, -0.4)
    ax.set_ylabel("time, α between the machines", color=look.SOFT, fontsize=10)
    slow = sum(message["slow"] for message in messages)
    ax.set_title(
        f"{name}: {slow} messages across, {end:.1f} α",
        loc="left",
        fontsize=11,
        fontweight="bold",
        color=look.INK,
        pad=17,
    )


def _line(ax: Any, recorded: dict[str, Any]) -> None:
    """Draw this machine's exchange times over bytes, and the fitted line."""
    sizes = np.array(list(recorded["times"]))
    ax.plot(
        sizes,
        [took * 1e6 for took in recorded["times"].values()],
        "o",
        color=FAST,
        markersize=6,
        label="measured",
    )
    fine = np.geomspace(sizes[0], sizes[-1], 60)
    ax.plot(
        fine,
        (recorded["alpha"] + fine * recorded["beta"]) * 1e6,
        color=SLOW,
        linewidth=1.8,
        label="α + n β",
    )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    low = min(recorded["times"].values()) * 1e6
    high = max(recorded["times"].values()) * 1e6
    ax.set_yticks(
        [
            tick
            for power in range(7)
            for tick in (10**power, 2 * 10**power, 5 * 10**power)
            if 0.5 * low < tick < 2 * high
        ]
    )
    ax.set_ylim(0.7 * low, 1.6 * high)
    ax.set_xticks(sizes)
    ax.set_xticks([], minor=True)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_yticks([], minor=True)
    ax.xaxis.set_major_formatter(lambda value, _: size_text(value))
    ax.set_ylabel("µs an exchange", color=look.SOFT, fontsize=10)
    ax.legend(frameon=False, fontsize=10, loc="upper left", labelcolor=look.INK)
    rate = f", 1/β {1e-9 / recorded['beta']:.2g} GB/s" if recorded["beta"] else ""
    ax.set_title(
        f"{recorded['transport']} here: α = {recorded['alpha'] * 1e6:.0f} µs{rate}",
        loc="left",
        fontsize=11,
        fontweight="bold",
        color=look.INK,
        pad=17,
    )
    look.quiet(ax, grid="y")


if __name__ == "__main__":
    draw_figure(record, draw, HERE, size=RANKS)
