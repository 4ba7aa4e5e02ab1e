"""The bounds that the measurements of `minidist bench compress` must hold, and whether they do.

--full              over 100 Mbit/s a scheme whose last loss is at most 1 % above that of `none`
                    reaches the target at least 10 times sooner; local steps end at most 1.5 %
                    above; a cell that was run to its end took steps × median step, within 5 %
--advise --check    right in at least 95 % of the cells that count, break-evens within 15 %
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from minidist.bench.compress.links import bandwidth_text
from minidist.bench.compress.ways import LOCAL_STEPS, PLAIN

# times, over which link, at how much higher a loss
SOONER = 10.0
SLOW = 1.25e7
WORSE = 0.01
LOCAL_WORSE = 0.015
THROUGH = 0.05
RIGHT = 0.95
EDGE = 0.15


class AskedBound(NamedTuple):
    """A bound: what is asked, what was found, and whether it is held; held=None: not measured."""

    asked: str
    found: str
    held: bool | None

    @property
    def line(self) -> str:
        """The line for the notes below a table."""
        return (
            f"{ {True: 'held', False: 'NOT HELD', None: 'not measured'}[self.held] }: "
            f"{self.asked}: {self.found}"
        )


def bounds_of_times(result: dict[str, Any]) -> list[AskedBound]:
    """Return the bounds of times to a loss. Args: result: time_to_loss.measure's, with its
    bandwidths."""
    return [_sooner(result), *_local_losses(result["rows"]), *_run_through(result["through"])]


def _sooner(result: dict[str, Any]) -> AskedBound:
    asked = (
        f"a scheme at most {WORSE:.0%} worse is {SOONER:g} times sooner than none at "
        f"{bandwidth_text(SLOW)}"
    )
    if SLOW not in result["bandwidths"]:
        return AskedBound(asked, "no such link", None)
    index = result["bandwidths"].index(SLOW)
    seconds = {
        row["way"]: row["cells"][index]["seconds"]
        for row in result["rows"]
        if row["above_plain"] is not None and row["above_plain"] <= WORSE
    }
    others = {way: time for way, time in seconds.items() if way != PLAIN and time is not None}
    if seconds[PLAIN] is None or not others:
        return AskedBound(asked, "none reaches the target", False)
    way = min(others, key=others.__getitem__)
    times = seconds[PLAIN] / others[way]
    return AskedBound(asked, f"{way}, {times:.1f} times", times >= SOONER)


def _local_losses(rows: list[dict[str, Any]]) -> Iterator[AskedBound]:
    for row in rows:
        if row["way"].partition(":")[0] == LOCAL_STEPS:
            yield AskedBound(
                f"{row['way']} is at most {LOCAL_WORSE:.1%} worse",
                f"{row['above_plain']:+.2%}",
                row["above_plain"] <= LOCAL_WORSE,
            )


def _run_through(cells: list[dict[str, Any]]) -> Iterator[AskedBound]:
    for cell in cells:
        asked = (
            f"{cell['way']} at {bandwidth_text(cell['bandwidth'])} takes steps × median "
            f"step, to {THROUGH:.0%}"
        )
        if cell["measured"] is None:
            yield AskedBound(asked, "it does not reach the target", None)
        else:
            off = cell["measured"] / cell["predicted"] - 1
            yield AskedBound(asked, f"{off:+.1%}", abs(off) <= THROUGH)


def bounds_of_advice(advice: list[dict[str, Any]]) -> list[AskedBound]:
    """Return the bounds of checked advice. Args: advice: check.advise's, for each number of
    ranks."""
    right, counted = (sum(each["score"][place] for each in advice) for place in (0, 1))
    cells = sum(len(row["cells"]) for each in advice for row in each["rows"])
    found = [
        AskedBound(
            f"the advice is right in {RIGHT:.0%} of the cells that count",
            f"{right} of {counted}, of {cells}",
            right >= RIGHT * counted if counted else None,
        )
    ]
    for each in advice:
        for row in each["rows"]:
            if row["break_even"] and row["measured_break_even"]:
                off = row["break_even"] / row["measured_break_even"] - 1
                found.append(
                    AskedBound(
                        f"the break-even of {row['way']} on {each['ranks']} ranks is right to "
                        f"{EDGE:.0%}",
                        f"{off:+.0%}{_repeated(row)}",
                        abs(off) <= EDGE,
                    )
                )
    return found


def _repeated(row: dict[str, Any]) -> str:
    """Return a text on how well the measured break-even repeats: the difference between two halves
    of the rounds; "" if it was not measured by both."""
    if len(row["by_halves"]) < 2 or None in row["by_halves"]:
        return ""
    low, high = sorted(row["by_halves"])
    return f"; as measured by two halves of the rounds {high / low - 1:.0%} apart"
