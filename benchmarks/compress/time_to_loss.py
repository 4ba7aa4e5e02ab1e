"""The time until a training reaches a loss, by scheme and bandwidth, without a training over each
link.

    curve       each way is trained once over a link of no time: the link changes no number of a
                training
    steps       until the loss on some rows of the validation text is first at most the target, in
                units of `every` steps
    last loss   on the whole validation text; the rows of a curve are a third of it, evenly spread
    step        measured over each link, the median; for local steps the mean over a period
    time        steps × step; 1-bit Adam's warm-up counts as steps of `none`

Two cells are run to their end over their link. The adaptive ratio depends on its link, so each of
its cells is run.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from minidist.bench.compress.kept import KeptMeasurements
from minidist.bench.compress.links import bandwidth_text
from minidist.bench.compress.ways import PLAIN, SendingWay

SLACK = 0.015  # the target is this share above the last loss of `none`
LONG = 2.0  # seconds: a longer step over a link is measured once per round
TIMES = 5  # a shorter step is measured this number of times
SLICE = 60.0  # about the largest seconds of one question to the ranks
Curve = list[tuple[int, float]]


class RankJob(Protocol):
    """A job that asks all its ranks the same question (bench/jobs.py)."""

    def ask(self, **question: Any) -> list[Any]:
        """Return the answers of all ranks, in rank order."""
        ...


class Links(NamedTuple):
    """The links of a bench: latency in seconds, bandwidths in bytes per second."""

    alpha: float
    bandwidths: Sequence[float]


def steps_to(curve: Curve, target: float) -> int | None:
    """Return the first step after which the loss is at most the target; None if there is none."""
    return next((step for step, loss in curve if loss <= target), None)


def slowest(answers: list[dict[str, Any]]) -> list[float]:
    """Return the seconds of each step on its slowest rank."""
    return [max(row) for row in zip(*(answer["seconds"] for answer in answers), strict=True)]


def train(
    ranks: RankJob,
    way: SendingWay,
    steps: int,
    every: int,
    *,
    alpha: float = 0.0,
    beta: float = 0.0,
    until: float | None = None,
    progress: Callable[[str], None],
) -> tuple[Curve, float, int, float]:
    """Train `way` from the start.

    Args:    until: stop when the loss is at most this.
    Returns: the curve, on some rows of the validation text; the seconds of its steps; the bytes
             that rank 0 has sent; the last loss on the whole validation text.
    """
    ranks.ask(what="open", way=way.text)
    curve: Curve = []
    seconds = 0.0
    nbytes = 0
    slice_of = 1
    while (done := curve[-1][0] if curve else 0) < steps:
        left = min(every, steps - done)
        while left:
            count = min(left, slice_of)
            answers = ranks.ask(what="steps", steps=count, alpha=alpha, beta=beta)
            took = sum(slowest(answers))
            seconds = seconds + took
            nbytes = nbytes + answers[0]["nbytes"]
            left = left - count
            slice_of = max(1, int(SLICE * count / took)) if took else every
        curve.append((min(done + every, steps), ranks.ask(what="loss")[0]))
        progress(f"training {way.text}: step {curve[-1][0]} of {steps}, loss {curve[-1][1]:.4f}")
        if until is not None and curve[-1][1] <= until:
            break
    return curve, seconds, nbytes, ranks.ask(what="loss", whole=True)[0]


def time_steps(
    ranks: RankJob,
    way: SendingWay,
    links: Links,
    times: list[list[float]],
    progress: Callable[[str], None],
) -> None:
    """Measure a turn of one way: add the seconds of a step over each link to `times`, one list per
    bandwidth.

    The same steps of the training run over each link, because some schemes send less in later steps
    (threshold, predict).
    """
    for bandwidth, found in zip(links.bandwidths, times, strict=True):
        progress(f"timing {way.text} at {bandwidth_text(bandwidth)}")
        ranks.ask(what="open", way=way.text, timed=True)
        more = 1
        while more:
            answers = ranks.ask(
                what="steps", steps=way.period * more, alpha=links.alpha, beta=1 / bandwidth
            )
            seconds = slowest(answers)
            periods = [
                sum(seconds[at : at + way.period]) for at in range(0, len(seconds), way.period)
            ]
            found += [period / way.period for period in periods]
            more = TIMES - 1 if more == 1 and periods[0] < LONG else 0


def turn(
    ranks: RankJob,
    way: SendingWay,
    links: Links,
    number: tuple[int, int],
    progress: Callable[[str], None],
    kept: KeptMeasurements,
    job: str = "",
) -> list[list[float]]:
    """Return a turn of one way, measured or kept: seconds of its steps over each link.

    Args:    number: (the round, number of rounds); job: name of the ranks in the kept names.
    """

    def measured() -> list[list[float]]:
        found: list[list[float]] = [[] for _ in links.bandwidths]
        time_steps(ranks, way, links, found, after(f"round {number[0]} of {number[1]}", progress))
        return found

    seconds: list[list[float]] = kept.once(f"{job}steps of {way.text}, round {number[0]}", measured)
    return seconds


def median_steps(
    ranks: RankJob,
    ways: Sequence[SendingWay],
    links: Links,
    rounds: int,
    progress: Callable[[str], None],
    kept: KeptMeasurements,
) -> dict[str, list[float]]:
    """Return the median step of each way over each link; ways take turns."""
    times: dict[str, list[list[float]]] = {way.text: [[] for _ in links.bandwidths] for way in ways}
    for number in range(1, rounds + 1):
        for way in ways:
            found = turn(ranks, way, links, (number, rounds), progress, kept)
            for all_rounds, one in zip(times[way.text], found, strict=True):
                all_rounds += one
    return {way: [statistics.median(seconds) for seconds in of_it] for way, of_it in times.items()}


def after(words: str, progress: Callable[[str], None]) -> Callable[[str], None]:
    """Return `progress` with these words before each line."""
    return lambda line: progress(f"{words}: {line}")


def measure(
    ranks: RankJob,
    ways: Sequence[SendingWay],
    links: Links,
    *,
    steps: int,
    every: int,
    rounds: int,
    target: float | None,
    through: float,
    progress: Callable[[str], None],
    keep: Callable[[str], None],
    kept: KeptMeasurements,
) -> dict[str, Any]:
    """Return curves, times of steps, times to the target, and the cells that were run to their end.

    Args:    ways: the first is `none`; target: a loss, or None for SLACK above the last of `none`.
             through: the bandwidth at which the best way is run to its end; `none` is at the
             highest.
             kept: earlier measurements.
    """
    curves = {}
    sent = {}
    losses = {}
    for way in ways:
        if not way.follows_link:
            curves[way.text], _, nbytes, losses[way.text] = kept.once(
                f"curve of {way.text}", partial(train, ranks, way, steps, every, progress=progress)
            )
            sent[way.text] = nbytes / steps
            keep(f"{way.text}: loss {losses[way.text]:.4f} after {steps} steps")
    plain = curves[PLAIN]
    goal = (1 + SLACK) * plain[-1][1] if target is None else target
    median = median_steps(
        ranks, [way for way in ways if not way.follows_link], links, rounds, progress, kept
    )
    rows = [
        {
            "loss": losses[way.text],
            **_row(way, curves[way.text], sent[way.text], median, links, goal),
        }
        for way in ways
        if not way.follows_link
    ]
    for way in ways:
        if way.follows_link:
            rows.append(_run_adaptive(ranks, way, links, steps, every, goal, progress, kept))
    for row in rows:  # the adaptive ratio's trainings end at the target, if they reach it
        whole = row["way"] in curves or row["cells"][-1]["steps"] is None
        row["above_plain"] = row["loss"] / losses[PLAIN] - 1 if whole else None
    return {
        "target": goal,
        "rows": rows,
        "through": [
            _run_through(ranks, way, bandwidth, links, rows, every, progress, kept)
            for way, bandwidth in _cells(ways, rows, links, through)
        ],
    }


def _row(
    way: SendingWay,
    curve: Curve,
    nbytes: float,
    median: dict[str, list[float]],
    links: Links,
    goal: float,
) -> dict[str, Any]:
    """Return the row of one way: steps and seconds until the target, over each link."""
    steps = steps_to(curve, goal)
    cells = []
    for bandwidth, step, plain_step in zip(
        links.bandwidths, median[way.text], median[PLAIN], strict=True
    ):
        seconds = None if steps is None else way.seconds(steps, step, plain_step)
        cells.append(
            {"bandwidth": bandwidth, "step_seconds": step, "steps": steps, "seconds": seconds}
        )
    return {"way": way.text, "nbytes": nbytes, "curve": curve, "cells": cells}


def _run_adaptive(
    ranks: RankJob,
    way: SendingWay,
    links: Links,
    steps: int,
    every: int,
    goal: float,
    progress: Callable[[str], None],
    kept: KeptMeasurements,
) -> dict[str, Any]:
    """Return the row of the adaptive ratio, trained over each link until the target; loss and curve
    are of the last link."""
    cells = []
    curve = Curve()
    nbytes = 0
    loss = 0.0
    for bandwidth in links.bandwidths:
        curve, seconds, nbytes, loss = kept.once(
            f"{way.text} at {bandwidth_text(bandwidth)} until {goal!r}",
            partial(
                train,
                ranks,
                way,
                steps,
                every,
                alpha=links.alpha,
                beta=1 / bandwidth,
                until=goal,
                progress=after(bandwidth_text(bandwidth), progress),
            ),
        )
        needed = steps_to(curve, goal)
        cells.append(
            {
                "bandwidth": bandwidth,
                "step_seconds": seconds / curve[-1][0],
                "steps": needed,
                "seconds": None if needed is None else seconds,
                "loss": curve[-1][1],
                "nbytes": nbytes / curve[-1][0],
            }
        )
    return {
        "way": way.text,
        "loss": loss,
        "nbytes": nbytes / curve[-1][0],
        "curve": curve,
        "cells": cells,
    }


def best(rows: Sequence[dict[str, Any]], index: int) -> dict[str, Any] | None:
    """Return the row that reaches the target first over a link; None if none does."""
    there = [row for row in rows if row["cells"][index]["seconds"] is not None]
    return min(there, key=lambda row: row["cells"][index]["seconds"], default=None)


def _cells(
    ways: Sequence[SendingWay], rows: list[dict[str, Any]], links: Links, through: float
) -> list[tuple[SendingWay, float]]:
    """Return the cells to run to their end: `none` over the fastest link, and the best other way
    over the link nearest to `through`."""
    here = {way.text: way for way in ways}
    nearest = min(
        range(len(links.bandwidths)), key=lambda index: abs(links.bandwidths[index] - through)
    )
    others = [row for row in rows if row["way"] != PLAIN and not here[row["way"]].follows_link]
    found = best(others, nearest)
    chosen = [(here[PLAIN], links.bandwidths[-1])]
    return chosen if found is None else [*chosen, (here[found["way"]], links.bandwidths[nearest])]


def _run_through(
    ranks: RankJob,
    way: SendingWay,
    bandwidth: float,
    links: Links,
    rows: list[dict[str, Any]],
    every: int,
    progress: Callable[[str], None],
    kept: KeptMeasurements,
) -> dict[str, Any]:
    """Train over the link for the number of steps that the curve needs to reach the target."""
    row = next(row for row in rows if row["way"] == way.text)
    cell = next(cell for cell in row["cells"] if cell["bandwidth"] == bandwidth)
    told = {
        "way": way.text,
        "bandwidth": bandwidth,
        "steps": cell["steps"],
        "predicted": cell["seconds"],
    }
    if cell["steps"] is None:
        return {**told, "measured": None, "loss": None}
    curve, seconds, _, _ = kept.once(
        f"{way.text} at {bandwidth_text(bandwidth)} to the end, {cell['steps']} steps",
        partial(
            train,
            ranks,
            way,
            cell["steps"],
            every,
            alpha=links.alpha,
            beta=1 / bandwidth,
            progress=after(f"{bandwidth_text(bandwidth)}, to the end", progress),
        ),
    )
    return {**told, "measured": seconds, "loss": curve[-1][1]}
