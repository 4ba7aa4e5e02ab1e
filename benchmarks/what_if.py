"""`minidist bench overlap-step --why --what-if CHANGE`: the recorded step with a change, predicted,
then run."""

import argparse
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from minidist.bench.overlap_step import Contender, OverlapStepRow, measure_all, timelines_of
from minidist.bench.step.ranks import Model
from minidist.comm.cost.link_model import LinkCost
from minidist.console import number_of_bytes
from minidist.observe.step_record import record_step
from minidist.observe.what_if import ORDERS, Change, predict

_READ: dict[str, Callable[[str], Any]] = {
    "bucket": number_of_bytes,
    "bandwidth": number_of_bytes,
    "alpha": float,
    "ahead": int,
    "order": lambda word: ORDERS[ORDERS.index(word)],
    "priority": lambda word: ("off", "on").index(word) == 1,
}
_LEAST = {"bucket": 1, "bandwidth": 1, "alpha": 0, "ahead": 0}


def change(text: str) -> Change:
    """Return a change from its text, "bucket=1MiB,ahead=2". Raises: ArgumentTypeError."""
    found = {}
    for word in text.split(","):
        name, _, value = word.partition("=")
        try:
            found[name] = _READ[name](value)
            if name in _LEAST and not _LEAST[name] <= found[name] < float("inf"):
                raise ValueError(value)
        except (KeyError, ValueError, argparse.ArgumentTypeError) as error:
            raise argparse.ArgumentTypeError(
                f"{word!r} is no change of a step; write bucket=1MiB, alpha=1e-4, "
                f"bandwidth=250MB, ahead=2, order=forward or priority=on"
            ) from error
    return Change(**found)


def follow(
    rows: list[OverlapStepRow],
    chosen: list[Contender],
    args: argparse.Namespace,
    progress: Callable[[str], None],
) -> list[OverlapStepRow]:
    """Return the rows with each change that applies to them: the prediction from the recorded step,
    and the median of a run."""
    found = []
    for row, contender in zip(rows, chosen, strict=True):
        assert row.why is not None
        record = record_step(timelines_of(row.steps), row.why["step"])
        link = LinkCost(contender.link, args.ranks, args.alpha, 0.0, 1 / args.bandwidth, 0.0, 0.0)
        told = []
        for each in args.what_if:
            if applies(each, contender):
                seconds = predict(record, each, link if contender.link == "delayed" else None)
                told.append(
                    {
                        "change": text_of(each),
                        "predicted": seconds,
                        "measured": _measured(each, contender, args, progress),
                    }
                )
        found.append(replace(row, what_if=told))
    return found


def applies(change: Change, contender: Contender) -> bool:
    """Return whether a contender has what the change concerns: buckets, ZeRO-3's prefetch, links of
    a given speed."""
    if (change.alpha is not None or change.bandwidth is not None) and contender.link != "delayed":
        return False
    if contender.strategy == "zero3":
        return change.bucket is None and change.order is None
    return change.ahead is None


def text_of(change: Change) -> str:
    """Return the change as text: "bucket=1048576,ahead=2"."""
    words = {name: value for name, value in asdict(change).items() if value is not None}
    return ",".join(
        f"{name}={('off', 'on')[value] if isinstance(value, bool) else value}"
        for name, value in words.items()
    )


def _measured(
    change: Change, contender: Contender, args: argparse.Namespace, progress: Callable[[str], None]
) -> float | None:
    """Return the seconds of a step that runs with the change; None if none of our strategies can
    run it."""
    if change.order is not None or change.priority is not None:
        return None
    ahead = contender.ahead if change.ahead is None else change.ahead
    [row] = measure_all(
        [replace(contender, ahead=ahead)],
        Model.of(args),
        args.ranks,
        args.rounds,
        args.steps,
        change.bucket or args.bucket,
        args.alpha if change.alpha is None else change.alpha,
        1 / (change.bandwidth or args.bandwidth),
        progress,
    )
    return row.step_seconds
