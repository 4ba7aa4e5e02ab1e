"""The view of `minidist watch`: a RunNow as lines for a terminal of any width, with or without
colour, or as one line.

    rank  step  █ compute  ▒ exposed communication  ░ waiting
       0   121  ████████████████████████▒▒▒░░░░░░░░░░░░░   62%   8%  30%
       1   121  ██████████████████████████████████▒▒▒▒▒    88%  12%   0%  slow

Each part has a different character, so the bars can be read without colour, too. A terminal that
shows only ASCII gets # = and a dot.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rich.text import Text

from minidist.console import size_text
from minidist.observe.diagnose.fault import span
from minidist.observe.live.run_now import (
    DIED,
    ENDED,
    FINISHED,
    OVER,
    RUNNING,
    STALLED,
    STOPPED_RUN,
    RankNow,
    RunNow,
)

STYLES = {
    RUNNING: "green",
    FINISHED: "green",
    ENDED: "yellow",
    STALLED: "yellow",
    STOPPED_RUN: "yellow",
    DIED: "bold red",
}
PARTS = {"compute": "cyan", "exposed": "yellow", "waiting": "bright_black"}
WIDE = 60  # terminal width from which the table has all its columns
ROWS = 16  # most ranks that are shown if the terminal's height is not known


@dataclass(frozen=True)
class Signs:
    """The characters of the view: for the three parts, for a falling or rising line, and for an
    unfilled bar."""

    fills: str
    line: str
    empty: str


FULL = Signs("█▒░", "▁▂▃▄▅▆▇█", "·")
ASCII = Signs("#=.", "_.-=^", " ")


def signs_for(encoding: str) -> Signs:
    """Return the best characters that can be written in this encoding."""
    try:
        (FULL.fills + FULL.line + FULL.empty).encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return FULL


def lines_of(
    now: RunNow, *, width: int, height: int | None = None, signs: Signs = FULL
) -> list[Text]:
    """Return the view.

    Args:    width: maximum number of columns of a line; height: number of lines; ranks get the
             lines that remain.
    """
    head = [*_head(now, width, signs), *_faults(now, width)]
    foot = [*_axes(now, width), *_memory(now, width, signs), *_power(now, width)]
    room = ROWS if height is None else max(4, height - len(head) - len(foot) - 3)
    lines = [*head, *_ranks(now, width, room, signs), *foot]
    for line in lines:
        line.truncate(width, overflow="ellipsis" if signs is FULL else "crop")
    return lines


def one_line(now: RunNow) -> str:
    """Return the run in one line, for a log."""
    parts = [f"{now.state}: {now.what}"]
    if now.losses:
        parts.append(f"loss {_loss(now.losses[-1])}")
    if now.tokens_per_second:
        parts.append(f"{now.tokens_per_second:,.0f} tokens/s")
    known = [rank for rank in now.ranks if rank.parts is not None]
    if known:
        shares = [_mean([_shares(rank)[place] for rank in known]) for place in range(3)]
        parts.append("compute {:.0%}, exposed {:.0%}, waiting {:.0%}".format(*shares))
    if now.watts is not None and now.state == RUNNING:
        parts.append(power_text(now))
    if now.slow is not None:
        parts.append(f"{now.slow.cause}: {now.slow.who} since step {now.slow.since}")
    parts += now.wrong
    return "  ".join(parts)


def power_text(now: RunNow) -> str:
    """Return the power in words, such as "39 W, an estimate"."""
    assert now.watts is not None
    watts = f"{now.watts:.0f}" if now.watts >= 100 else f"{now.watts:.3g}"
    return f"{watts} W" + (", an estimate" if now.estimate else "")


# -------------------------------------------------------------------------------- parts of the view


def _head(now: RunNow, width: int, signs: Signs) -> Iterator[Text]:
    """Yield the run, its state, the loss, and its speed."""
    first = Text.assemble((now.run, "bold"), "  ", (now.state, STYLES.get(now.state, "")))
    if len(first) + 2 + len(now.what) <= width:
        yield first.append(f"  {now.what}")
    else:
        yield first
        yield from (Text(line) for line in _folded(now.what, width))
    if not now.losses:
        return
    figures = [f"loss {_loss(now.losses[-1])}"]
    if now.tokens_per_second:
        figures.append(f"{now.tokens_per_second:,.0f} tokens/s")
    if now.step_seconds:
        figures.append(f"{_seconds(now.step_seconds)} a step")
    if now.state == RUNNING and now.steps and now.step_seconds:
        figures.append(f"{_left((now.steps - now.step) * now.step_seconds)} left")
    yield from (Text(line) for line in _joined(figures, width))
    if now.steps and width >= WIDE:
        filled = round((width - 8) * now.step / now.steps)
        yield Text.assemble(
            (signs.fills[0] * filled, "green"),
            signs.empty * (width - 8 - filled),
            f" {now.step / now.steps:6.1%}",
        )
    if len(now.losses) > 1:
        yield Text.assemble("     ", (sparkline(now.losses, width - 5, signs.line), "magenta"))


def _faults(now: RunNow, width: int) -> Iterator[Text]:
    """Yield what slows the run down, and what else is wrong."""
    if (slow := now.slow) is not None:
        since = f"{slow.cause}: {slow.who} since step {slow.since} ({span(slow.seconds)} ago)"
        yield from (Text(line, "bold red") for line in _folded(since, width))
        what = f"{slow.what}, at {slow.where}" if slow.where else slow.what
        yield from (Text(f"  {line}") for line in _folded(f"{what} ({slow.sure})", width - 2))
    for line in now.wrong:
        yield from (Text(part, "bold red") for part in _folded(f"wrong: {line}", width))


def _ranks(now: RunNow, width: int, room: int, signs: Signs) -> Iterator[Text]:
    """Yield one bar per rank: its mean step."""
    if not now.ranks:
        return
    compute, exposed, waiting = tuple(signs.fills)
    yield Text()
    yield Text.assemble(
        "rank  step  " if width >= WIDE else "rank ",
        (f"{compute} compute ", PARTS["compute"]),
        (f"{exposed} exposed{' communication' if width >= WIDE else ''} ", PARTS["exposed"]),
        (f"{waiting} waiting", PARTS["waiting"]),
    )
    chosen = shown_ranks(now, room)
    longest = max((rank.parts.seconds for rank in now.ranks if rank.parts is not None), default=0.0)
    tails = [_tail(rank, now) for rank in chosen]
    for rank, tail in zip(chosen, tails, strict=True):
        yield _bar(rank, tail, width - max(map(len, tails)), longest, signs, wide=width >= WIDE)
    if len(chosen) < len(now.ranks):
        yield Text(
            f"and {len(now.ranks) - len(chosen)} more ranks: shown are those that wait least, "
            "and most"
        )


def shown_ranks(now: RunNow, room: int) -> list[RankNow]:
    """Return all ranks if there is room, else those that wait least and most: the cause, and the
    ranks that wait for it."""
    if len(now.ranks) <= room:
        return [*now.ranks]
    ordered = sorted(now.ranks, key=lambda rank: rank.parts.waiting if rank.parts else math.inf)
    least = max(1, (room - 1) // 2)
    chosen = {rank.rank for rank in (*ordered[:least], *ordered[-max(1, room - 1 - least) :])}
    chosen |= {*now.slow.slow_ranks[:1]} if now.slow else set()
    return [rank for rank in now.ranks if rank.rank in chosen]


def _tail(rank: RankNow, now: RunNow) -> str:
    """Return the text after a rank's bar."""
    state = "" if rank.process in ("runs", "unknown") or now.state in OVER else f"  {rank.process}"
    return f"{state}{'  slow' if now.slow and rank.rank in now.slow.slow_ranks else ''}"


def _bar(rank: RankNow, tail: str, width: int, longest: float, signs: Signs, *, wide: bool) -> Text:
    """Return the bar of one rank.

    `width` without the tail, `longest`: seconds of the longest bar.
    """
    head = f"{rank.rank:>4}  {rank.step or '-':>4}  " if wide else f"{rank.rank:>4} "
    if rank.parts is None:
        return Text(f"{head}no whole step is known{tail}")
    shares = _shares(rank)
    numbers = "".join(f" {share:4.0%}" for share in shares) if wide else ""
    columns = max(4, width - len(head) - len(numbers))
    cells = fill(
        [part * rank.parts.seconds / longest if longest else 0.0 for part in shares], columns
    )
    bar = Text(head)
    for cell, sign, style in zip(cells, signs.fills, PARTS.values(), strict=True):
        bar.append(sign * cell, style)
    bar.append(" " * (columns - sum(cells)) + numbers)
    return bar.append(tail, "bold red")


def _axes(now: RunNow, width: int) -> Iterator[Text]:
    """Yield the bytes per second by axis and link."""
    sending = [axis for axis in now.axes if axis.a_step]
    if not sending:
        return
    yield Text()
    if width < WIDE:
        for axis in sending:
            yield Text(f"{axis.name}: {size_text(axis.a_second)}/s, {axis.link}")
        return
    names = max(9, *(len(axis.name) for axis in sending)) + 1
    yield Text(
        f"{'axis':<{names}}{'ranks':>5}  "
        f"{'link':<14}{'bytes/s':>12}{'bytes a step':>14}{'exposed':>10}",
        "bold",
    )
    for axis in sending:
        yield Text(
            f"{axis.name:<{names}}{axis.ranks:>5}  "
            f"{axis.link:<14}{size_text(axis.a_second) + '/s':>12}"
            f"{size_text(axis.a_step):>14}{_seconds(axis.exposed):>10}"
        )


def _memory(now: RunNow, width: int, signs: Signs) -> Iterator[Text]:
    """Yield the memory of the rank that has held most, by category, and its limit."""
    if not (known := [rank for rank in now.ranks if rank.peak]):
        return
    most = max(known, key=lambda rank: rank.peak["total"])
    peak = dict(most.peak)
    total = most.peak["total"]
    del peak["total"]
    yield Text()
    title = f"memory of rank {most.rank}: {size_text(total)} at most"
    if most.limit:
        title += f", {total / most.limit:.0%} of {size_text(most.limit)}"
        columns = max(4, min(width, 100) - 2)
        filled = min(columns, round(columns * total / most.limit))
        yield from (Text(line) for line in _folded(title, width))
        yield Text.assemble(
            "  ",
            (signs.fills[0] * filled, "red" if total > 0.9 * most.limit else "blue"),
            signs.empty * (columns - filled),
        )
    else:
        yield from (Text(line) for line in _folded(f"{title}, no limit", width))
    held = [
        f"{name} {size_text(nbytes)}"
        for name, nbytes in sorted(peak.items(), key=lambda pair: -pair[1])
        if nbytes
    ]
    for line in _joined(held, width - 2):
        yield Text(f"  {line}")


def _power(now: RunNow, width: int) -> Iterator[Text]:
    if now.watts is None:
        return
    sources = sorted({rank.source for rank in now.ranks if rank.source})
    joules = f"; {now.watts * now.step_seconds:.3g} J a step" if now.step_seconds else ""
    how = "busy seconds times watts" if sources == ["estimate"] else "by " + ", ".join(sources)
    yield from (Text(line) for line in _folded(f"power: {power_text(now)}{joules} ({how})", width))


# -------------------------------------------------------------------------------- words and numbers


def sparkline(values: "tuple[float | None, ...]", width: int, levels: str) -> str:
    """Return the values as one line of characters, low to high, each the mean of its part.

    An x marks a part with a value that was not finite.
    """
    count = min(len(values), max(1, width))
    ends = [len(values) * place // count for place in range(count + 1)]
    shown = [
        None if None in (part := values[start:end]) else _mean([each or 0.0 for each in part])
        for start, end in zip(ends, ends[1:], strict=False)
    ]
    known = [value for value in shown if value is not None]
    low = min(known, default=0.0)
    high = max(known, default=0.0)
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(
        "x" if value is None else levels[round((value - low) * scale)] for value in shown
    )


def fill(parts: list[float], columns: int) -> list[int]:
    """Return whole cells for the parts of a bar of `columns` columns.

    Their sum is the rounded sum of the parts.

    >>> fill([0.5, 0.25, 0.25], 10)
    [5, 3, 2]
    """
    ends = [
        min(columns, math.floor(columns * sum(parts[: place + 1]) + 0.5))
        for place in range(len(parts))
    ]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _shares(rank: RankNow) -> tuple[float, float, float]:
    """Return compute, exposed and waiting as shares of the rank's step."""
    parts = rank.parts
    if parts is None or not parts.seconds:
        return 0.0, 0.0, 0.0
    busy = max(parts.seconds, parts.exposed + parts.waiting)
    return (busy - parts.exposed - parts.waiting) / busy, parts.exposed / busy, parts.waiting / busy


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _seconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _left(seconds: float) -> str:
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def _joined(parts: list[str], width: int, between: str = "  ") -> list[str]:
    """Return the parts joined into as few lines as the width allows."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(between) + len(part) <= width:
            lines[-1] += between + part
        else:
            lines.append(part)
    return lines


def _folded(text: str, width: int) -> list[str]:
    return _joined(text.split(), width, " ")
