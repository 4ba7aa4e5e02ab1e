"""The progress of minidist train: few lines, a bar on a terminal, held-out text."""

import io

import numpy as np
from rich.console import Console

from minidist.cli.train import progress


def test_lines_are_few_and_the_last_is_there() -> None:
    lines: list[str] = []
    report = progress.line_report(1000, lines.append, seconds=3600)
    for step in range(1, 1001):
        report.step(step, 1.0, 2.0, 3 << 20)
    report.close()
    assert (
        len(lines) == 2
        and lines[0].startswith("step    1 of 1000")
        and lines[1].startswith("step 1000 of 1000  loss 1.0000  2 tokens/s  3")
    )


def test_held_out_text_that_takes_long_shows_how_far_it_is() -> None:
    lines: list[str] = []
    batches = [(np.array([number]), np.array([number])) for number in range(12)]
    for seconds, shown in ((0.0, 12), (3600.0, 0)):
        lines.clear()
        assert (
            list(progress.line_report(1, lines.append, seconds=seconds).validating(batches))
            == batches
        )
        assert lines == [f"held-out text: batch {number:>2} of 12" for number in range(shown)]
    assert list(progress.ProgressReport().validating(batches)) == batches


def test_a_terminal_gets_a_bar() -> None:
    screen = io.StringIO()
    report = progress.make_report(
        3, Console(file=screen, force_terminal=True, width=120), on_terminal=True
    )
    for step in range(1, 4):
        report.step(step, 2.5, 1234.0, 1 << 20)
    report.close()
    assert list(report.validating([(np.array([1]), np.array([2]))] * 3)) == [(1, 2)] * 3
    assert "held-out text" in screen.getvalue()
    assert (
        "3/3" in screen.getvalue()
        and "loss 2.5000" in screen.getvalue()
        and "1,234 tokens/s" in screen.getvalue()
    )
