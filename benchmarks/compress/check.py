"""The measurements of --advise: steps over a link of no time, and with --check over each link.

Each round makes the same steps of a training. For each step the lower tenth (quantile 0.1) of its
times over the rounds counts, and the mean over the steps is the result. Reasons: other programs,
and the ranks themselves if they share cores, lengthen most steps by different amounts; the very
shortest time is luck; and some schemes send more in one step than in the next. Steps over the link
of no time and over each link take turns, so a machine that becomes slower becomes slower for all of
them.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from minidist.bench.compress.advise import (
    AdviceCell,
    LocalStep,
    bandwidth_for,
    break_even,
    bytes_ratio,
    measured_break_even,
    predicted_gain,
    score,
    shaped,
    speed_ratio,
)
from minidist.bench.compress.kept import KeptMeasurements
from minidist.bench.compress.time_to_loss import Links, RankJob, turn
from minidist.bench.compress.ways import PLAIN, SendingWay

SCHEMES = "fp16,8bit,4bit,top-k,threshold,random-k,sign,powersgd,predict"
TURNS = 5  # steps of a round over the link of no time
LOW = 0.1  # the quantile over the rounds that counts
ALL_ROUNDS = slice(None)
HALF = slice(0, None, 2)
OTHER_HALF = slice(1, None, 2)
CLAIMED_BYTES = 5.0
CLAIMED_SPEED = 3.5
WARMUPS = (0.15, 0.2)  # shares of 1-bit Adam's warm-up


class AdviceTimes(NamedTuple):
    """The measurements of all rounds, by way.

    Attributes: local: for each round, the steps over a link of no time
                over: for each link and round, the seconds of the steps over it (--check)
    """

    local: dict[str, list[list[LocalStep]]]
    over: dict[str, list[list[list[float]]]]

    def local_step(self, way: str) -> LocalStep:
        """Return the step that counts, with the mean bytes and messages."""
        steps = [step for steps in self.local[way] for step in steps]
        nbytes, messages = (
            statistics.mean(getattr(step, name) for step in steps)
            for name in ("nbytes", "messages")
        )
        return replace(
            min(steps, key=lambda step: step.seconds),
            nbytes=nbytes,
            messages=messages,
            seconds=_short([[step.seconds for step in steps] for steps in self.local[way]]),
        )

    def seconds(self, way: str, link: int, rounds: slice = ALL_ROUNDS) -> float:
        """Return the seconds of the step that counts, over a link."""
        return _short(self.over[way][link][rounds])


def _short(rounds: Sequence[Sequence[float]]) -> float:
    """Return the mean over the steps of a round of each step's LOW quantile over the rounds."""
    return statistics.mean(float(np.quantile(times, LOW)) for times in zip(*rounds, strict=False))


def measure_rounds(
    ranks: RankJob,
    ways: Sequence[SendingWay],
    links: Links,
    rounds: int,
    progress: Callable[[str], None],
    kept: KeptMeasurements,
    job: str = "",
) -> AdviceTimes:
    """Measure each way in each round: steps over a link of no time, then over each of `links`.

    Args:    links: without bandwidths, only the link of no time is measured; job: name of the ranks
             in the kept names.
    """
    found = AdviceTimes(
        {way.text: [] for way in ways}, {way.text: [[] for _ in links.bandwidths] for way in ways}
    )

    def local_turn(way: SendingWay, number: int) -> list[dict[str, Any]]:
        progress(f"round {number} of {rounds}: {way.text}, a link of no time")
        ranks.ask(what="open", way=way.text, timed=True)
        return [asdict(_local_step(ranks.ask(what="steps", steps=1))) for _ in range(TURNS)]

    for number in range(1, rounds + 1):
        for way in ways:
            steps = kept.once(
                f"{job}{way.text} over a link of no time, round {number}",
                partial(local_turn, way, number),
            )
            found.local[way.text].append([LocalStep(**step) for step in steps])
            if links.bandwidths:
                times = turn(ranks, way, links, (number, rounds), progress, kept, job)
                for of_link, seconds in zip(found.over[way.text], times, strict=True):
                    of_link.append(seconds)
    return found


def _local_step(answers: list[dict[str, Any]]) -> LocalStep:
    """Return the step of the slowest rank, with the mean bytes and messages of the ranks."""
    late = max(answers, key=lambda answer: answer["seconds"])
    nbytes, messages = (
        statistics.mean(answer[name] for answer in answers) for name in ("nbytes", "messages")
    )
    return LocalStep(sum(late["seconds"]), nbytes, messages, late["moments"], late["sizes"])


def advice(local: dict[str, LocalStep], ranks: int, links: Links) -> list[AdviceCell]:
    """Return the prediction for each scheme at each bandwidth."""
    return [
        AdviceCell(way, ranks, bandwidth, (local[PLAIN].over(link), step.over(link)))
        for way, step in local.items()
        if way != PLAIN
        for bandwidth in links.bandwidths
        for link in [shaped(ranks, links.alpha, bandwidth)]
    ]


def advise(
    ranks: RankJob,
    size: int,
    ways: Sequence[SendingWay],
    links: Links,
    *,
    rounds: int,
    check: bool,
    progress: Callable[[str], None],
    kept: KeptMeasurements,
) -> dict[str, Any]:
    """Return the predictions among `size` ranks, and with `check` the measurements.

    Args:    ways: the first is `none`; kept: earlier measurements.
    """
    times = measure_rounds(
        ranks,
        ways,
        links if check else Links(links.alpha, []),
        rounds,
        progress,
        kept,
        f"{size} ranks: ",
    )
    local = {way.text: times.local_step(way.text) for way in ways}
    cells = advice(local, size, links)
    if check:
        cells = [
            replace(cell, measured=_measured(times, cell.scheme, links)[cell.bandwidth])
            for cell in cells
        ]
    return {
        "ranks": size,
        "score": score(cells),
        "rows": [
            _row(way.text, cells, local, size, links, times) for way in ways if way.text != PLAIN
        ],
        "plain": {"nbytes": local[PLAIN].nbytes, "seconds": local[PLAIN].seconds},
    }


def _measured(
    times: AdviceTimes, way: str, links: Links, rounds: slice = ALL_ROUNDS
) -> dict[float, tuple[float, float]]:
    """Return {bandwidth: (seconds of a plain step, seconds of this way's step)}."""
    return {
        bandwidth: (times.seconds(PLAIN, link, rounds), times.seconds(way, link, rounds))
        for link, bandwidth in enumerate(links.bandwidths)
    }


def _row(
    way: str,
    cells: Sequence[AdviceCell],
    local: dict[str, LocalStep],
    ranks: int,
    links: Links,
    times: AdviceTimes,
) -> dict[str, Any]:
    """Return the row of a scheme: its cells, and its break-even bandwidth by the model and by
    measurement, over all rounds and over halves of them."""
    gain = predicted_gain(local[PLAIN], local[way], ranks, links.alpha)
    edge = break_even(lambda speed: gain(speed) > 0)
    checked = bool(times.over[way])
    rounds = len(times.local[way])
    halves = [HALF, OTHER_HALF] if checked and rounds > 1 else []
    return {
        "way": way,
        "nbytes": local[way].nbytes,
        "seconds": local[way].seconds,
        "break_even": edge if isfinite(edge) else None,
        "always": not isfinite(edge),
        "measured_break_even": measured_break_even(_measured(times, way, links), gain)
        if checked
        else None,
        "by_halves": [
            measured_break_even(_measured(times, way, links, half), gain) for half in halves
        ],
        "cells": [
            {
                "bandwidth": cell.bandwidth,
                "predicted": cell.predicted,
                "measured": cell.measured,
                "compress": cell.compress,
                "right": cell.right,
            }
            for cell in cells
            if cell.scheme == way
        ],
    }


def claims(plain: LocalStep, compressed: LocalStep, ranks: int, links: Links) -> dict[str, Any]:
    """Return the notes' two claims on 1-bit Adam, five times fewer bytes and 3.5 times faster
    (N3 §3.2), by the model.

    Args:    plain, compressed: steps of `none` and of 1-bit Adam after its warm-up.
    """
    bits = 32 * compressed.nbytes / plain.nbytes
    rows = []
    for warmup in WARMUPS:
        speeds = []
        for bandwidth in links.bandwidths:
            link = shaped(ranks, links.alpha, bandwidth)
            speeds.append(speed_ratio(warmup, plain.over(link), compressed.over(link)))
        rows.append(
            {
                "warmup": warmup,
                "bytes_fp16": bytes_ratio(warmup, plain_bits=16, bits=bits),
                "bytes_fp32": bytes_ratio(warmup, plain_bits=32, bits=bits),
                "speeds": speeds,
                "bandwidth": bandwidth_for(
                    CLAIMED_SPEED, warmup, plain, compressed, ranks, links.alpha
                ),
            }
        )
    return {"ranks": ranks, "bits": bits, "rows": rows}
