"""The figures of lesson 05: what passes through device 0, and what each device holds; replicas that
take turns.

python lessons/05_data_parallel/figure.py [--out DIR]      # figure.png and turns.png
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
    """Return on rank 0 device 0's bytes for 1 to MOST devices, and both nvidia-smi
    tables."""
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
    return found


def draw(recorded: dict[str, Any], folder: Path) -> None:
    """Draw figure.png from what was recorded, and turns.png from the clock."""
    look.save(draw_device_0(recorded), folder)
    look.save(draw_turns(), folder, "turns.png")


def draw_device_0(recorded: dict[str, Any]) -> Any:
    """Draw what passes through device 0, and what each device holds."""
    config = lab.TALL
    figure = look.new_figure(
        13.5,
        4.3,
        "DP: everything passes through device 0",
        f"GPT of {config.layers} layers, width {config.width}, vocabulary {config.vocabulary}, "
        f"sequences of {config.context} tokens, float32, Adam; counted by the ledger and the "
        "memory account. DP 1 to 5: N0:133.",
    )
    _traffic(figure.add_axes((0.06, 0.13, 0.40, 0.57)), recorded["traffic"])
    _memory(figure.add_axes((0.55, 0.13, 0.42, 0.57)), recorded["dp"], recorded["ddp"])
    return figure


def draw_turns() -> Any:
    """Draw what each replica's thread does on the clock, with small and with large products."""
    figure = look.new_figure(
        13.5,
        3.7,
        "DP: one interpreter serves all replicas",
        f"The beginning of a step of {RANKS} replicas on the virtual clock. Dark: the thread holds "
        f"the lock, {1e6 * lab.HOLD:g} µs for each call. Light: it computes. Grey: it waits for "
        "the lock.",
    )
    for place, config, title, shown in (
        (0.06, lab.PYTHON, "Small products", 0.4e-3),
        (0.55, lab.BLAS, "Large products", 3e-3),
    ):
        _turns(figure.add_axes((place, 0.17, 0.41, 0.48)), config, title, shown)
    return figure


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


def _turns(ax: Any, config: Any, title: str, shown: float) -> None:
    """Draw the first `shown` seconds of each replica's calls: holding the lock, and without it."""
    look.quiet(ax, grid="x")
    calls = lab.calls_on_a_clock(config, RANKS, sequences=RANKS)
    for replica in range(RANKS):
        ax.barh(replica, 1e3 * shown, 0.66, 0, color=look.GRID)
    for replica, begun, done in calls:
        if begun < shown:
            color = look.RANKS[replica]
            width = 1e3 * (done - begun)
            ax.barh(replica, width, 0.66, 1e3 * begun, color=color, alpha=0.45, linewidth=0)
            ax.barh(replica, 1e3 * lab.HOLD, 0.66, 1e3 * begun, color=color, linewidth=0)
    ax.set_yticks(range(RANKS), [f"replica {replica}" for replica in range(RANKS)], fontsize=10.5)
    ax.set_ylim(RANKS - 0.4, -0.6)
    ax.set_xlim(0, 1e3 * shown)
    ax.set_xlabel("milliseconds on the clock", color=look.SOFT, fontsize=10)
    busy = lab.turns_on_a_clock(config, RANKS, sequences=RANKS)[1]
    look.caption(ax, f"{title}: {busy:.2f} processors busy on average")


if __name__ == "__main__":
    draw_figure(record, draw, HERE, size=RANKS, transport="auto")
