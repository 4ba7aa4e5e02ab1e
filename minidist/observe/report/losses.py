"""The section on losses and speed: every step of metrics.jsonl, or the losses of metrics.json."""

from math import isfinite
from statistics import fmean, median

import numpy as np

from minidist.observe.report.run_files import METRICS, RunFiles
from minidist.observe.report.section import Chart, Section, rounded, thinned, thinning_line
from minidist.observe.step_log import STEP_LOG

FINISH = "it is written when a run ends well: run it to its end"


def section(run: RunFiles) -> Section:
    """Return the section: losses of all steps with their running mean, validation loss, seconds per
    step."""
    found = Section("losses", "Losses and speed")
    steps = [line["step"] for line in run.steps]
    losses = [line.get("loss") for line in run.steps]
    if not steps:
        losses = run.metrics.get("losses", [])
        steps = list(range(1, len(losses) + 1))
        found.missing.append(
            run.lacks(STEP_LOG, "speed of each step", "minidist train writes a line a step to it")
        )
    if not steps:
        found.missing.append(run.lacks(METRICS, "losses", FINISH))
        return found
    validation = run.metrics.get("validation_loss")
    if validation is None:
        found.missing.append(run.lacks(METRICS, "validation loss", FINISH))
    elif not isfinite(validation):
        found.lines.append("The validation loss is not finite.")
        validation = None
    if run.of_two_runs:
        found.missing.append(
            f"{STEP_LOG} is of another run than {METRICS}: the folder was used twice, and the "
            f"second run has not ended; what {METRICS} and trace.json say is of the first."
        )
    series = thinned(steps, losses)
    window = max(1, len(losses) // 20)
    finite = [loss for loss in losses if loss is not None and isfinite(loss)]
    found.lines += _in_words(finite, len(losses), window, validation) + thinning_line(
        series["every"]
    )
    found.charts.append(
        Chart(
            "losses",
            f"training loss over {len(steps)} steps",
            {
                "loss": series,
                "running": thinned(steps, _running_mean(losses, window)),
                "window": window,
                "validation": validation,
            },
        )
    )
    found.lines += [
        f"A change of plan {change['line']}."
        for change in run.metrics.get("adapt", {}).get("changes", [])
    ]
    if run.steps:
        seconds = [line["seconds"] for line in run.steps]
        found.lines.append(
            f"A step took {1e3 * median(seconds):.1f} ms (median), the fastest "
            f"{1e3 * min(seconds):.1f}, the slowest {1e3 * max(seconds):.1f}; the first is often "
            "slow."
        )
        found.charts.append(
            Chart(
                "seconds",
                f"milliseconds of each of {len(steps)} steps",
                {
                    "ms": thinned(steps, [rounded(1e3 * each) for each in seconds]),
                    "median": 1e3 * median(seconds),
                },
            )
        )
    return found


def _in_words(finite: list[float], count: int, window: int, validation: float | None) -> list[str]:
    lines = []
    if finite:
        end = "at the last" if window == 1 else f"at the end (mean of the last {window})"
        lines = [
            f"Training loss {finite[0]:.4f} at the first step, {fmean(finite[-window:]):.4f} "
            f"{end}, in nats a token."
        ]
    if validation is not None:
        lines.append(f"Validation loss {validation:.4f}.")
    if len(finite) < count:
        lines.append(
            f"{count - len(finite)} of {count} losses are not finite: NaN or infinity. They are "
            "gaps in the line."
        )
    return lines


def _running_mean(losses: list[float | None], window: int) -> list[float | None]:
    """Return the means of the last `window` losses; None before there are `window` losses, and
    where one of them is missing."""
    values = np.array([np.nan if loss is None else loss for loss in losses], dtype=np.float64)
    known = np.isfinite(values)
    sums, counts = (
        np.concatenate([[0], np.cumsum(each)]) for each in (np.where(known, values, 0.0), known)
    )
    means = (sums[window:] - sums[:-window]) / window
    whole = counts[window:] - counts[:-window] == window
    return [None] * min(window - 1, len(losses)) + [
        rounded(mean) if all_known else None
        for mean, all_known in zip(means.tolist(), whole.tolist(), strict=True)
    ]
