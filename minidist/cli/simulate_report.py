"""The report of `minidist simulate` on the screen."""

from rich.console import Console
from rich.table import Column, Table

from minidist.console import exactly, plural, size_text
from minidist.device.account import CATEGORIES
from minidist.parallel.hybrid.plan_checks import words
from minidist.simulate.results import Simulation
from minidist.simulate.sure import Sureness

SMALLEST = 5e-4  # shares of the step below this are not told
DAY = 86400.0
KWH = 3.6e6
CONTROL = "control"  # the axis of the small numbers of a step: losses, norms, digests of batches
WIDENED = (
    "fp8: training widens the bytes before each product, so that a step takes longer than with "
    "bf16; what it saves is memory"
)
MULTIPLIED = (
    "what if: products of fp8 multiply the bytes. No training here does; without --multiply-bytes "
    "the step is that of training"
)


def print_simulation(
    console: Console,
    found: Simulation,
    tokens: float | None = None,
    *,
    multiplies_bytes: bool = False,
) -> None:
    """Print time and its parts, what moves along each axis, the fullest rank's memory, energy and
    price."""
    _print_summary(console, found, multiplies_bytes=multiplies_bytes)
    _rule(console, "where the time of a step goes, mean of all ranks")
    console.print(_time_table(found))
    if found.cluster.device.units:  # a GPU: a host issues its kernels (Rates.issue)
        _say(console, "computes: with the time in which the device waits for its host")
    if found.axes:
        _rule(console, "what moves in a step along each axis")
        console.print(_axes_table(found))
    _rule(console, "the critical path: what would have to be faster")
    _say(
        console,
        "; ".join(
            f"{name} {seconds / found.step_seconds:.1%}"
            for name, seconds in found.path_parts.items()
            if seconds > SMALLEST * found.step_seconds
        ),
    )
    _rule(console, f"memory at its peak, of the fullest rank, {found.fullest}")
    console.print(_memory_table(found))
    _print_price(console, found, tokens)


def _remedies(found: Simulation) -> str:
    """Return what would need less memory, of that which the plan does not do yet."""
    plan = found.plan
    category = max(CATEGORIES, key=lambda name: found.peak(found.fullest).get(name, 0))
    if category in ("activations", "workspace"):
        options = ["--checkpoint-blocks"] * (plan.checkpoint_blocks == "none")
        options += ["more --microbatches" if plan.pp > 1 else "a larger --accumulate"]
    else:
        options = [f"--zero {plan.zero + 1}"] * (plan.zero < 3)
    return f"most are its {category}: try {', '.join([*options, 'more ranks along tp or pp'])}"


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False)


def _rule(console: Console, title: str) -> None:
    console.rule(title, style="dim", align="left")


def _print_summary(console: Console, found: Simulation, *, multiplies_bytes: bool) -> None:
    plan = found.plan
    size = len(found.role_of)
    told = [words(plan.axes), plan.precision] + [f"ZeRO-{plan.zero}"] * (plan.zero > 0)
    told += [f"{plan.schedule} of {plan.pieces} microbatch{'es' * (plan.pieces > 1)}"] * (
        plan.pp > 1
    )
    _say(console, f"\n{found.cluster.spec}, {plural(size, 'rank')}: {', '.join(told)}")
    _say(
        console,
        f"{found.step_seconds:,.4g} s a step, {found.tokens_per_second:,.0f} tokens/s, MFU "
        f"{found.mfu:.1%}, HFU {found.hfu:.1%} (what really runs)",
    )
    _say(console, known_to(found.sure, found.step_seconds))
    if plan.precision == "fp8":
        _say(console, MULTIPLIED if multiplies_bytes else WIDENED)
    clocks = len(found.replayed.ranks)
    _say(console, f"{plural(len(found.traces), 'role')} run, {plural(clocks, 'clock')} replayed\n")


def known_to(sure: Sureness, seconds: float) -> str:
    """Return how sure the figures are, as a sentence."""
    low, high = sure.interval(seconds)
    return (
        f"known to: {low:,.3g} to {high:,.3g} s a step, and all that follows from seconds within a "
        f"factor of {sure.spread:.2f}; bytes within {sure.memory:.2f} (nine of ten measured steps "
        "that the constants were not fitted to)"
    )


def _time_table(found: Simulation) -> Table:
    """Return a table with a row for each part; the shares add up to 1."""
    table = Table(
        "",
        "of",
        *(Column(name, justify="right") for name in ("seconds", "share")),
        header_style="bold",
    )
    titles = {"busy": "computes", "exposed": "waits for bytes", "idle": "waits for others"}
    for kind, parts in found.parts.items():
        shown = {
            name: seconds
            for name, seconds in sorted(parts.items(), key=lambda part: -part[1])
            if seconds > SMALLEST * found.step_seconds
        }
        for place, (name, seconds) in enumerate(shown.items()):
            table.add_row(
                titles[kind] if place == 0 else "",
                name or "other",
                f"{seconds:.4g}",
                f"{seconds / found.step_seconds:.1%}",
                end_section=place == len(shown) - 1,
            )
    return table


def _axes_table(found: Simulation) -> Table:
    """Return the table of axes; bytes and messages of all ranks as the real job's algorithm sends
    them, seconds of a rank as the priced (on GPUs: native) calls take.

    `control` has no seconds: the replay counts them under the groups that make the calls.
    """
    columns = ("bytes, all ranks", "messages", "seconds", "rank waits")
    table = Table("axis", *(Column(name, justify="right") for name in columns), header_style="bold")
    for axis, use in found.axes.items():
        if not use.nbytes and use.exposed < SMALLEST * found.step_seconds:
            continue  # groups of scalars: their bytes stand under `control`
        seconds = ["-", "-"] if axis == CONTROL else [f"{use.seconds:.4g}", f"{use.exposed:.4g}"]
        table.add_row(axis, size_text(use.nbytes), f"{use.messages:,}", *seconds)
    return table


def _memory_table(found: Simulation) -> Table:
    """Return the table of memory by category, compared with the device's."""
    peak = found.peak(found.fullest)
    limit = found.memory_limit
    table = Table(
        "what",
        *(Column(name, justify="right") for name in ("bytes", "", "of the device")),
        header_style="bold",
    )
    for category in (*CATEGORIES, "total"):
        if nbytes := peak.get(category, 0):
            table.add_row(category, f"{nbytes:,}", size_text(nbytes), f"{nbytes / limit:.1%}")
    table.add_row(
        "the device", f"{limit:,}", size_text(limit), "fits" if found.fits else "DOES NOT FIT"
    )
    return table


def _print_price(console: Console, found: Simulation, tokens: float | None) -> None:
    """Print energy and price of a step, and of `tokens`."""

    def told(joules: float | None, dollars: float | None) -> str:
        return ", ".join(
            [
                "energy not known" if joules is None else f"{joules / KWH:,.4g} kWh",
                "price not known"
                if dollars is None
                else f"${dollars:,.2f}"
                if dollars >= 1
                else f"${dollars:.3g}",
            ]
        )

    _say(console, f"a step: {told(found.joules, found.dollars)}")
    if tokens is not None:
        whole = found.for_tokens(tokens)
        _say(
            console,
            f"{tokens:.4g} tokens: {exactly(round(whole.steps))} steps, "
            f"{whole.seconds / DAY:,.1f} days, {told(whole.joules, whole.dollars)}",
        )
    if not found.fits:
        needed = found.peak(found.fullest)["total"] / found.memory_limit
        _say(
            console,
            f"it does not fit: rank {found.fullest} needs {needed:.2f} times the memory of its "
            f"device; {_remedies(found)}",
        )
