"""Lesson 24: a thousand virtual GPUs: the modules that train, on data-free arrays and one clock.

python lessons/24_simulate/lesson.py --guess 0.5,0.5,0.5,0.5,0.5     # your seconds of the five
                                                                     plans of section 2
python lessons/24_simulate/lesson.py
python lessons/24_simulate/lesson.py --break straggler               # see README.md, section 9
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import minidist as md
from minidist.comm.group import Group
from minidist.files import scratch
from minidist.grading import load_module
from minidist.lessons.page import Page, verdict
from minidist.lessons.running import Break, arguments, run_lesson
from minidist.nn import GPTConfig
from minidist.observe.events import Await, Busy, Event, GroupCall, Start
from minidist.observe.replay import plain_replay
from minidist.simulate.cluster import Cluster
from minidist.simulate.one_rank import run_rank
from minidist.simulate.results import Simulation
from minidist.simulate.walk import call_cost

CONFIG = GPTConfig(
    vocabulary=51200, context=2048, layers=8, width=4096, heads=32, positions="rotary"
)
"""Eight blocks as llama's 7 billion has 32: 2 billion weights."""
MIB = 1 << 20
SMALL = GPTConfig(vocabulary=64, context=16, layers=2, width=32, heads=4)
lab = load_module(Path(__file__).resolve().with_name("experiments.py"), "24")


def tour(group: Group, page: Page, guesses: Sequence[float] = (), *, by_size: bool = False) -> None:
    """Run the lesson on rank 0: nothing in it needs other ranks."""
    if group.rank == 0:
        page.heading("1  Traces of two ranks, on one clock")
        plain(page)
        page.heading("2  Predict, then see: which plan for 2 billion weights on 16 H100s?")
        plans(page, guesses)
        page.heading("3  Predict, then see: the same job on four times the devices")
        four_times(page)
        page.heading("4  Predict, simulate, run: what four ranks send")
        really(page)
        page.heading("5  Where ranks lie")
        placed(page)
        page.heading("6  What the notes claim")
        claimed(page)
        if by_size:
            table_by_size(page)


# ------------------------------------------------------------------------------- 1 the plain replay


def step(forward: float, backward: float) -> list[Event]:
    """Return a step of a rank: two layers backward, each followed by an all-reduce of its
    gradients."""
    calls = [GroupCall("dp", "all_reduce", "ring", MIB, name=f"layer {layer}") for layer in (1, 0)]
    return [
        Busy(forward, "forward"),
        Busy(backward, "backward"),
        Start(1, calls[0]),
        Busy(backward, "backward"),
        Start(2, calls[1]),
        Await(1),
        Await(2),
        Busy(1.0, "update"),
    ]


def plain(page: Page) -> None:
    """Compare plain_replay's seconds with those by hand, for two ranks of which one is slower."""
    rows = []
    for slower, by_hand in ((1.0, 4 + 3 + 3 + 2 + 1), (1.5, 1.5 * (4 + 3 + 3) + 2 + 1)):
        traces = [step(4.0, 3.0), step(slower * 4.0, slower * 3.0)]
        ends = plain_replay(
            traces,
            lambda axis, rank: (0, 1),
            lambda rank, work: float(str(work)),
            lambda call, ranks: 2.0,
        )
        rows.append(
            [
                f"rank 1 takes {slower:g} times as long",
                f"{max(ends):g} s",
                f"{by_hand:g} s",
                verdict(max(ends), by_hand),
            ]
        )
    page.table(
        "Forward 4 s, backward 2 · 3 s, each all-reduce 2 s, update 1 s",
        ["", "replayed", "by hand", ""],
        rows,
        note="the first all-reduce runs beside the second layer's backward; the second one is "
        "waited for",
    )


# --------------------------------------------------------------------------- 2, 3 predict, then see


def row(name: str, found: Simulation) -> list[Any]:
    """Return a plan's row of a table."""
    exposed = sum(found.parts["exposed"].values()) / found.step_seconds
    return [
        name,
        f"{found.step_seconds:.3f} s",
        f"{found.mfu:.1%}",
        f"{exposed:.1%}",
        f"{found.bubble:.1%}",
        f"{found.peak(0)['total'] / 2**30:.1f} GiB",
    ]


COLUMNS = ["plan", "step", "MFU", "waits for bytes", "waits for others", "memory, rank 0"]


def simulated(plan: str, cluster: str, batch: int, **options: Any) -> Simulation:
    """Simulate a step of CONFIG."""
    choice = {name: options.pop(name) for name in ("zero", "microbatches") if name in options}
    axes: dict[str, Any] = {
        axis: int(size) for axis, size in (part.split("=") for part in plan.split(","))
    }
    return md.simulate(
        md.Plan(precision="bf16", **axes, **choice), CONFIG, cluster, batch=batch, **options
    )


PLANS: Sequence[tuple[str, dict[str, int]]] = (
    ("dp=16", {}),
    ("dp=16", {"zero": 3}),
    ("dp=2,tp=8", {}),
    ("dp=1,tp=16", {}),
    ("dp=8,pp=2", {"microbatches": 4}),
)


def plans(page: Page, guesses: Sequence[float]) -> None:
    """Show five plans of 16 devices in two nodes, with the seconds that the reader guessed."""
    page.say(
        "Write down the seconds of a step of each of these five before you read on: --guess "
        "takes them."
        if not guesses
        else "Your seconds stand beside the simulator's."
    )
    found = [simulated(plan, "h100:2x8", 64, **options) for plan, options in PLANS]
    names = [
        plan + "".join(f", {name} {value}" for name, value in options.items())
        for plan, options in PLANS
    ]
    rows = [row(name, one) for name, one in zip(names, found, strict=True)]
    if guesses:
        rows = [
            [*cells, f"{guess:.3g} s", f"{guess / one.step_seconds - 1:+.0%}"]
            for cells, guess, one in zip(rows, guesses, found, strict=True)
        ]
    page.table(
        "64 sequences a step, h100:2x8", COLUMNS + ["your guess", "error"] * bool(guesses), rows
    )
    if guesses:
        seconds = [one.step_seconds for one in found]
        right = sorted(range(5), key=seconds.__getitem__) == sorted(
            range(5), key=guesses.__getitem__
        )
        page.say(f"Your order is {'right' if right else 'another one'}.")


def four_times(page: Page) -> None:
    """Show strong and weak scaling of ZeRO-3."""
    page.say(
        "Write down how many times as fast 64 devices are as 16: with the same batch; with four "
        "times the batch."
    )
    rows = []
    first = simulated("dp=16", "h100:2x8", 64, zero=3)
    for nodes, batch in ((2, 64), (8, 64), (8, 256)):
        found = simulated(f"dp={8 * nodes}", f"h100:{nodes}x8", batch, zero=3)
        rows.append(
            [
                8 * nodes,
                batch,
                f"{found.step_seconds:.3f} s",
                f"{found.mfu:.1%}",
                f"{found.tokens_per_second / first.tokens_per_second:.2f} times",
            ]
        )
    page.table(
        "dp, zero 3", ["devices", "sequences a step", "step", "MFU", "tokens a second"], rows
    )


# ------------------------------------------------------------------------- 4 predict, simulate, run


def sent(rows: Sequence[dict[str, Any]]) -> Counter[tuple[str, str, str]]:
    """Return the bytes and messages of a ledger, by axis and verb."""
    found: Counter[tuple[str, str, str]] = Counter()
    for entry in rows:
        found[entry["axis"], entry["verb"], "bytes"] += entry["nbytes"]
        found[entry["axis"], entry["verb"], "messages"] += entry["messages"]
    return found


def train(
    world: Group, plan: md.Plan, batch: tuple[np.ndarray, np.ndarray]
) -> list[dict[str, Any]]:
    """Run two real steps of a rank; return its ledger."""
    trainer = md.Trainer(plan, SMALL, world)
    for _ in range(2):
        trainer.step(batch)
    trainer.close()
    return world.ledger.rows()


def really(page: Page) -> None:
    """Compare the bytes of each rank run separately, on arrays without data, with those of four
    ranks with data: they must be equal."""
    plan = md.Plan(dp=2, tp=2, zero=1)
    ids = np.random.default_rng(24).integers(0, SMALL.vocabulary, (4, SMALL.context + 1))
    batch = ids[:, :-1], ids[:, 1:]
    alone = Counter[tuple[str, str, str]]()
    among = Counter[tuple[str, str, str]]()
    for rank, rows in enumerate(md.run(train, plan, batch, size=plan.size, transport="threads")):
        among += sent(rows)
        alone += sent(
            run_rank(plan, SMALL, rank, rows=4, steps=2, device_kind="cpu", batch=batch).ledger
        )
    page.table(
        "dp=2, tp=2, ZeRO-1: two steps, all four ranks",
        ["axis", "verb", "simulated", "really sent", ""],
        [
            [
                axis,
                verb,
                f"{alone[axis, verb, what]:,} {what}",
                f"{among[axis, verb, what]:,}",
                verdict(alone[axis, verb, what], among[axis, verb, what]),
            ]
            for axis, verb, what in sorted(among)
        ],
        note="the very modules ran in both; without data a rank needs no others. minidist plan "
        "--here --run 3 puts predicted seconds beside measured ones",
    )


# -------------------------------------------------------------------------------- 5 where ranks lie


def placed(page: Page) -> None:
    """Show the time of one call by where its eight ranks lie."""
    cluster = Cluster.parse("h100:2x8")
    rows = []
    for name, places in (
        ("in one node", tuple(range(8))),
        ("in two nodes, four each", (0, 1, 2, 3, 8, 9, 10, 11)),
        ("in two nodes, every other place", tuple(range(0, 16, 2))),
    ):
        cost = call_cost(
            GroupCall("tp", "all_reduce", "native", 64 * MIB, itemsize=2), places, cluster
        )
        rows.append(
            [
                name,
                f"{1e3 * cost.seconds:.2f} ms",
                f"{crossing(cost.link_bytes, cluster) / MIB:,.0f} MiB",
            ]
        )
    page.table(
        "An all-reduce of 64 MiB among 8 of 16 H100s",
        ["its ranks lie", "takes", "through network cards"],
        rows,
        note="one layer of tensor parallelism makes four such calls a step and microbatch, and "
        "waits for each",
    )


def crossing(link_bytes: dict[int, int], cluster: Cluster) -> int:
    """Return the bytes that leave a node."""
    return (
        sum(nbytes for link, nbytes in link_bytes.items() if "nic" in cluster.links[link].name) // 2
    )


# --------------------------------------------------------------------------- 6 what the notes claim


def claimed(page: Page) -> None:
    """Compare the notes' numbers of machines with what is computed."""
    with scratch() as folder:
        page.table(
            "N4 §3 and N4:104",
            ["", "the notes", "computed"],
            [[one.what, one.says, f"{one.found:.3g} {one.unit}"] for one in lab.claims(folder)],
            note="--by-size also computes the notes' table by model size, in some minutes",
        )


def table_by_size(page: Page) -> None:
    """Show the notes' table by model size: the best of all plans, and the best that follows the
    row."""
    page.table(
        "N2 §12.1, row by row; a step as minidist plan ranks it: estimated, or replayed",
        [
            "model, cluster, sequences",
            "best of all plans",
            "takes",
            "best that follows the row",
            "takes",
        ],
        [
            [f"{one.name}, {one.cluster}, {one.batch}", *lab.told(one.best), *lab.told(one.advised)]
            for one in lab.advised()
        ],
        note="; ".join(
            f"row {number}: {advice}" for number, (_, size, advice) in enumerate(lab.TABLE, 1)
        ),
    )


# ----------------------------------------------------------------------------------------- Break it


def slow_ring() -> None:
    """Run a ring whose neighbours always lie in the other node: every message crosses the network,
    two per card."""
    cluster = Cluster.parse("v100:2x8")
    for name, places in (
        ("node by node", range(16)),
        ("to and fro", [8 * (i % 2) + i // 2 for i in range(16)]),
    ):
        cost = call_cost(GroupCall("dp", "all_reduce", "ring", 256 * MIB), tuple(places), cluster)
        print(
            f"{name:13} {1e3 * cost.seconds:7.2f} ms, "
            f"{crossing(cost.link_bytes, cluster) / MIB:8,.0f} MiB through network cards"
        )


def tensor_across_nodes() -> None:
    """Put the axis with the most messages on the links with the fewest bytes per second."""
    for order in ("dp,pp,ep,cp,tp", "tp,dp,pp,ep,cp"):
        found = simulated("dp=2,tp=8", "h100:2x8", 64, order=order.split(","))
        inside = (
            "tensor parallel in a node" if order.endswith("tp") else "tensor parallel across nodes"
        )
        print(
            f"{inside:28} {found.step_seconds:.3f} s a step, of which tp waits "
            f"{found.parts['exposed']['tp']:.3f} s"
        )


def straggler() -> None:
    """Let one rank of 64 compute at half the speed."""
    for name, slow in (("all alike", {}), ("rank 3 at half speed", {3: 2.0})):
        found = simulated("dp=64", "h100:8x8", 256, zero=1, stragglers=slow)
        print(
            f"{name:21} {found.step_seconds:.3f} s a step, {found.bubble:.1%} of all ranks' time "
            "spent waiting for others"
        )


BREAKS = {
    "slow-ring": Break(slow_ring, says="7,680 MiB through network cards"),
    "tensor-across-nodes": Break(tensor_across_nodes, says="tensor parallel across nodes 0.3"),
    "straggler": Break(straggler, says="rank 3 at half speed  0.3"),
}


def seconds_of(text: str) -> list[float]:
    """Return the value of --guess. Raises: ArgumentTypeError."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if len(found) != len(PLANS) or min(found) <= 0:
        raise argparse.ArgumentTypeError(
            f"write {len(PLANS)} numbers of seconds, such as 0.5,0.4,0.3,0.2,0.1"
        )
    return found


def main() -> None:
    """Parse the command line, then run; one rank is enough."""
    parser = arguments(__doc__, BREAKS)
    parser.add_argument(
        "--guess",
        type=seconds_of,
        default=[],
        metavar="S,S,S,S,S",
        help="what you think that a step of the five plans of section 2 takes, in seconds",
    )
    parser.add_argument(
        "--by-size", action="store_true", help="also the notes' table by model size, row by row"
    )
    options = parser.parse_args()
    run_lesson(
        options, partial(tour, guesses=options.guess, by_size=options.by_size), BREAKS, alone=1
    )


if __name__ == "__main__":
    main()
