"""Lesson 04: topology: wirings and collectives; hierarchical all-reduce; α and β of your machine.

mpirun -n 4 python lessons/04_topology/lesson.py
python lessons/04_topology/lesson.py                              # no launcher: eight threads
python lessons/04_topology/lesson.py --break one-leader           # see README.md, section 9
"""

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from minidist.comm.cost.link_model import LinkCost, LinkWork, Sample, fit
from minidist.comm.cost.volume import box
from minidist.comm.group import Group
from minidist.comm.records import gather_records
from minidist.console import size_text
from minidist.grading import load_module
from minidist.lessons.lab import median_seconds
from minidist.lessons.page import Page, verdict
from minidist.lessons.running import arguments, run_lesson
from minidist.simulate.messages import Operands, record

HERE = Path(__file__).resolve().parent
wiring = load_module(HERE / "wiring.py", "04")
links = load_module(HERE / "links.py", "04")
spines = load_module(HERE / "spines.py", "04")
server = load_module(HERE / "server.py", "04")

DEVICES = 16  # of the table of wirings
BOXES = (7, 9, 27, 64)  # ranks of tori of one, two, three and three dims of equal sides
ELEMENTS = 840 * 8  # of float64: 840 is divisible by every P from 1 to 8
ALGORITHMS = ("ring", "halving-doubling", "pairwise", "torus", "torus-both", "tree")
# Between machines a message takes 3 ms, and 3 ms more per 64 KiB.
NETWORK = {"alpha": 3e-3, "beta": 3e-3 / 65536}
SIZES = (1024, 8192, 65536, 262144, 1048576)  # bytes, for the fit

Message = tuple[int, int, int]  # src, dst, bytes


def tour(group: Group, page: Page) -> None:
    """Run the lesson on every rank."""
    page.heading("1  Wirings")
    wirings(page)
    page.heading("2  The same messages over other wires")
    same_messages(group, page)
    both_ways(page)
    page.heading("3  One message on its way through N4's server")
    server.followed(page)
    page.heading("4  Two machines: flat ring against hierarchical")
    two_machines(group, page)
    page.heading("5  α and β of this machine")
    alpha_and_beta(group, page)
    page.heading("5.1  One-sided: put compared with send and receive")
    one_sided(group, page)
    page.heading("6  Several spines")
    spines.routed(page)
    page.heading("7  Where ranks lie")
    spines.placed(page)


# --------------------------------------------------------------------------------------- 1  wirings


def wirings(page: Page) -> None:
    """Compare the counted links, hops and bisection of each wiring with the formulas."""
    if not page.writes:
        return
    rows = []
    formulas = {
        "ring": ("2", 2),
        "torus": ("2 sqrt P", 8),
        "switch": ("P/2", DEVICES // 2),
        "two machines": ("1", 1),
        "fully connected": ("P^2/4", DEVICES**2 // 4),
    }
    for make in (*wiring.WIRINGS, wiring.full):
        wires = make(DEVICES)
        far = wiring.hops(wires)
        cut = wiring.bisection(wires)
        formula, value = formulas[wires.name]
        rows.append(
            [
                wires.name,
                len(wires.links),
                max(far),
                f"{statistics.mean(far):.2f}",
                cut,
                formula,
                verdict(cut, value),
            ]
        )
    page.table(
        f"{DEVICES} devices",
        ["", "links", "most hops", "mean", "bisection", "formula", ""],
        rows,
        note="bisection: links between two halves, the fewest over all ways to halve, counted "
        "one by one",
    )


# ------------------------------------------------------------ 2  the same messages over other wires


def recorded(group: Group, algorithm: str) -> list[Message]:
    """Return the messages of one all_reduce of ELEMENTS on rank 0; [] elsewhere."""
    events: list[Any] = []
    stop = group.ledger.subscribe(events.append)
    group.all_reduce(np.ones(ELEMENTS), algorithm=algorithm)
    stop()
    places = group.world_ranks.index
    mine = [
        [places(event.details["src"]), places(event.details["dst"]), event.details["nbytes"]]
        for event in events
        if event.kind == "message"
    ]
    return [tuple(message) for rank in gather_records(group, mine) or [] for message in rank]


def same_messages(group: Group, page: Page) -> None:
    """Route the recorded messages of each algorithm over each wiring; show the bytes of the busiest
    link."""
    nbytes = ELEMENTS * 8
    rows = []
    for algorithm in ALGORITHMS:
        messages = recorded(group, algorithm)
        rows.append(
            [
                algorithm,
                *(
                    f"{_busiest(make(group.size), messages) / nbytes:.2f} n"
                    for make in wiring.WIRINGS
                ),
            ]
            if messages
            else [algorithm]
        )
    names = [make(max(2, group.size)).name for make in wiring.WIRINGS]
    page.table(
        f"all_reduce on {group.size} ranks: bytes over the busiest link, one direction",
        ["", *names],
        rows,
        note="each recorded message goes its shortest way, in equal parts where there are several",
    )


def both_ways(page: Page) -> None:
    """Show torus-both on tori of one, two and three dims: steps, and the busiest link's bytes with
    the formula."""
    if page.writes:
        page.table(
            "all_reduce on tori: bytes over the busiest link, one direction",
            ["ranks", "box", "steps", "ring", "torus", "torus-both", "(P-1)/(P D) n", ""],
            on_tori(),
            note="D dims of equal sides: 2 D links of a device carry equal parts of 2(P-1)/P n "
            "in 2(S - D) steps, S the sum of the sides",
        )


def on_tori() -> list[list[Any]]:
    """Return the rows of the table of tori; the messages are those that a simulated rank of each
    algorithm sends."""
    rows = []
    for size in BOXES:
        sides = box(size)
        nbytes = ELEMENTS * 8 * size
        carried = []
        for algorithm in ("ring", "torus", "torus-both"):
            program = record("all_reduce", algorithm, Operands(nbytes, (), 8), size)
            messages = list(
                zip(
                    program.src.tolist(), program.dst.tolist(), program.nbytes.tolist(), strict=True
                )
            )
            carried.append(_busiest(wiring.box(sides), messages) / nbytes)
        steps = 2 * (sum(sides) - len(sides))
        formula = (size - 1) / size / len(sides)
        rows.append(
            [
                size,
                " × ".join(map(str, sides)),
                steps,
                *(f"{part:.3f} n" for part in carried),
                f"{formula:.3f} n",
                verdict(carried[-1], formula, 1e-9),
            ]
        )
    return rows


def _busiest(wires: Any, messages: list[Message]) -> float:
    return max(wiring.load(wires, messages).values(), default=0.0)


# -------------------------------------------------- 3  flat ring against hierarchical, two machines


def halves(size: int) -> list[int]:
    """Place the first half of the ranks on machine 0 and the others on machine 1."""
    return [int(rank >= (size + 1) // 2) for rank in range(size)]


def two_machines(group: Group, page: Page) -> None:
    """Show bytes between machines and time, flat and hierarchical, for ranks placed in halves and
    in turn."""
    rows = []
    for name, nodes in (
        ("in halves", halves(group.size)),
        ("in turn", [rank % 2 for rank in range(group.size)]),
    ):
        for algorithm in ("ring", "hierarchical"):
            with links.machines(group, nodes, alpha=0.0, beta=0.0) as cluster:
                across = [
                    nbytes
                    for src, dst, nbytes in recorded(cluster, algorithm)
                    if nodes[src] != nodes[dst]
                ]
            times = [seconds(group, nodes, algorithm, nbytes) for nbytes in (1024, 65536, 524288)]
            rows.append(
                [
                    f"{algorithm}, ranks {name}",
                    len(across),
                    f"{sum(across) / ELEMENTS / 8:.2f} n",
                    *(f"{1e3 * value:.0f} ms" for value in times),
                ]
            )
    size = group.size
    alpha = NETWORK["alpha"]
    beta = NETWORK["beta"]
    for name, steps, parts in (
        ("2(P-1)(α + n/P β)", 2 * (size - 1), size),
        ("2(M-1)(α + n/M β), M = 2", 2, 2),
    ):
        rows.append(
            [
                f"formula {name}",
                "",
                "",
                *(
                    f"{1e3 * steps * (alpha + nbytes / parts * beta):.0f} ms"
                    for nbytes in (1024, 65536, 524288)
                ),
            ]
        )
    page.table(
        f"all_reduce on {size} ranks, two machines; between them α = 3 ms, β = 3 ms / 64 KiB",
        ["", "messages across", "bytes across", "1 KiB", "64 KiB", "512 KiB"],
        rows,
        note="the formulas count the link between the machines only; all else, one header to "
        "compare calls (α) among it, comes on top",
    )


def seconds(group: Group, nodes: list[int], algorithm: str, nbytes: int) -> float:
    """Return the slowest rank's time for one all_reduce of `nbytes` on two machines."""
    with links.machines(group, nodes, **NETWORK) as cluster:
        group.barrier()
        begin = time.perf_counter()
        cluster.all_reduce(np.ones(nbytes // 8), algorithm=algorithm)
        took = time.perf_counter() - begin
    with group.ledger.control():
        return float(group.all_reduce(took, op="max"))


# ------------------------------------------------------------------------------- 4  α and β, fitted


def exchange_times(group: Group, repeats: int = 15) -> dict[int, float]:
    """Return the seconds of one exchange with both neighbours on the ring, by bytes: the median of
    the slowest rank's times."""
    times = {}
    for nbytes in SIZES:
        x = np.ones(nbytes // 8)
        into = np.empty(nbytes // 8)
        took = []
        for _ in range(repeats + 2):
            group.barrier()
            begin = time.perf_counter()
            for _ in range(4):
                group.exchange(
                    x,
                    dst=(group.rank + 1) % group.size,
                    src=(group.rank - 1) % group.size,
                    out=into,
                )
            took.append((time.perf_counter() - begin) / 4)
        with group.ledger.control():
            times[nbytes] = float(np.median(group.all_reduce(np.array(took[2:]), op="max")))
    return times


def fitted(group: Group, times: dict[int, float]) -> LinkCost:
    """Fit α and β with the least relative error, as `minidist bench calibrate` does."""
    return fit(
        group.transport.name,
        group.size,
        [Sample(LinkWork(1, 1, nbytes, 0), took) for nbytes, took in times.items()],
    )


def alpha_and_beta(group: Group, page: Page) -> None:
    """Measure exchanges between ranks 0 and 1 while the others sleep; fit a line, and see how
    straight it is."""
    if group.size == 1:
        page.say("One rank sends nothing: run on two or more.")
        return
    pair = group.split(0 if group.rank < 2 else None)
    times = exchange_times(pair) if pair is not None else {}
    group.barrier()
    if pair is None:
        return
    cost = fitted(pair, times)
    bandwidth = "too fast to tell" if cost.beta == 0 else f"{1e-9 / cost.beta:.2f} GB/s"
    page.table(
        f"Ranks 0 and 1 over {group.transport.name}: α = {1e6 * cost.alpha:.0f} µs, 1/β = "
        f"{bandwidth}",
        ["bytes", "an exchange", "α + n β", "more than half of it is"],
        [
            [
                size_text(nbytes),
                f"{1e6 * took:.0f} µs",
                f"{1e6 * (cost.alpha + nbytes * cost.beta):.0f} µs",
                "latency" if cost.alpha > nbytes * cost.beta else "bytes",
            ]
            for nbytes, took in times.items()
        ],
        note=f"worst misfit {100 * cost.misfit:.0f} %: real links are no straight lines. "
        "minidist bench calibrate does this with care, for every transport, and keeps it "
        "for `auto`",
    )


# ------------------------------------------------------------------------------------- 5  one-sided


def one_sided(group: Group, page: Page) -> None:
    """Show RDMA (N2:514) as MPI offers it: rank 0 puts into rank 1's window, and rank 1 does
    nothing meanwhile."""
    if group.transport.name != "mpi" or group.size < 2:
        page.say(
            "A put needs a window into another rank's memory. MPI has one: run this lesson "
            "under mpirun to see it. Here, over " + group.transport.name + ", nothing is measured."
        )
        return
    from mpi4py import MPI

    rows = []
    for nbytes in (1024, 262144):
        x = np.full(nbytes // 8, 7.0)
        inbox = np.zeros_like(x)
        window = MPI.Win.Create(inbox, comm=MPI.COMM_WORLD)
        put = median_seconds(
            group, lambda x=x, window=window: _put(window, x) if group.rank == 0 else None, 7
        )
        window.Free()
        message = median_seconds(
            group,
            lambda x=x, inbox=inbox: (
                group.send(x, dst=1)
                if group.rank == 0
                else group.recv(src=0, out=inbox)
                if group.rank == 1
                else None
            ),
            7,
        )
        rows.append([size_text(nbytes), f"{1e6 * put:.0f} µs", f"{1e6 * message:.0f} µs"])
        if group.rank == 1 and not (inbox == 7).all():
            raise ArithmeticError(f"rank 1: the window holds {inbox[:3]} where 7 was put")
    page.table(
        "From rank 0 to rank 1, rank 0's time",
        ["bytes", "MPI put", "our send and recv"],
        rows,
        note="no network card here does the work by itself: a put over shared memory is a copy "
        "by the sender",
    )


def _put(window: Any, x: np.ndarray) -> None:
    window.Lock(1)
    window.Put(x, 1)
    window.Unlock(1)


# ----------------------------------------------------------------------------------------- Break it

BREAKS = load_module(HERE / "broken.py", "04").BREAKS


if __name__ == "__main__":
    run_lesson(arguments(__doc__, BREAKS).parse_args(), tour, BREAKS, alone=8)
