"""Lesson 24: a thousand virtual GPUs: the modules that train, on arrays without data, and one clock.

    python lessons/24_simulate/lesson.py
    python lessons/24_simulate/lesson.py --break straggler        # or slow-ring, tensor-across-nodes
"""

from collections.abc import Sequence
from typing import Any

from minidist.lessons.page import Page, verdict
from minidist.lessons.running import arguments, run_lesson

import minidist as md
from minidist.comm.group import Group
from minidist.nn import GPTConfig
from minidist.observe.events import Await, Busy, Event, GroupCall, Start
from minidist.observe.replay import plain_replay
from minidist.simulate.cluster import Cluster
from minidist.simulate.results import Simulation
from minidist.simulate.walk import call_cost

CONFIG = GPTConfig(vocabulary=51200, context=2048, layers=8, width=4096, heads=32, positions="rotary")
"""Eight blocks as llama's 7 billion has 32: 2 billion weights."""
MIB = 1 << 20


def tour(group: Group, page: Page) -> None:
    """The lesson: nothing in it needs ranks, so rank 0 runs it alone."""
    if group.rank == 0:
        page.heading("1  Traces of two ranks, on one clock")
        plain(page)
        page.heading("2  Predict, then see: which plan for 2 billion weights on 16 H100s?")
        plans(page)
        page.heading("3  Predict, then see: the same job on four times the devices")
        four_times(page)


# ------------------------------------------------------------------------------------------------ 1 the plain replay

def step(forward: float, backward: float) -> list[Event]:
    """A step of a rank: two layers backward, each with an all-reduce of its gradients behind it."""
    calls = [GroupCall("dp", "all_reduce", "ring", MIB, name=f"layer {layer}") for layer in (1, 0)]
    return [Busy(forward, "forward"), Busy(backward, "backward"), Start(1, calls[0]), Busy(backward, "backward"),
            Start(2, calls[1]), Await(1), Await(2), Busy(1.0, "update")]


def plain(page: Page) -> None:
    """Two ranks, one of them slower; seconds by hand beside plain_replay's."""
    rows = []
    for slower, by_hand in ((1.0, 4 + 3 + 3 + 2 + 1), (1.5, 1.5 * (4 + 3 + 3) + 2 + 1)):
        traces = [step(4.0, 3.0), step(slower * 4.0, slower * 3.0)]
        ends = plain_replay(traces, lambda axis, rank: (0, 1), lambda rank, work: float(str(work)),
                            lambda call, ranks: 2.0)
        rows.append([f"rank 1 takes {slower:g} times as long", f"{max(ends):g} s", f"{by_hand:g} s",
                     verdict(max(ends), by_hand)])
    page.table("Forward 4 s, backward 2 · 3 s, each all-reduce 2 s, update 1 s", ["", "replayed", "by hand", ""], rows,
               note="the first all-reduce runs beside the second layer's backward; the second one is waited for")


# --------------------------------------------------------------------------------------- 2, 3 predict, then see

def row(name: str, found: Simulation) -> list[Any]:
    """A plan in a table."""
    exposed = sum(found.parts["exposed"].values()) / found.step_seconds
    return [name, f"{found.step_seconds:.3f} s", f"{found.mfu:.1%}", f"{exposed:.1%}", f"{found.bubble:.1%}",
            f"{found.peak(0)['total'] / 2 ** 30:.1f} GiB"]


COLUMNS = ["plan", "step", "MFU", "waits for bytes", "waits for others", "memory, rank 0"]


def simulated(plan: str, cluster: str, batch: int, **options: Any) -> Simulation:
    """A step of CONFIG."""
    choice = {name: options.pop(name) for name in ("zero", "microbatches") if name in options}
    axes: dict[str, Any] = {axis: int(size) for axis, size in (part.split("=") for part in plan.split(","))}
    return md.simulate(md.Plan(precision="bf16", **axes, **choice), CONFIG, cluster, batch=batch, **options)


def plans(page: Page) -> None:
    """Five plans of 16 devices in two nodes."""
    page.say("Write down the order of these five, fastest first, and which waits most for bytes. Then go on reading.")
    ways: Sequence[tuple[str, dict[str, int]]] = (
        ("dp=16", {}), ("dp=16", {"zero": 3}), ("dp=2,tp=8", {}), ("dp=1,tp=16", {}),
        ("dp=8,pp=2", {"microbatches": 4}))
    page.table("64 sequences a step, h100:2x8", COLUMNS, [
        row(plan + "".join(f", {name} {value}" for name, value in options.items()),
            simulated(plan, "h100:2x8", 64, **options)) for plan, options in ways])


def four_times(page: Page) -> None:
    """Strong and weak scaling of ZeRO-3."""
    page.say("Write down how many times as fast 64 devices are as 16: with the same batch; with four times the batch.")
    rows, first = [], simulated("dp=16", "h100:2x8", 64, zero=3)
    for nodes, batch in ((2, 64), (8, 64), (8, 256)):
        found = simulated(f"dp={8 * nodes}", f"h100:{nodes}x8", batch, zero=3)
        rows.append([8 * nodes, batch, f"{found.step_seconds:.3f} s", f"{found.mfu:.1%}",
                     f"{found.tokens_per_second / first.tokens_per_second:.2f} times"])
    page.table("dp, zero 3", ["devices", "sequences a step", "step", "MFU", "tokens a second"], rows)


# ------------------------------------------------------------------------------------------------------- Break it

def slow_ring() -> None:
    """A ring whose neighbours always lie in the other node: every message crosses the network, two to a card."""
    cluster = Cluster.parse("v100:2x8")
    for name, places in (("node by node", range(16)), ("to and fro", [8 * (i % 2) + i // 2 for i in range(16)])):
        cost = call_cost(GroupCall("dp", "all_reduce", "ring", 256 * MIB), tuple(places), cluster)
        crossing = sum(nbytes for link, nbytes in cost.link_bytes.items() if "nic" in cluster.links[link].name) // 2
        print(f"{name:13} {1e3 * cost.seconds:7.2f} ms, {crossing / MIB:8,.0f} MiB through network cards")


def tensor_across_nodes() -> None:
    """The axis of the most messages over the links of the least bytes a second."""
    for order in ("dp,pp,ep,cp,tp", "tp,dp,pp,ep,cp"):
        found = simulated("dp=2,tp=8", "h100:2x8", 64, order=order.split(","))
        inside = "tensor parallel in a node" if order.endswith("tp") else "tensor parallel across nodes"
        print(f"{inside:28} {found.step_seconds:.3f} s a step, of which tp waits {found.parts['exposed']['tp']:.3f} s")


def straggler() -> None:
    """One rank of 64 computes at half the speed."""
    for name, slow in (("all alike", {}), ("rank 3 at half speed", {3: 2.0})):
        found = simulated("dp=64", "h100:8x8", 256, zero=1, stragglers=slow)
        print(f"{name:21} {found.step_seconds:.3f} s a step, {found.bubble:.1%} of all ranks' time spent waiting "
              "for others")


BREAKS = {"slow-ring": slow_ring, "tensor-across-nodes": tensor_across_nodes, "straggler": straggler}


def main() -> None:
    """Parse the command line, then run; one rank is enough."""
    run_lesson(arguments(__doc__, BREAKS).parse_args(), tour, BREAKS, alone=1)


if __name__ == "__main__":
    main()
