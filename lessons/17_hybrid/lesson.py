"""Lesson 17: data × pipeline × context × tensor: equal to one process; traffic, norm, memory.

mpirun -n 4 python lessons/17_hybrid/lesson.py
python lessons/17_hybrid/lesson.py                       # no launcher: eight threads
python lessons/17_hybrid/lesson.py --break rows-by-rank  # see README.md, section 9
"""

from pathlib import Path
from typing import Any

import numpy as np

import minidist as md
from minidist.comm.group import Group
from minidist.console import size_text
from minidist.grading import load_module
from minidist.lessons.lab import state_difference
from minidist.lessons.page import Page, verdict
from minidist.lessons.running import arguments, run_lesson
from minidist.parallel.hybrid.hybrid_step import plain_hybrid
from minidist.parallel.zero.memory_formula import MIXED, state_bytes

HERE = Path(__file__).resolve()
lab = load_module(HERE.with_name("experiments.py"), "17")
broken = load_module(HERE.with_name("broken.py"), "17")
BILLION = 1e9


def tour(group: Group, page: Page) -> None:
    """Run the lesson on every rank."""
    page.heading("1  The plain loop: three axes in one step")
    by_hand(group, page)
    page.heading("2  The mesh: which rank is in which group")
    mesh_table(group, page)
    two_groups(group, page)
    page.heading("3  Equal to one process, however it is cut")
    results = equal(group, page)
    page.heading("4  What travels on each axis")
    traffic(results, page)
    page.heading("5  Which axis is innermost")
    innermost(group, page)
    page.heading("6  The norm of a gradient that lies in pieces")
    norms(results, page)
    page.heading("7  Memory against efficiency (N1 §2)")
    efficiency(group, results, page)
    page.heading("10  The notes' model of 10^12 parameters (N2:293)")
    notes_example(page)


# ---------------------------------------------------------------------------------------- 1 by hand


def hand_weights(
    stages: int, width: int = 6, hidden: int = 8
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return an MLP for each stage: (up, down)."""
    draw = np.random.default_rng(0)
    return (
        [0.5 * draw.normal(size=(width, hidden)) for _ in range(stages)],
        [0.5 * draw.normal(size=(hidden, width)) for _ in range(stages)],
    )


def hand_alone(
    inputs: np.ndarray,
    targets: np.ndarray,
    ups: list[np.ndarray],
    downs: list[np.ndarray],
    lr: float,
) -> None:
    """Run the same step of all stages in one process, in place."""
    kept = []
    x = inputs
    for up, down in zip(ups, downs, strict=True):
        inner = np.maximum(x @ up, 0)
        kept.append((x, inner))
        x = inner @ down
    dy = 2 * (x - targets) / targets.size
    for (x, inner), up, down in reversed(list(zip(kept, ups, downs, strict=True))):
        dinner = (dy @ down.T) * (inner > 0)
        dx = dinner @ up.T
        up -= lr * x.T @ dinner
        down -= lr * inner.T @ dy
        dy = dx


def hand_off(group: Group, shape: dict[str, int]) -> float:
    """Return the largest difference, over the ranks, between the plain loop's weights and one
    process's after three steps."""
    mesh = md.Mesh(group, **shape)
    ups, downs = hand_weights(shape["pp"])
    stage = mesh["pp"].rank
    own = np.array_split(np.arange(ups[0].shape[1]), mesh["tp"].size)[mesh["tp"].rank]
    up = ups[stage][:, own].copy()
    down = downs[stage][own].copy()
    draw = np.random.default_rng(1)
    inputs = draw.normal(size=(11, 6))
    targets = draw.normal(size=(11, 6))
    for _ in range(3):
        plain_hybrid(mesh["dp"], mesh["pp"], mesh["tp"], inputs, targets, up, down, 0.02)
        hand_alone(inputs, targets, ups, downs, 0.02)
    apart = max(np.abs(up - ups[stage][:, own]).max(), np.abs(down - downs[stage][own]).max())
    mesh.close()
    with group.ledger.control():
        return float(group.all_reduce(np.array([apart]), op="max")[0])


def by_hand(group: Group, page: Page) -> None:
    """Run the plain loop on every mesh of `group.size` ranks."""
    rows = []
    for shape in lab.shapes(group.size):
        apart = hand_off(group, shape)
        rows.append(
            [
                lab.words(shape),
                *shape.values(),
                f"{apart:.0e}",
                "ok" if apart < 1e-12 else f"off {apart:.0e}",
            ]
        )
    page.table(
        f"Three steps of the plain loop on {group.size} ranks, 11 rows: weights off one process's",
        ["mesh", "replicas", "stages", "shards", "off by", ""],
        rows,
    )


# ------------------------------------------------------------------------------------------- 2 mesh


def mesh_table(group: Group, page: Page) -> None:
    """Show each rank's coordinates and groups, as a real mesh makes them."""
    shape = lab.cube(group.size)
    mesh = md.Mesh(group, **shape)
    axes = [axis for axis in shape if shape[axis] > 1]
    table = {axis: everyones(group, mesh[axis].world_ranks) for axis in axes}
    joint = everyones(group, mesh["pp", "tp"].world_ranks)
    rows = []
    for rank in range(group.size):
        places = np.unravel_index(rank, tuple(shape.values()))
        rows.append(
            [
                f"rank {rank}",
                ", ".join(
                    f"{axis}={place}"
                    for axis, place in zip(shape, places, strict=True)
                    if axis in axes
                ),
                *(ranks_text(table[axis][rank]) for axis in axes),
                ranks_text(joint[rank]),
            ]
        )
    mesh.close()
    page.table(
        f"md.Mesh(world, {lab.words(shape)}): rank = (dp · PP + pp) · TP + tp",
        ["", "coordinates", *(f"its {axis} group" for axis in axes), "its replica (pp, tp)"],
        rows,
        note="N0:442: a replica is the notes' group A, B, …: inside it activations, between "
        "them gradients",
    )


def two_groups(group: Group, page: Page) -> None:
    """Show N0:447 and N0:466 on the first four ranks: four GPUs, two groups that each have the
    whole model."""
    if group.size < 4:
        page.say(
            f"{group.size} ranks are no two groups of two: the notes' tables (N0:447, 466) need "
            "four"
        )
        return
    four = group.split(0 if group.rank < 4 else None)
    if four is not None:
        plan = lab.plan_of({"dp": 2, "pp": 2})
        result = lab.train(four, plan, steps=1)
        layers = np.array_split(np.arange(lab.CONFIG.layers), 2)
        rows = np.array_split(np.arange(lab.SEQUENCES), 2)
        page.table(
            "N0:447: model parallel inside a group, data parallel between the groups: "
            "Plan(dp=2, pp=2)",
            ["group (dp)", "GPU", "its part of the model", "sequences of the batch"],
            [
                [
                    "AB"[dp],
                    f"{2 * dp + pp}",
                    f"layers {layers[pp][0] + 1}-{layers[pp][-1] + 1}",
                    f"{rows[dp][0]}-{rows[dp][-1]}",
                ]
                for dp in range(2)
                for pp in range(2)
            ],
        )
        target = lab.formula(plan)
        page.table(
            "N0:466: what the four GPUs send in one step",
            ["", "what", "ranks", "bytes", "formula", ""],
            [
                [
                    where,
                    what,
                    ranks,
                    size_text(result["sent"][axis]),
                    size_text(target[axis]),
                    verdict(result["sent"][axis], target[axis]),
                ]
                for where, what, ranks, axis in (
                    ("inside a group", "activations, and their gradients", "0 1, 2 3", "pp"),
                    ("between groups", "gradients, by all-reduce", "0 2, 1 3", "dp"),
                )
            ],
            note="inside, the tied token table's gradient travels too (lesson 10)",
        )
    group.barrier()


def everyones(group: Group, ranks: tuple[int, ...]) -> list[list[int]]:
    """Return the ranks that each rank passes."""
    with group.ledger.control():
        gathered = group.all_gather(np.array([ranks]))
    return [[int(rank) for rank in row] for row in gathered]


def ranks_text(ranks: list[int]) -> str:
    """Return ranks as text, "0 4"; of five or more only the first and the last."""
    return " ".join(map(str, ranks)) if len(ranks) < 5 else f"{ranks[0]} … {ranks[-1]}"


# ------------------------------------------------------------------------------- 3 equal, 4 traffic


def equal(group: Group, page: Page) -> list[tuple[md.Plan, dict[str, Any]]]:
    """Train with every mesh, and some with the context cut too, or with ZeRO; compare with one
    process."""
    alone = md.run(lab.train, md.Plan(), size=1)[0] if group.rank == 0 else None
    rows = []
    results = []
    for plan in lab.plans(group.size):
        result = lab.train(group, plan)
        results.append((plan, result))
        if alone is not None:
            apart = state_difference(result["weights"], alone["weights"])
            rows.append(
                [
                    lab.name_of(plan),
                    f"{result['losses'][0]:.9f}",
                    f"{result['losses'][-1]:.9f}",
                    f"{apart:.0e}",
                    "ok" if apart < 1e-10 else f"off {apart:.0e}",
                ]
            )
    page.table(
        f"{lab.STEPS} steps of AdamW with clipping, {lab.SEQUENCES} sequences, float64",
        ["plan", "loss of step 1", f"of step {lab.STEPS}", "weights off by", "1e-10"],
        rows,
        note="off: the largest difference to one process's weights over the largest weight",
    )
    return results


def traffic(results: list[tuple[md.Plan, dict[str, Any]]], page: Page) -> None:
    """Compare the ledger by axis with the formulas; ZeRO-3's data axis, as in lesson 16, is left
    out."""
    rows = []
    axes = [axis for axis in lab.AXES if axis != "ep"]
    for plan, result in results:
        if plan.zero == 3:
            continue
        sent = result["sent"]
        target = lab.formula(plan, steps=lab.STEPS)
        rows.append(
            [
                lab.name_of(plan),
                *(size_text(sent[axis] / lab.STEPS) if sent[axis] else "-" for axis in axes),
                size_text(sum(target.values()) / lab.STEPS),
                "ok" if sent == target else "off",
            ]
        )
    tokens = lab.SEQUENCES * lab.CONFIG.context
    page.table(
        f"All ranks, a step of {tokens} tokens: L = {lab.CONFIG.layers}, h = {lab.CONFIG.width}",
        ["plan", *axes, "formulas together", "each axis"],
        rows,
        note="dp 2(dp·cp-1) · what a replica holds; pp 2 · tokens · h a boundary, tp times, and "
        "the tied table; cp (6cp-4) · L · tokens · h; tp 2(tp-1) · tokens · ((4L + 2) h + "
        "3)",
    )


# -------------------------------------------------------------------------------------- 5 innermost


def innermost(group: Group, page: Page) -> None:
    """Show what goes from node to node, by the order of the axes: nodes of two ranks, and two
    nodes."""
    shape = lab.cube(group.size)
    if group.size % 2:
        page.say(f"{group.size} ranks are no equal nodes: nothing to measure")
        return
    rows = []
    for order in lab.layouts(shape):
        pairs, halves = lab.crossing(group, shape, order, (2, group.size // 2))
        rows.append(
            [
                " × ".join(order),
                *(size_text(pairs[axis]) if pairs[axis] else "-" for axis in shape),
                size_text(sum(pairs.values())),
                size_text(sum(halves.values())),
            ]
        )
    page.table(
        f"{lab.words(shape)}: bytes of a step from node to node, by the order of the axes",
        [
            "outermost × … × innermost",
            *(f"{axis}, nodes of 2" for axis in shape),
            "together",
            f"nodes of {group.size // 2}",
        ],
        rows,
        note="by each message's two ends. An axis inside a node costs its links nothing; "
        "md.Mesh has tp there",
    )


# ------------------------------------------------------------------------------------------- 6 norm


def norms(results: list[tuple[md.Plan, dict[str, Any]]], page: Page) -> None:
    """Compare the norm that counts each number once with two wrong ways of counting."""
    found = [(plan, result["norms"]) for plan, result in results if result["norms"]]
    if not found:
        return
    right = found[0][1]["once"]
    page.table(
        "The norm of the first gradient",
        ["plan", "each number once", "rank 0's own", "all ranks' added up", ""],
        [
            [
                lab.name_of(plan),
                f"{norm['once']:.9f}",
                f"{norm['own']:.4f}",
                f"{norm['all']:.4f}",
                verdict(norm["once"], right, 1e-12),
            ]
            for plan, norm in found
        ],
        note="clipping by another norm is another training",
    )


# ------------------------------------------------------------------------------------- 7 efficiency


def efficiency(group: Group, results: list[tuple[md.Plan, dict[str, Any]]], page: Page) -> None:
    """Show N1 §2's two columns, measured: what a rank holds; how often and how long it waits."""
    rows = []
    tokens = lab.SEQUENCES * lab.CONFIG.context
    for plan, result in results:
        memory = result["memory"]
        state = sum(memory[name]["now"] for name in ("parameters", "gradients", "optimizer"))
        most = [
            lab.add(group, number, "max")
            for number in (
                state,
                memory["activations"]["peak"],
                result["own_sent"],
                result["calls"],
            )
        ]
        weights = (
            lab.add(group, memory["parameters"]["now"], "max")
            / lab.ITEM
            * (plan.copies if plan.zero == 3 else 1)
        )
        work = 6 * weights * tokens / plan.copies
        rows.append(
            [
                lab.name_of(plan),
                *map(size_text, most[:3]),
                most[3],
                f"{work / max(1, most[3]) / 1e6:.2f}",
                f"{lab.bubble(plan):.0%}",
            ]
        )
    page.table(
        "A step, on the rank that has most",
        ["plan", "state", "activations", "sends", "calls", "Mflop a call", "bubble"],
        rows,
        note="state: weights, gradients, two moments. Mflop a call: 6 · weights · tokens of "
        "this rank, over its collectives, sends and exchanges on all axes. bubble: by the "
        "checker's clock",
    )


def notes_example(page: Page) -> None:
    """Show N2:293: 1,024 GPUs as dp=64, tp=8, pp=2, and a model of 10^12 parameters."""
    rows = []
    for zero in range(4):
        held = state_bytes(int(1e12) // 16, MIXED, zero=zero, ranks=64)
        rows.append(
            [
                f"ZeRO-{zero}" if zero else "DDP",
                *(
                    f"{held[name] / BILLION:.1f}"
                    for name in ("parameters", "gradients", "optimizer", "total")
                ),
                "fits" if held["total"] < 80e9 else "does not fit",
            ]
        )
    page.table(
        "N2:293: 10^12 parameters on dp=64, tp=8, pp=2: GB a GPU in mixed precision, by formula",
        ["over dp", "weights", "gradients", "optimizer", "together", "80 GB"],
        rows,
        note="activations are added. tp and pp divide by 16; without ZeRO-3 that leaves 125 "
        "GB of weights",
    )


BREAKS = broken.BREAKS


if __name__ == "__main__":
    run_lesson(arguments(__doc__, BREAKS).parse_args(), tour, BREAKS, alone=8)
