"""The tables of collectives, overlap and calibration."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from minidist.bench import collectives, overlap
from minidist.bench.floors import COPIES, SHM, TCP
from minidist.console import size_text
from minidist.observe.why_report import causes_line, headline, why_table

FLOORS = {
    COPIES: "nothing is communicated; what each rank must copy and add in any algorithm, all at "
    "once",
    TCP: "nothing is reduced or checked; what each rank must send and receive in any algorithm, "
    "by bare sockets",
    SHM: "no call and no header; what each rank must show, copy and add, by bare shared memory",
}
INSTALL_GLOO = 'pip install "minidist[bench]"'


def show_collective(result: dict[str, Any], console: Console) -> None:
    """Print one table per rank count: time and bus bandwidth of each contender, and our speed as a
    multiple of the peer's."""
    verb = collectives.VERBS[result["what"]]
    for ranks, times in result["seconds"].items():
        ratios = [name for name in times if _peer_of(verb, name) in times]
        table = new_table(
            f"{verb.title}, {verb.about}, {ranks} ranks (time µs · bus bandwidth GB/s)",
            "message",
            *times,
            *(f"{_peer_of(verb, name).partition('_')[0]} / {name}" for name in ratios),
            left=0,
        )
        for size in result["sizes"]:
            row = [
                f"{seconds[size] * 1e6:,.0f} · "
                f"{verb.bus_bandwidth(size, seconds[size], ranks) / 1e9:5.2f}"
                for seconds in times.values()
            ]
            row += [
                f"{times[_peer_of(verb, name)][size] / times[name][size]:.2f}×" for name in ratios
            ]
            table.add_row(size_text(size), *row)
        console.print(table)
    notes(
        console,
        [f"{name}: {does}" for name, does in FLOORS.items() if name in result["contenders"]],
    )
    notes(console, result["left_out"])


def _peer_of(verb: collectives.Verb, contender: str) -> str:
    """Return the peer that a contender is compared with; "" for a peer."""
    peers = {
        "tcp": collectives.GLOO,
        "shm": verb.mpi,
        "mpi": verb.mpi,
        COPIES: verb.mpi,
        SHM: verb.mpi,
        TCP: collectives.GLOO,
    }
    return peers.get(collectives.base(contender), "")


def show_overlap(result: dict[str, Any], console: Console) -> None:
    """Print a row per contender: communication, computation, both at once, and both / the
    longer."""
    table = new_table(
        f"all-reduce of {size_text(result['nbytes'])} beside matrix products, {result['ranks']} "
        "ranks (ms)",
        "",
        "all-reduce",
        "products",
        "both",
        "of the longer",
        "hidden",
    )
    for row in result["rows"]:
        table.add_row(
            row["name"],
            *(f"{row[kind] * 1e3:.2f}" for kind in ("communicate", "compute", "both")),
            f"{row['of_longer']:.2f}×",
            f"{row['hidden']:.0%}",
        )
    console.print(table)
    names = [row["name"] for row in result["rows"]]
    if overlap.DELAYED in names:
        console.print(
            f"delayed: tcp, each message held back {result['alpha'] * 1e6:.0f} µs and 1 s for "
            f"{result['bandwidth'] / 1e6:,.0f} MB; the others are this machine as it is",
            style="dim",
        )
    if overlap.GLOO not in names:
        console.print(f"gloo was left out: {INSTALL_GLOO}", style="dim", markup=False)


def show_overlap_step(result: dict[str, Any], console: Console) -> None:
    """Print a row per contender: a step, its communication, and the hidden share."""
    table = new_table(
        f"communication under computation in a training step, {result['ranks']} ranks (ms a step "
        "and rank): " + sizes(result),
        "",
        "step",
        "communication",
        "of it hidden",
        "",
        "waited",
    )
    for row in result["rows"]:
        step, communication, hidden, waited = (
            f"{row[name] * 1e3:.1f}"
            for name in ("step_seconds", "communication", "hidden", "waited")
        )
        table.add_row(row["name"], step, communication, hidden, f"{row['share']:.0%}", waited)
    console.print(table)
    if any(row["link"] == "delayed" for row in result["rows"]):
        console.print(
            f"delayed: tcp, each message held back {result['alpha'] * 1e6:.0f} µs and 1 s for "
            f"{result['bandwidth'] / 1e6:,.0f} MB; tcp: this machine as it is",
            style="dim",
        )
    for row in result["rows"]:
        if row.get("why") is not None:
            console.print(f"\n{row['name']}: {headline(row['why'])}", markup=False, soft_wrap=True)
            console.print(why_table(row["why"]))
            console.print(causes_line(row["why"]), markup=False, soft_wrap=True)
    if any(row.get("what_if") for row in result["rows"]):
        _show_what_if(result, console)


def _show_what_if(result: dict[str, Any], console: Console) -> None:
    """Print a row per contender and change: predicted from the recorded step, then measured."""
    table = new_table(
        "what if (ms a step)", "", "", "recorded", "predicted", "measured", "of measured", left=2
    )
    for row in result["rows"]:
        for each in row["what_if"]:
            predicted = each["predicted"]
            measured = each["measured"]
            ran = (
                ("-", "-")
                if measured is None
                else (f"{1e3 * measured:.1f}", f"{predicted / measured:.2f}")
            )
            table.add_row(
                row["name"],
                each["change"],
                f"{1e3 * row['why']['seconds']:.1f}",
                f"{1e3 * predicted:.1f}",
                *ran,
            )
    console.print(table)


def show_save(result: dict[str, Any], console: Console) -> None:
    """Print a row per contender and way: its rate, and how long training waits; then the steps."""
    table = new_table(
        f"checkpoints of {size_text(result['nbytes'])}, {result['ranks']} ranks: {sizes(result)}",
        "",
        "",
        "MiB/s",
        "ms",
        "training stands still, ms",
        "in copies of the state",
        left=2,
    )
    for row in result["rows"]:
        behind = row["way"] == "background"
        table.add_row(
            row["name"],
            row["way"],
            f"{row['mib_per_second']:,.0f}",
            f"{row['seconds'] * 1e3:,.1f}",
            f"{row['stands'] * 1e3:,.1f}",
            f"{row['stands_in_copies']:.2f}" if behind else "",
        )
    console.print(table)
    memory = result["memory"]
    notes(
        console,
        [
            f"{result['every']} steps with a save keep {result['throughput']:.1%} of the rate "
            "without",
            f"resident memory of a rank: {size_text(memory['first_bytes'])} after a tenth of "
            f"{memory['saves']} saves, {size_text(memory['last_bytes'])} after all; that of the "
            "rank where it grows most",
            *result["left_out"],
        ],
    )


def show_calibration(result: dict[str, Any], console: Console) -> None:
    """Print a row per link class and rank count, the costs of computation, and the profile's
    path."""
    if result["links"]:
        _show_links(result["links"], console)
    if result["computation"]:
        _show_computation(result["computation"], console)
    notes(console, [f"profile: {result['out']}"])
    if misses := result["misses"]:
        console.print(
            f"the profile misses a measured time: {', '.join(misses)}. What is predicted from it "
            "may be as far off; `auto` keeps its defaults where the gain is smaller. Measure "
            "again while nothing else runs",
            style="yellow",
            markup=False,
            soft_wrap=True,
        )


def _show_links(links: Iterable[dict[str, Any]], console: Console) -> None:
    """Print a row per link class and rank count."""
    table = new_table(
        "what messages cost: α + n·β",
        "link",
        "ranks",
        "α µs",
        "o µs",
        "1/β GB/s",
        "γ ns/KiB",
        "κ ns/KiB",
        "call µs",
        "pair µs",
        "worst misfit",
    )
    for link in links:
        bandwidth = f"{1e-9 / link['beta']:.2f}" if link["beta"] else "-"
        latencies = [f"{link[name] * 1e6:.1f}" for name in ("alpha", "overhead")]
        extras = [f"{link[name] * 1024e9:.0f}" for name in ("gamma", "crowd")]
        extras += [f"{link[name] * 1e6:.0f}" if link[name] else "-" for name in ("call", "pair")]
        table.add_row(
            link["link"],
            str(link["ranks"]),
            *latencies,
            bandwidth,
            *extras,
            f"{link['misfit']:.0%}",
        )
    console.print(table)
    notes(
        console,
        [
            "o: a message that does not wait; γ: more for adding; κ: for sending to all at once",
            "call, pair: of all ranks, of two, in a training step, beside its messages (-: "
            "nothing)",
            "fitted by weighted least squares on the relative error, none below 0",
        ],
    )


def _show_computation(costs: Iterable[dict[str, Any]], console: Console) -> None:
    """Print a row per number of ranks that computed at once."""
    table = new_table(
        "what computation costs a rank",
        "ranks at once",
        "float32 GFLOP/s",
        "float64 GFLOP/s",
        "half",
        "launch µs",
        "loop ns",
        "matrix µs",
        "python µs",
        "GB/s",
        "in cache",
        "cache KiB",
        "worst misfit",
        left=0,
    )
    for cost in costs:
        table.add_row(
            str(cost["ranks"]),
            *(f"{cost['peaks'][dtype] / 1e9:.1f}" for dtype in ("float32", "float64")),
            f"{cost['half']:.0f}",
            f"{cost['launch'] * 1e6:.2f}",
            f"{cost['loop'] * 1e9:.1f}",
            f"{cost['matrix'] * 1e6:.2f}",
            f"{cost['python'] * 1e6:.1f}",
            f"{cost['bandwidth'] / 1e9:.2f}",
            f"x {cost['cache_factor']:.1f}",
            f"{cost['cache_bytes'] / 1024:.0f}",
            f"{cost['misfit']:.0%}",
        )
    console.print(table)
    notes(
        console,
        [
            "half: a matrix product whose sides are three times as long reaches half of the rate",
            "loop: each start of NumPy's innermost loop, in a view with gaps; matrix: each one "
            "of a stack",
            "python: of a training step, for one result of an op",
        ],
    )


def new_table(title: str, *columns: str, left: int = 1) -> Table:
    """Return an empty table in the style of all benches: the first `left` columns are left-aligned,
    the others right-aligned."""
    table = Table(title=title, title_justify="left", header_style="bold cyan")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right")
    return table


def notes(console: Console, lines: Iterable[str]) -> None:
    """Print lines below a table."""
    for line in lines:
        console.print(line, style="dim", markup=False, soft_wrap=True)


def sizes(result: dict[str, Any]) -> str:
    """Return the model of a result as text: "layers 4, width 256, …"."""
    return ", ".join(f"{name} {value}" for name, value in result["model"].items())
