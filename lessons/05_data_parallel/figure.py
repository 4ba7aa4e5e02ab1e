"""The figure of lesson 05: what passes through device 0, what each device holds, and replicas that
take turns.

python lessons/05_data_parallel/figure.py [--out DIR]
"""

from pathlib import Path
from typing import Any

from minidist.comm.cost.volume import FORMULAS, Case
from minidist.comm.group import Group
from minidist.grading import load_module
from minidist.lessons import figures as look
from minidist.lessons.running import draw_figure

HERE = Path(__file__).resolve().parent
lab = load_module(HERE / "experiments.py", "05")
RANKS = 4
MOST = 8
WHAT = {
    "broadcast": ("the model, out", look.MEMORY["parameters"], "DP 2"),
    "reduce": ("gradients, in", look.MEMORY["gradients"], "DP 5"),
    "gather": ("outputs, in", look.MEMORY["activations"], "DP 3"),
    "scatter": ("their gradients and inputs, out", look.MEMORY["communication"], "DP 1, 4"),
}
"""What each verb carries, its colour, and the notes' step (N0:133)."""


def record(group: Group) -> dict[str, Any]:
    """Return on rank 0 device 0's bytes for 1 to MOST devices, both nvidia-smi tables, and which
    replica ran when."""
    found: dict[str, Any] = {}
    if group.rank == 0:
        found = {
            "traffic": [
                lab.traffic(replicas, 2 * replicas, lab.TALL) for replicas in range(1, MOST + 1)
            ],
            "dp": lab.smi_of_dp(RANKS),
        }
    group.barrier()
    found["ddp"] = lab.smi_of_ddp(group)
    group.barrier()
    if group.rank == 0:
        found["python"] = min(
            (lab.turns(lab.PYTHON, 3, sequences=3, steps=1) for _ in range(8)),
            key=lambda run: run["seconds"],
        )
        found["blas"] = min(
            (lab.turns(lab.BLAS, 3, sequences=3, steps=1) for _ in range(8)),
            key=lambda run: run["seconds"],
        )
    group.barrier()
    return found


def draw(recorded: dict[str, Any], folder: Path) -> None:
    """Draw figure.png from what was recorded."""
    config = lab.TALL
    title = "DP: everything passes through device 0, and one interpreter serves all replicas"
    figure = look.new_figure(
        13.5,
        7.2,
        title,
        f"GPT of {config.layers} layers, width {config.width}, vocabulary {config.vocabulary}, "
        f"sequences of {config.context} tokens, float32, Adam; counted by the ledger and the "
        "memory account. DP 1 to 5: N0:133.",
    )
    _traffic(figure.add_axes((0.06, 0.48, 0.40, 0.34)), recorded["traffic"])
    _memory(figure.add_axes((0.55, 0.48, 0.42, 0.34)), recorded["dp"], recorded["ddp"])
    for place, key, title in (
        (0.06, "python", "Small products: Python"),
        (0.55, "blas", "Large products: BLAS"),
    ):
        _turns(
            figure.add_axes((place, 0.09, 0.42 if place > 0.5 else 0.40, 0.22)),
            recorded[key],
            title,
        )
    look.save(figure, folder)


def _traffic(ax: Any, runs: list[dict[str, Any]]) -> None:
    """Draw the bytes in and out of device 0, stacked by verb, and those of a rank of the ring."""
    look.quiet(ax, grid="y")
    for replicas, run in enumerate(runs, start=1):
        floor = 0.0
        for verb, (_, color, number) in WHAT.items():
            height = (run["sent"].get(verb, 0) + run["received"].get(verb, 0)) / 2**20
            ax.bar(replicas, height, 0.62, floor, color=color, edgecolor="white", linewidth=0.8)
            if replicas == len(runs):
                ax.text(
                    replicas + 0.38,
                    floor + height / 2,
                    number,
                    fontsize=9,
                    va="center",
                    color=look.INK,
                )
            floor += height
    ring = [
        2
        * FORMULAS["all_reduce", "ring"].bytes_of(Case(size=size, nbytes=run["model"]))
        / size
        / 2**20
        for size, run in enumerate(runs, start=1)
    ]
    ax.plot(range(1, len(runs) + 1), ring, color=look.INK, linewidth=1.8, marker="o", markersize=4)
    handles = [look.patch(color) for _, color, _ in WHAT.values()]
    handles.append(ax.lines[0])
    ax.legend(
        handles,
        [*(name for name, *_ in WHAT.values()), "DDP: a rank of the ring, in and out"],
        frameon=False,
        fontsize=9.5,
        labelcolor=look.INK,
        loc="upper left",
    )
    ax.set_xticks(range(1, len(runs) + 1))
    ax.set_xlim(0.3, len(runs) + 1.2)
    ax.set_xlabel("devices", color=look.SOFT, fontsize=10.5)
    ax.set_ylabel("MiB a step", color=look.SOFT, fontsize=10.5)
    look.caption(ax, "Through device 0 in one step, 2 sequences a device")


def _memory(ax: Any, dp: list[dict[str, Any]], ddp: list[dict[str, Any]]) -> None:
    """Draw the nvidia-smi tables as bars: process id, peak memory, busy time."""
    look.bare(ax)
    most = max(record["peak"] for record in (*dp, *ddp))
    for column, (name, records, color) in enumerate(
        (("DP", dp, look.RANKS[1]), ("DDP", ddp, look.RANKS[0]))
    ):
        left = 0.52 * column
        first = "device" if name == "DP" else "rank"
        for shift, words in ((0, first), (0.095, "process"), (0.205, "memory, peak; busy")):
            ax.text(left + shift, 0.98, words, fontsize=10, color=look.SOFT)
        for row, record in enumerate(records):
            y = 0.8 - 0.21 * row
            ax.text(
                left + 0.01,
                y,
                f"{row}",
                fontsize=11,
                color=look.INK,
                va="center",
                fontweight="bold",
            )
            ax.text(left + 0.095, y, f"{record['pid']}", fontsize=11, color=look.INK, va="center")
            width = 0.12 * record["peak"] / most
            ax.barh(y, width, 0.12, left + 0.205, color=color)
            ax.text(
                left + 0.215 + width,
                y,
                f"{record['peak'] / 2**20:.1f} MiB\n{1e3 * record['busy']:.0f} ms",
                fontsize=9.5,
                color=look.INK,
                va="center",
            )
    ax.set_xlim(0, 1)
    ax.set_ylim(0.05, 1.05)
    look.caption(
        ax, f"As nvidia-smi shows it (N0:180): {RANKS} devices of DP, {RANKS} ranks of DDP"
    )


def _turns(ax: Any, run: dict[str, Any], title: str) -> None:
    """Draw when each replica's thread had a processor."""
    look.quiet(ax, grid="x")
    for lane, stamps in enumerate(run["stamps"]):
        begin = 1e3 * stamps[0][0]
        end = 1e3 * stamps[-1][0]
        ax.barh(lane, end - begin, 0.66, begin, color=look.GRID)
        for start, stop, share in lab.shares(stamps):
            ax.barh(
                lane,
                1e3 * (stop - start),
                0.66,
                1e3 * start,
                color=look.RANKS[lane],
                alpha=share,
                linewidth=0,
            )
    lanes = len(run["stamps"])
    ax.set_yticks(range(lanes), [f"replica {lane}" for lane in range(lanes)], fontsize=10.5)
    ax.set_ylim(lanes - 0.4, -0.6)
    ax.set_xlim(0, None)
    ax.set_xlabel(
        "milliseconds of one step; the stronger the colour, the more the thread runs",
        color=look.SOFT,
        fontsize=10,
    )
    look.caption(ax, f"{title}: {run['cores']:.1f} processors busy on the average")


if __name__ == "__main__":
    draw_figure(record, draw, HERE, size=RANKS, transport="auto")
