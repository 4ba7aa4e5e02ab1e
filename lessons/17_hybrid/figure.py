"""The figures of lesson 17: a mesh with its links; what each axis sent, and a step; the bytes
between machines by the order of the axes; five axes' groups in colour.

python lessons/17_hybrid/figure.py [--out DIR]      # figure, traffic, layouts, mesh .png; figure.mmd
"""

from pathlib import Path
from typing import Any

import minidist as md
from minidist.comm.group import Group
from minidist.comm.records import gather_records
from minidist.comm.transports.throttled import delayed
from minidist.console import size_text
from minidist.grading import load_module
from minidist.lessons import figures as look
from minidist.lessons.running import draw_figure
from minidist.observe.timeline import Timeline

HERE = Path(__file__).resolve().parent
lab, naps = (load_module(HERE / name, "17") for name in ("experiments.py", "naps.py"))
SHAPE = {"dp": 2, "pp": 2, "tp": 2}
FIVE = {"dp": 2, "pp": 2, "ep": 2, "cp": 2, "tp": 2}
RANKS = 8
UNIT = 0.02
ALPHA = 1e-3
BANDWIDTH = 8e6
COLORS = {"dp": "#8172b3", "pp": "#3f9a9a", "tp": "#e08e3c"}
# one step along an axis, on paper
PLACES = {"dp": (0.62, 0.55), "pp": (0.0, -1.25), "tp": (1.6, 0.0)}


# ------------------------------------------------------------------------------------------- record


def record(group: Group) -> dict[str, Any]:
    """Return on rank 0 every rank's messages of a step, the bytes between machines by layout, a
    step of stages that sleep, and five axes."""
    links = gather_records(group, lab.links(group, SHAPE))
    crossings = [
        [list(order), lab.crossing(group, SHAPE, order, (2,))[0]] for order in lab.layouts(SHAPE)
    ]
    with delayed(group, alpha=ALPHA, beta=1 / BANDWIDTH) as slow:
        mesh = md.Mesh(slow, **SHAPE)
        timeline = Timeline(group.rank)
        for axes in ("dp", "pp", "tp"):
            mesh[axes]
        timeline.follow(group.ledger)
        naps.napped(
            mesh, timeline, microbatches=lab.MICROBATCHES, unit=UNIT, numbers=2000, gradients=20_000
        )
        mesh.close()
    timelines = timeline.collect(group)
    five = md.run(five_axes, size=32) if group.rank == 0 else None
    return {"links": links, "crossings": crossings, "timelines": timelines, "five": five}


def five_axes(world: Group) -> dict[str, list[int]]:
    """Return this rank's group along each of five axes, as world ranks."""
    mesh = md.Mesh(world, **FIVE)
    groups = {axis: list(mesh[axis].world_ranks) for axis in FIVE}
    mesh.close()
    return groups


# --------------------------------------------------------------------------------------------- draw


def draw(recorded: dict[str, Any], folder: Path) -> None:
    """Draw the four pictures and figure.mmd from what was recorded."""
    figure = look.new_figure(
        7.0,
        5.0,
        "Eight ranks on three axes",
        "dp=2, pp=2, tp=2. An edge is a pair of ranks that sent messages in a step.",
    )
    _cube(figure.add_axes((0.03, 0.02, 0.94, 0.8)), recorded["links"])
    look.save(figure, folder)
    _draw_traffic(recorded, folder)
    figure = look.new_figure(
        9.0,
        4.6,
        "From machine to machine, by the order of the axes",
        "dp=2, pp=2, tp=2 on machines of two ranks; one step, all ranks.",
    )
    _layouts(figure.add_axes((0.17, 0.14, 0.79, 0.6)), recorded["crossings"])
    look.save(figure, folder, "layouts.png")
    look.save_mermaid(mermaid(recorded["links"]), folder)
    _draw_five(recorded["five"], folder)


def _draw_traffic(recorded: dict[str, Any], folder: Path) -> None:
    """Draw traffic.png: the bytes by axis, and a step over time."""
    figure = look.new_figure(
        13.5,
        8.0,
        "What travels on each axis, and when",
        f"dp=2, pp=2, tp=2. Above: one step of a GPT, {lab.CONFIG.layers} blocks of width "
        f"{lab.CONFIG.width}, {lab.SEQUENCES * lab.CONFIG.context} tokens, float64. Below: stages "
        "that sleep instead of computing; numbers as in the code of section 1.",
    )
    _axes(figure.add_axes((0.125, 0.66, 0.86, 0.17)), recorded["links"])
    _timeline(figure.add_axes((0.125, 0.08, 0.86, 0.43)), recorded["timelines"])
    look.save(figure, folder, "traffic.png")


def _between(links: list[dict[str, Any]]) -> dict[tuple[str, int, int], int]:
    """Return the bytes of each (axis, one rank, the other), both directions together."""
    total: dict[tuple[str, int, int], int] = {}
    for rank in links:
        for name, nbytes in rank["sent"].items():
            axis, *ends = name.split()
            low, high = sorted(map(int, ends))
            total[axis, low, high] = total.get((axis, low, high), 0) + nbytes
    return total


def _cube(ax: Any, links: list[dict[str, Any]]) -> None:
    """Draw the ranks as corners of a cube, and an edge for each pair that sent something."""
    look.bare(ax)
    corners = []
    for rank in range(RANKS):
        places = rank // 4, rank // 2 % 2, rank % 2
        corners.append(
            [
                sum(step * PLACES[axis][side] for axis, step in zip(SHAPE, places, strict=True))
                for side in (0, 1)
            ]
        )
    for axis, low, high in sorted(_between(links)):
        (x0, y0) = corners[low]
        (x1, y1) = corners[high]
        ax.plot(
            [x0, x1],
            [y0, y1],
            color=COLORS[axis],
            linewidth=5,
            zorder=1,
            solid_capstyle="butt",
            alpha=0.9,
        )
    for rank, (x, y) in enumerate(corners):
        ax.plot(
            x,
            y,
            "o",
            markersize=25,
            color="white",
            markeredgecolor=look.INK,
            markeredgewidth=1.3,
            zorder=2,
        )
        ax.text(
            x,
            y,
            f"r{rank}",
            ha="center",
            va="center_baseline",
            fontsize=11,
            color=look.INK,
            zorder=3,
        )
    for axis, (low, high) in {"tp": (2, 3), "pp": (0, 2), "dp": (3, 7)}.items():
        (x0, y0) = corners[low]
        (x1, y1) = corners[high]
        shift, side = {
            "tp": ((0, -0.32), "center"),
            "pp": ((-0.2, 0), "right"),
            "dp": ((0.2, -0.1), "left"),
        }[axis]
        ax.text(
            (x0 + x1) / 2 + shift[0],
            (y0 + y1) / 2 + shift[1],
            axis,
            ha=side,
            va="center",
            fontsize=13,
            color=COLORS[axis],
            fontweight="bold",
        )
    ax.set_xlim(-1.0, 3.2)
    ax.set_ylim(-1.75, 0.9)


def _axes(ax: Any, links: list[dict[str, Any]]) -> None:
    """Draw the bytes of all ranks by axis, the formula as a mark, and how often a rank made a
    call."""
    look.quiet(ax, grid="x")
    sent = dict.fromkeys(SHAPE, 0)
    for (axis, _, _), nbytes in _between(links).items():
        sent[axis] += nbytes
    target = lab.formula(lab.plan_of(SHAPE))
    for place, axis in enumerate(SHAPE):
        ax.barh(place, sent[axis] / 1024, 0.62, color=COLORS[axis])
        ax.plot(target[axis] / 1024, place, "|", color=look.INK, markersize=26, markeredgewidth=2)
        often = max(rank["calls"][axis] for rank in links)
        ax.text(
            sent[axis] / 1024 + 12,
            place,
            f"{size_text(sent[axis])}, {often} calls a rank",
            va="center_baseline",
            fontsize=10,
            color=look.INK,
        )
    ax.set_yticks(range(3), list(SHAPE), fontsize=11)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.2 * max(sent.values()) / 1024)
    ax.set_xlabel("KiB, all ranks", fontsize=10, color=look.SOFT)
    look.caption(ax, "Sent in a step (marks: formula)")


def _layouts(ax: Any, crossings: list[Any]) -> None:
    """Draw the bytes from machine to machine, for each order of the axes."""
    look.quiet(ax, grid="x")
    for place, (_, crossed) in enumerate(crossings):
        left = 0.0
        for axis in SHAPE:
            ax.barh(place, crossed[axis] / 1024, 0.62, left, color=COLORS[axis])
            left += crossed[axis] / 1024
    ax.set_yticks(
        range(len(crossings)), [" × ".join(order) for order, _ in crossings], fontsize=10.5
    )
    ax.invert_yaxis()
    ax.set_xlabel("KiB", fontsize=10, color=look.SOFT)
    ax.legend(
        [look.patch(COLORS[axis]) for axis in SHAPE],
        list(SHAPE),
        frameon=False,
        fontsize=10,
        ncols=3,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
    )
    look.caption(ax, "outermost × … × innermost")


def _timeline(ax: Any, timelines: list[Timeline]) -> None:
    """Draw a step of each rank: computing, and over it the collectives and sends of each axis."""
    look.quiet(ax)
    steps = [
        [
            next(
                span
                for span in timeline.spans
                if span.name == "step" and span.details["step"] == number
            )
            for timeline in timelines
        ]
        for number in range(naps.NAPPED)
    ]
    step = min(
        steps,
        key=lambda spans: max(span.stop for span in spans) - min(span.start for span in spans),
    )
    begin = min(span.start for span in step)
    for timeline, own in zip(timelines, step, strict=True):
        for span in timeline.spans:
            if span.start < own.start or span.stop > own.stop or span.name == "step":
                continue
            _span(
                ax, timeline.rank, span, 1e3 * (span.start - begin), 1e3 * (span.stop - span.start)
            )
    ax.axhline(RANKS / 2 - 0.5, color="#9aa5b1", linewidth=0.8, linestyle=":")
    ax.set_yticks(
        range(RANKS),
        [f"r{rank}  dp={rank // 4} pp={rank // 2 % 2} tp={rank % 2}" for rank in range(RANKS)],
        fontsize=9.5,
    )
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(RANKS - 0.45, -0.55)
    ax.set_xlim(0, 1e3 * (max(span.stop for span in step) - begin))
    ax.set_xlabel("milliseconds", fontsize=10, color=look.SOFT)
    kinds = {
        "forward": look.PHASES["forward"],
        "backward": look.PHASES["backward"],
        "tp all-reduce": COLORS["tp"],
        "pp: sends on ▾, back ▴": COLORS["pp"],
        "dp all-reduce": COLORS["dp"],
        "optimizer": look.PHASES["optimizer"],
    }
    ax.legend(
        [look.patch(color) for color in kinds.values()],
        list(kinds),
        frameon=False,
        fontsize=10,
        ncols=6,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        handlelength=1.2,
        columnspacing=1.4,
    )
    look.caption(ax, f"The quickest of {naps.NAPPED} steps, 1F1B")


def _span(ax: Any, rank: int, span: Any, left: float, width: float) -> None:
    """Draw one span of one rank; number it if it is the first of a step of the notes, or the last
    before 2.2."""
    axis = span.details.get("axis")
    number = _step_number(rank, span)
    if number:
        light = span.name == "forward"
        ax.text(
            left + 1.5,
            rank - 0.24,
            number,
            ha="left",
            va="center_baseline",
            fontsize=8,
            fontweight="bold",
            color=look.INK if light else "white",
            zorder=3,
        )
    if span.name in ("forward", "backward"):
        ax.barh(
            rank, width, 0.84, left, color=look.PHASES[span.name], edgecolor="white", linewidth=0.7
        )
        ax.text(
            left + 1.5,
            rank + 0.08,
            str(span.details["microbatch"]),
            ha="left",
            va="center_baseline",
            fontsize=9,
            color=look.INK if span.name == "forward" else "white",
            zorder=3,
        )
    elif span.name == "optimizer":
        ax.barh(
            rank,
            width,
            0.84,
            left,
            color=look.PHASES["optimizer"],
            edgecolor="white",
            linewidth=0.7,
        )
    elif span.row == "communication" and axis in ("tp", "dp"):
        ax.barh(rank, width, 0.84, left, color=COLORS[axis], zorder=2)
    elif span.row == "messages" and axis == "pp":
        on = span.details["dst"] > rank
        ax.plot(
            left,
            rank + (0.42 if on else -0.42),
            "v" if on else "^",
            color=COLORS["pp"],
            markersize=8,
            zorder=4,
            markeredgecolor="white",
            markeredgewidth=0.5,
            clip_on=False,
        )


def _step_number(rank: int, span: Any) -> str:
    """Return the notes' number of a span, such as "1.1" for the first microbatch's forward of a
    first stage, else ""."""
    stage = rank // 2 % 2
    microbatch = span.details.get("microbatch")
    if span.name == "forward":
        return f"1.{stage + 1}" if microbatch == 0 else ""
    if span.name == "backward":
        return (
            "2.1"
            if microbatch == lab.MICROBATCHES - 1
            else "1.3"
            if microbatch == 0 and stage == 1
            else ""
        )
    if span.name == "optimizer":
        return "2.3"
    return "2.2" if span.row == "communication" and span.details.get("axis") == "dp" else ""


def _draw_five(groups: list[dict[str, list[int]]], folder: Path) -> None:
    """Draw five axes of two ranks each: one panel per axis, in which each group has one colour."""
    figure = look.new_figure(
        13.5,
        4.0,
        "Five axes, 32 ranks: along each axis every rank is in one group",
        "md.Mesh(world, dp=2, pp=2, ep=2, cp=2, tp=2), its own groups: one colour, one "
        "group (eight colours, full and light). Framed: rank 0's.",
    )
    for place, axis in enumerate(FIVE):
        ax = look.bare(figure.add_axes((0.025 + 0.195 * place, 0.05, 0.18, 0.62)))
        numbers = {
            members: number
            for number, members in enumerate(dict.fromkeys(tuple(rank[axis]) for rank in groups))
        }
        for rank, own in enumerate(groups):
            number = numbers[tuple(own[axis])]
            x = rank % 8
            y = rank // 8
            ax.add_patch(
                _box(x, y, look.RANKS[number % 8], 0.45 if number >= 8 else 0.95, 0 in own[axis])
            )
            ax.text(
                x + 0.46,
                y + 0.46,
                str(rank),
                ha="center",
                va="center_baseline",
                fontsize=9.5,
                color="white" if number < 8 else look.INK,
            )
        ax.set_xlim(-0.1, 8.1)
        ax.set_ylim(4.1, -0.1)
        with_zero = ", ".join(map(str, groups[0][axis]))
        look.caption(ax, f"{axis}: ranks {with_zero}")
    look.save(figure, folder, "mesh.png")


def _box(x: float, y: float, color: str, alpha: float, framed: bool) -> Any:
    """Return a rank's cell."""
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Rectangle

    return Rectangle(
        (x, y),
        0.92,
        0.92,
        facecolor=to_rgba(color, alpha),
        edgecolor=look.INK if framed else "white",
        linewidth=2.2 if framed else 0.5,
        zorder=2 if framed else 1,
    )


def mermaid(links: list[dict[str, Any]]) -> str:
    """Return N2:266's graph of 3D parallelism for the mesh that ran: replicas, their stages, and
    which rank sent to which."""
    lines = ["graph TB"]
    for replica in range(SHAPE["dp"]):
        lines.append(
            f'    subgraph dp{replica}["dp={replica}: group {"AB"[replica]} of the notes"]'
        )
        for stage in range(SHAPE["pp"]):
            lines.append(f'        subgraph dp{replica}pp{stage}["pp={stage}: a stage"]')
            lines += [
                f'            r{rank}["rank {rank}<br/>tp={rank % 2}"]'
                for rank in range(RANKS)
                if (rank // 4, rank // 2 % 2) == (replica, stage)
            ]
            lines.append("        end")
        lines.append("    end")
    lines += [f'    r{low} <-->|"{axis}"| r{high}' for axis, low, high in sorted(_between(links))]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    draw_figure(record, draw, HERE, size=RANKS)
