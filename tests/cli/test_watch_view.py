"""The view of minidist watch at any width, with colour, without, and in ASCII."""

from dataclasses import replace
from pathlib import Path

import pytest
from watched import WatchedRun

from minidist.cli.watch_view import (
    ASCII,
    FULL,
    fill,
    lines_of,
    one_line,
    shown_ranks,
    signs_for,
    sparkline,
)
from minidist.observe.live.looking import Looking
from minidist.observe.live.run_now import AxisNow, RunNow
from minidist.observe.live.slow_now import SlowNow
from minidist.observe.live.step_parts import StepParts


@pytest.fixture(scope="module")
def now(tmp_path_factory: pytest.TempPathFactory) -> RunNow:
    """A run whose rank 2 is slow, looked at."""
    return replace(
        Looking(WatchedRun(tmp_path_factory.mktemp("run"), slow=2, since=5).folder).look(),
        run="runs/one",
    )


@pytest.mark.parametrize("width", [20, 40, 59, 60, 80, 200])
@pytest.mark.parametrize("signs", [FULL, ASCII])
def test_no_line_is_wider_than_the_terminal(now: RunNow, width: int, signs: object) -> None:
    lines = [line.plain for line in lines_of(now, width=width, signs=signs)]
    assert max(map(len, lines)) <= width
    if signs is ASCII:
        assert all(line.isascii() for line in lines)
    for word in ("runs/one", "slow: rank 2", "memory of rank 3", "power", "waiting"):
        assert width == 20 or any(word in line for line in lines), word


def test_the_view_at_80_columns(now: RunNow) -> None:
    lines = [line.plain for line in lines_of(now, width=80)]
    assert lines[:3] == [
        "runs/one  running  step 20 of 50",
        "loss 3.0000  5,120 tokens/s  200 ms a step  0:00:06 left",
        "█" * 29 + "·" * 43 + "  40.0%",
    ]
    assert lines[3] == "     " + sparkline(now.losses, 75, FULL.line) and len(lines[3]) == 25
    assert lines[4] == "slow: rank 2 since step 6 (3 s ago)"
    assert lines[5:7] == [
        "  rank 2 is slow: the others wait 0.08 s of a step of 0.2 s for it, at",
        "  train.py:40 (certain)",
    ]
    first = lines.index("rank  step  █ compute ▒ exposed communication ░ waiting") + 1
    columns = 80 - len("   0    21  ") - len("  35%  25%  40%") - len("  slow")
    compute, exposed, waiting = fill([0.35, 0.25, 0.4], columns)
    for rank, row in enumerate(lines[first : first + 4]):
        bar = "█" * compute + "▒" * exposed + "░" * waiting + "  35%  25%  40%"
        if rank == 2:
            bar = "█" * (compute + waiting) + "▒" * exposed + "  75%  25%   0%  slow"
        assert row == f"{rank:>4}    21  {bar}"
    assert any(
        line.startswith("world         4  one host") and line.endswith(" ms") for line in lines
    )
    assert any(
        line.startswith("memory of rank 3: ") and line.endswith(" of 64 MiB") for line in lines
    )
    assert any(
        line == "power: 40 W, an estimate; 8 J a step (busy seconds times watts)" for line in lines
    )


def test_a_slow_link_and_what_else_is_wrong_have_lines_of_their_own(now: RunNow) -> None:
    link = SlowNow(
        (1, 2), "slow link", 9, 3.0, "the link is 3.0 times as slow as the others", "", "likely"
    )
    sick = replace(now, slow=link, wrong=("the memory of rank 3 grows in every step",))
    lines = [line.plain for line in lines_of(sick, width=80)]
    assert lines[4:7] == [
        "slow link: the link from rank 1 to rank 2 since step 9 (3 s ago)",
        "  the link is 3.0 times as slow as the others (likely)",
        "wrong: the memory of rank 3 grows in every step",
    ]
    assert not any(line.endswith("  slow") for line in lines)
    assert one_line(sick).endswith(
        "  slow link: the link from rank 1 to rank 2 since step 9  the memory of rank 3 "
        "grows in every step"
    )


def test_bars_have_the_length_of_their_parts(now: RunNow) -> None:
    assert fill([0.5, 0.25, 0.25], 10) == [5, 3, 2] and fill([1 / 3] * 3, 10) == [3, 4, 3]
    assert fill([0.0, 0.0, 1.0], 7) == [0, 0, 7] and fill([0.2, 0.2, 0.1], 10) == [2, 2, 1]
    assert all(sum(fill([part, 1 - part, 0.0], 33)) == 33 for part in (0.0, 0.1, 0.49, 0.9))


def test_a_loss_that_is_not_finite_shows(now: RunNow) -> None:
    assert sparkline((1.0, 2.0, None, 3.0), 4, FULL.line) == "▁▅x█"
    assert sparkline((2.0, 2.0), 9, FULL.line) == "▁▁" and sparkline((None,), 9, FULL.line) == "x"
    assert sparkline((4.0, 2.0, 1.0, 1.0), 2, "01") == "10"
    lines = [line.plain for line in lines_of(replace(now, losses=(1.0, None)), width=80)]
    assert lines[1].startswith("loss not finite")


def test_of_many_ranks_those_that_wait_least_and_most_are_shown(now: RunNow) -> None:
    many = tuple(
        replace(now.ranks[0], rank=rank, parts=StepParts(1.0, 0.1, (rank * 7 % 64) / 100))
        for rank in range(64)
    )
    crowd = replace(now, ranks=many, slow=None)
    shown = shown_ranks(crowd, 9)
    waits = [rank.parts.waiting for rank in shown if rank.parts is not None]
    assert len(shown) <= 9 and min(waits) == 0.0 and max(waits) == 0.63
    lines = [line.plain for line in lines_of(crowd, width=80, height=30)]
    assert len(lines) < 30 and any(
        line.startswith("and ") and "more ranks: shown are" in line for line in lines
    )
    assert len(shown_ranks(now, 4)) == 4


def test_axes_of_several_links_and_ranks_without_a_whole_step(now: RunNow) -> None:
    axes = (
        AxisNow("dp", 8, "between hosts", 3 << 20, 6 << 20, 0.25),
        AxisNow("tp", 2, "one host", 1 << 10, 2048, 0.0),
    )
    ranks = (replace(now.ranks[0], parts=None, step=None), *now.ranks[1:])
    lines = [line.plain for line in lines_of(replace(now, axes=axes, ranks=ranks), width=80)]
    assert [line.split() for line in lines if "hosts" in line] == [
        ["dp", "8", "between", "hosts", "6", "MiB/s", "3", "MiB", "250", "ms"]
    ]
    assert any(line.startswith("   0     -  no whole step is known") for line in lines)


def test_one_line_for_a_log(now: RunNow) -> None:
    line = one_line(now)
    assert (
        line.startswith("running: step 20 of 50  loss 3.0000  5,120 tokens/s  compute ")
        and "\n" not in line
    )
    assert line.endswith("  40 W, an estimate  slow: rank 2 since step 6")
    bare = replace(now, losses=(), tokens_per_second=None, ranks=(), watts=None, slow=None)
    assert one_line(bare) == "running: step 20 of 50"


def test_signs_follow_the_encoding() -> None:
    assert (
        signs_for("utf-8") is FULL and signs_for("ascii") is ASCII and signs_for("latin-1") is ASCII
    )
    assert signs_for("no such encoding") is ASCII


def test_a_run_on_counters_names_no_estimate(tmp_path: Path, now: RunNow) -> None:
    counted = replace(
        now, estimate=False, ranks=tuple(replace(rank, source="rapl") for rank in now.ranks)
    )
    lines = [line.plain for line in lines_of(counted, width=80)]
    assert "power: 40 W; 8 J a step (by rapl)" in lines and not any(
        "estimate" in line for line in lines
    )
