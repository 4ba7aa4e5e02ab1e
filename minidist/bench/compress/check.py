"""The adviser's measurements: steps over a link that takes no time, and with --check over each link.

Of all steps of a way over a link the shortest counts: other programs, and the ranks themselves where they share cores,
only lengthen a step, each time by something else.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from math import isfinite
from typing import Any

from minidist.bench.compress.advise import (
    AdviceCell,
    LocalStep,
    bandwidth_for,
    bytes_ratio,
    measured_break_even,
    predicted_break_even,
    score,
    shaped,
    speed_ratio,
)
from minidist.bench.compress.kept import KeptMeasurements
from minidist.bench.compress.time_to_loss import Links, RankJob, measured_steps
from minidist.bench.compress.ways import PLAIN, SendingWay

SCHEMES = "fp16,8bit,4bit,top-k,threshold,random-k,sign,powersgd,predict"
TURNS = 5               # steps of a round over the link of no time
CLAIMED_BYTES, CLAIMED_SPEED = 5.0, 3.5
WARMUPS = (0.15, 0.2)   # shares of 1-bit Adam's warm-up


def local_steps(ranks: RankJob, ways: Sequence[SendingWay], rounds: int, progress: Callable[[str], None],
                kept: KeptMeasurements, job: str = "") -> dict[str, LocalStep]:
    """The shortest step of each way over a link that takes no time; ways take turns.

    Args:    job: of the ranks, in the kept names.
    """
    found: dict[str, list[LocalStep]] = {way.text: [] for way in ways}

    def turn(way: SendingWay, number: int) -> list[dict[str, Any]]:
        progress(f"round {number} of {rounds}: {way.text}, a link of no time")
        ranks.ask(what="open", way=way.text, timed=True)
        return [asdict(_local_step(ranks.ask(what="steps", steps=1))) for _ in range(TURNS)]

    for number in range(1, rounds + 1):
        for way in ways:
            steps = kept.once(f"{job}{way.text} over a link of no time, round {number}", partial(turn, way, number))
            found[way.text] += [LocalStep(**step) for step in steps]
    return {way: min(steps, key=lambda step: step.seconds) for way, steps in found.items()}


def _local_step(answers: list[dict[str, Any]]) -> LocalStep:
    """The step of the rank that took longest; bytes and messages are means of the ranks."""
    late = max(answers, key=lambda answer: answer["seconds"])
    nbytes, messages = (statistics.mean(answer[name] for answer in answers) for name in ("nbytes", "messages"))
    return LocalStep(sum(late["seconds"]), nbytes, messages, late["moments"], late["sizes"])


def advice(local: dict[str, LocalStep], ranks: int, links: Links) -> list[AdviceCell]:
    """The prediction for each scheme at each bandwidth."""
    return [AdviceCell(way, ranks, bandwidth, (local[PLAIN].over(link), step.over(link)))
            for way, step in local.items() if way != PLAIN
            for bandwidth in links.bandwidths for link in [shaped(ranks, links.alpha, bandwidth)]]


def advise(ranks: RankJob, size: int, ways: Sequence[SendingWay], links: Links, *, rounds: int, check: bool,
           progress: Callable[[str], None], kept: KeptMeasurements) -> dict[str, Any]:
    """Predictions among `size` ranks, and with `check` what was measured.

    Args:    ways: the first is `none`; kept: what was measured before.
    """
    local = local_steps(ranks, ways, rounds, progress, kept, f"{size} ranks: ")
    cells = advice(local, size, links)
    measured = measured_steps(ranks, ways, links, rounds, progress, kept, f"{size} ranks: ", min) if check else None
    if measured is not None:
        places = {bandwidth: index for index, bandwidth in enumerate(links.bandwidths)}
        cells = [replace(cell, measured=(measured[PLAIN][places[cell.bandwidth]],
                                         measured[cell.scheme][places[cell.bandwidth]])) for cell in cells]
    return {"ranks": size, "rows": [_row(way.text, cells, local, size, links) for way in ways if way.text != PLAIN],
            "score": score(cells), "plain": {"nbytes": local[PLAIN].nbytes, "seconds": local[PLAIN].seconds}}


def _row(way: str, cells: Sequence[AdviceCell], local: dict[str, LocalStep], ranks: int,
         links: Links) -> dict[str, Any]:
    """One scheme: its cells, and its break-even bandwidth by the model and as measured."""
    mine = [cell for cell in cells if cell.scheme == way]
    gains = {cell.bandwidth: cell.measured[0] - cell.measured[1] for cell in mine if cell.measured is not None}
    edge = predicted_break_even(local[PLAIN], local[way], ranks, links.alpha)
    return {"way": way, "nbytes": local[way].nbytes, "seconds": local[way].seconds,
            "break_even": edge if isfinite(edge) else None, "always": not isfinite(edge),
            "measured_break_even": measured_break_even(gains),
            "cells": [{"bandwidth": cell.bandwidth, "predicted": cell.predicted, "measured": cell.measured,
                       "compress": cell.compress, "right": cell.right} for cell in mine]}


def claims(plain: LocalStep, compressed: LocalStep, ranks: int, links: Links) -> dict[str, Any]:
    """The notes' two claims of 1-bit Adam, five times fewer bytes and 3.5 times sooner (N3 §4), by the model.

    Args:    plain, compressed: steps of `none` and of 1-bit Adam after its warm-up.
    """
    bits = 32 * compressed.nbytes / plain.nbytes
    rows = []
    for warmup in WARMUPS:
        speeds = []
        for bandwidth in links.bandwidths:
            link = shaped(ranks, links.alpha, bandwidth)
            speeds.append(speed_ratio(warmup, plain.over(link), compressed.over(link)))
        rows.append({"warmup": warmup, "bytes_fp16": bytes_ratio(warmup, plain_bits=16, bits=bits),
                     "bytes_fp32": bytes_ratio(warmup, plain_bits=32, bits=bits), "speeds": speeds,
                     "bandwidth": bandwidth_for(CLAIMED_SPEED, warmup, plain, compressed, ranks, links.alpha)})
    return {"ranks": ranks, "bits": bits, "rows": rows}
