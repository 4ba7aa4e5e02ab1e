"""Lesson 02: collectives: what each verb does, and what each algorithm sends and waits for.

mpirun -n 4 python lessons/02_collectives/lesson.py
python lessons/02_collectives/lesson.py                         # no launcher: eight threads
python lessons/02_collectives/lesson.py --break root-ignored    # see README.md, section 6
"""

import time
from pathlib import Path
from typing import Any

import numpy as np

from minidist.comm.collectives.select import ALGORITHMS
from minidist.comm.cost.volume import FORMULAS, Case, chunk_bytes
from minidist.comm.group import Group
from minidist.comm.records import gather_records
from minidist.comm.transports.throttled import delayed
from minidist.grading import load_module, sent_since, totals
from minidist.lessons.page import Page, verdict
from minidist.lessons.running import arguments, run_lesson
from minidist.observe.events import GroupCall
from minidist.simulate.cluster import Cluster
from minidist.simulate.device import Device
from minidist.simulate.message_times import message_times
from minidist.simulate.messages import Operands
from minidist.simulate.topology import Topology, Wire
from minidist.simulate.walk import call_cost

ELEMENTS = 1003  # float64 numbers of each rank's array: no P from 2 to 8 divides it
PART = 60  # elements that each rank has for each other in an all-to-all
ALPHA = 5e-3  # seconds of a message where waits are counted
FLIGHT = 10e-3  # seconds that the whole array is under way where bytes are counted: n·β
SMALL_LINK = {"alpha": 2e-3, "beta": 2e-3 / 65536}  # a message 2 ms, 64 KiB 2 ms more
ANSWERS = (
    "broadcast",
    "reduce",
    "all_reduce",
    "gather",
    "all_gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
)
ABOUT = {
    "broadcast": "one to all",
    "reduce": "summed on one",
    "all_reduce": "summed on all",
    "gather": "collected on one",
    "all_gather": "collected on all",
    "scatter": "dealt out",
    "reduce_scatter": "summed, dealt out",
    "all_to_all": "each to each",
}


def tour(group: Group, page: Page) -> None:
    """Run the lesson on every rank."""
    page.heading("1  What the verbs do")
    what_they_do(group, page)
    page.heading("3.1  What every algorithm sends")
    what_they_send(group, page)
    page.heading("3.2  What an all-reduce waits for")
    what_they_wait_for(group, page)
    page.heading("3.3  Which is best when")
    best_when(group, page)


# ----------------------------------------------------------------------------- 1  what the verbs do


def what_they_do(group: Group, page: Page) -> None:
    """Show each verb's input and result on up to four ranks, as the ranks have them."""
    few = group.split(0 if group.rank < 4 else 1)
    if group.rank >= 4:
        return
    rows = []
    for verb in ANSWERS:
        brings, has = before_and_after(few, verb)
        told = gather_records(few, [_digits(brings), _digits(has)]) or []
        rows += [
            [verb, "brings", *(rank[0] for rank in told)],
            [ABOUT[verb], "has", *(rank[1] for rank in told)],
        ]
    page.table(
        f"Before and after, on {few.size} ranks",
        ["", "", *(f"rank {rank}" for rank in range(few.size))],
        rows,
        note="rank r's elements begin with r+1; / stands between arrays of a list; rank 0 is "
        "the root",
    )


def before_and_after(group: Group, verb: str) -> tuple[Any, Any]:
    """Return this rank's input to one call of `verb`, and its result."""
    row = 10 * (group.rank + 1) + np.arange(group.size)
    x: np.ndarray | list[np.ndarray] | None
    if verb in ("broadcast", "scatter"):
        x = row if group.rank == 0 else None
    elif verb in ("gather", "all_gather"):
        x = row[:1]
    else:
        x = list(row[:, None]) if verb == "all_to_all" else row
    return x, getattr(group, verb)(x)


def _digits(value: Any) -> str:
    """Return an array or a list of arrays as a short text."""
    if value is None:
        return "-"
    if isinstance(value, list):
        return "/".join(_digits(part) for part in value)
    return " ".join(map(str, value.tolist()))


# -------------------------------------------------------------------- 2  what every algorithm sends


def algorithms_here(group: Group, verb: str) -> list[str]:
    """Return the algorithms of a verb that this group's transport can run."""
    return [
        name
        for name in ALGORITHMS[verb]
        if (name != "native" or group.transport.name == "mpi")
        and (name != "shared" or group.board is not None)
    ]


def call(group: Group, verb: str, algorithm: str, elements: int = ELEMENTS) -> Case:
    """Call a verb once on arrays of `elements` float64; return what its formula needs."""
    x = np.full(elements, group.rank + 1.0)
    size = group.size
    chunks = chunk_bytes(elements, x.itemsize, size)
    if verb == "barrier":
        group.barrier(algorithm=algorithm)
        return Case(size)
    if verb == "all_to_all":
        group.all_to_all(
            [np.full(PART, 10.0 * group.rank + dst) for dst in range(size)], algorithm=algorithm
        )
        return Case(size, parts=[[PART * x.itemsize] * size] * size)
    getattr(group, verb)(x, algorithm=algorithm)
    blocks = [x.nbytes] * size if verb in ("gather", "all_gather") else chunks
    return Case(size, nbytes=x.nbytes, blocks=blocks, nodes=group.nodes)


def sent(group: Group, verb: str, algorithm: str) -> tuple[Case, int, int, int]:
    """Return a call's case, the messages and bytes of all ranks together, and the bytes of the rank
    that sends most."""
    before = totals(group.ledger)
    case = call(group, verb, algorithm)
    mine = np.array(sent_since(group.ledger, before))
    with group.ledger.control():
        messages, nbytes = (int(value) for value in group.all_reduce(mine))
        most = int(group.all_reduce(mine, op="max")[1])
    return case, messages, nbytes, most


def what_they_send(group: Group, page: Page) -> None:
    """Compare the summed ledgers of all ranks with the formulas of comm/cost/volume.py, for every
    verb and algorithm."""
    rows = []
    for verb in ALGORITHMS:
        for algorithm in algorithms_here(group, verb):
            case, messages, nbytes, _ = sent(group, verb, algorithm)
            formula = FORMULAS[verb, algorithm]
            right = [
                verdict(messages, formula.messages_of(case)),
                verdict(nbytes, formula.bytes_of(case)),
            ]
            rows.append(
                [
                    f"{verb} {algorithm}",
                    messages,
                    formula.messages,
                    f"{nbytes:,}",
                    formula.nbytes,
                    next((word for word in right if word != "ok"), "ok"),
                ]
            )
    page.table(
        f"All ranks' ledgers, P = {group.size}, n = {ELEMENTS * 8:,} bytes",
        ["", "messages", "formula", "bytes", "formula", ""],
        rows,
        note="formulas: minidist/comm/cost/volume.py, where the letters are explained",
    )


# --------------------------------------------------------------------- 3  what all-reduce waits for


def what_they_wait_for(group: Group, page: Page) -> None:
    """Show the seconds of each algorithm over two kinds of links.

    On the first only messages cost; the time is in α. On the second only bytes cost; it is in nβ.
    """
    n = ELEMENTS * 8
    rows = []
    for algorithm in _over_messages(group):
        _, _, total, most = sent(group, "all_reduce", algorithm)
        waits = seconds(group, algorithm, ELEMENTS, alpha=ALPHA, beta=0.0) / ALPHA
        flights = seconds(group, algorithm, ELEMENTS, alpha=0.0, beta=FLIGHT / n) / FLIGHT
        rows.append(
            [
                algorithm,
                f"{total / n:.2f} n",
                f"{most / n:.2f} n",
                FORMULAS["all_reduce", algorithm].steps,
                f"{waits:.1f} α",
                f"{flights:.1f} nβ",
            ]
        )
    page.table(
        f"all_reduce on {group.size} ranks",
        ["", "all send", "busiest sends", "messages that wait", "measured", "measured "],
        rows,
        note="measured: over links that hold each message back (transports/throttled.py), first "
        "α a message and nothing a byte, then nothing a message and nβ an array. Most "
        "algorithms begin by comparing calls with a neighbour: one α more. What comes to "
        "one rank from several is under way at once.",
    )


def _over_messages(group: Group) -> list[str]:
    return [
        name for name in algorithms_here(group, "all_reduce") if name not in ("native", "shared")
    ]


def seconds(
    group: Group, algorithm: str, elements: int, *, alpha: float, beta: float, repeats: int = 2
) -> float:
    """Return the slowest rank's time over delayed links, the least of `repeats` calls."""
    times = []
    with delayed(group, alpha=alpha, beta=beta) as slow:
        x = np.ones(elements)
        for _ in range(repeats):
            group.barrier()
            begin = time.perf_counter()
            slow.all_reduce(x, algorithm=algorithm)
            times.append(time.perf_counter() - begin)
    with group.ledger.control():
        return float(min(group.all_reduce(np.array(times), op="max")))


# ---------------------------------------------------------------------------- 4  which is best when


def best_when(group: Group, page: Page) -> None:
    """Time the same all-reduces at three lengths over one link: short arrays favour few messages,
    long ones few bytes."""
    lengths = {"512 B": 64, "32 KiB": 4096, "512 KiB": 65536}
    rows: dict[str, list[str]] = {name: [] for name in _over_messages(group)}
    for length in lengths.values():
        clock = {name: on_the_clock(group.size, name, 8 * length, **SMALL_LINK) for name in rows}
        for name, row in rows.items():
            took = seconds(group, name, length, **SMALL_LINK, repeats=1)
            star = " *" * (clock[name] <= 1.001 * min(clock.values()))
            row += [f"{1e3 * clock[name]:.1f}{star}", f"{1e3 * took:.0f}"]
    page.table(
        f"all_reduce on {group.size} ranks, α = 2 ms, β = 2 ms / 64 KiB: milliseconds",
        ["", *(title for length in lengths for title in (length, "took"))],
        [[name, *row] for name, row in rows.items()],
        note="first by a clock of its own, on which only α and β take time: the algorithm's own "
        "messages, walked by minidist/simulate/walk.py. took: wall time over delayed "
        "links, on this machine now. * the fastest by the clock: none is best at every "
        "length, nor is the optimum of N4:135",
    )


def on_the_clock(size: int, algorithm: str, nbytes: int, *, alpha: float, beta: float) -> float:
    """Return the seconds of an all-reduce if every rank has its own link out and in, and only links
    take time."""
    ranks = even_links(size, alpha, beta)
    return call_cost(
        GroupCall("world", "all_reduce", algorithm, nbytes, itemsize=8), range(size), ranks
    ).seconds


def even_links(size: int, alpha: float, beta: float) -> Cluster:
    """Return ranks that each have their own link out and in: α seconds per message, β per byte."""
    links = Topology(size, Wire("link", alpha, 1 / beta if beta else float("inf"), 0.0, 0.0, 0.0))
    return Cluster("links", "links", Device("rank", {"float64": 1.0}, 1, 1.0), 1, size, links)


# ----------------------------------------------------------------------------------- for the figure

PANELS = [
    ("all_reduce", name)
    for name in (
        "naive",
        "tree",
        "ring",
        "direct",
        "pairwise",
        "doubling",
        "halving-doubling",
        "torus",
    )
]
PANELS += [
    ("broadcast", "tree"),
    ("all_to_all", "pairwise"),
    ("all_to_all", "bruck"),
    ("barrier", "dissemination"),
]


def record_family(group: Group) -> list[dict[str, Any]]:
    """Record one call for every panel; return its messages on rank 0, with times in α by the clock
    of `on_the_clock`, and [] on other ranks.

    The recorded messages are the same as those on the clock. `part` is a message's share of n, the
    bytes of one rank's array; in an all-to-all n is the bytes of all of its parts.
    """
    panels = []
    for verb, algorithm in PANELS:
        events: list[Any] = []
        stop = group.ledger.subscribe(events.append)
        call(group, verb, algorithm)
        stop()
        ranks = gather_records(
            group,
            [
                [event.details[name] for name in ("src", "dst", "nbytes")]
                for event in events
                if event.kind == "message"
            ],
        )
        if ranks:
            # bytes that the verb is given for each array
            unit = (PART if verb == "all_to_all" else ELEMENTS) * 8
            whole = unit * (group.size if verb == "all_to_all" else 1)
            times = message_times(
                verb,
                algorithm,
                Operands(0 if verb == "barrier" else unit, itemsize=8),
                even_links(group.size, 1.0, 0.0),
                range(group.size),
            )
            clocked = sorted([message.src, message.dst, message.nbytes] for message in times)
            assert sorted(row for rows in ranks for row in rows) == clocked, f"{verb} {algorithm}"
            panels.append(
                {
                    "verb": verb,
                    "algorithm": algorithm,
                    "messages": [
                        {
                            "src": src,
                            "dst": dst,
                            "part": nbytes / whole,
                            "start": start,
                            "stop": end,
                        }
                        for src, dst, nbytes, start, end in times
                    ],
                }
            )
    return panels


# ----------------------------------------------------------------------------------------- Break it

BREAKS = load_module(Path(__file__).resolve().parent / "broken.py", "02").BREAKS


if __name__ == "__main__":
    run_lesson(arguments(__doc__, BREAKS).parse_args(), tour, BREAKS, alone=8)
