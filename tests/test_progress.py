"""The progress of a long command: a line on a terminal, nothing in a file, few lines of a
training."""

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from imports import ROOT
from rich.console import Console

from minidist.progress import Bar, Lines, Progress, progress

PROGRAM = """
from minidist.progress import progress
with progress("reading [a file]") as show:
    show("fitting")
    show.at(3, 40, "round 3: gloo")
    show.keep("4 ranks: done")
    show("the last")
print("the result")
"""


def on_terminal(command: list[str], *, result: Path | None = None, term: str = "xterm") -> str:
    """Return what the command shows on a terminal of 80 columns; its stdout may be a file."""
    mine, theirs = pty.openpty()
    with open(result or os.devnull, "wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file if result else theirs,
            stderr=theirs,
            env={**os.environ, "TERM": term, "COLUMNS": "80"},
            cwd=ROOT,
        )
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(mine, 1 << 16):
            shown += piece
    except OSError:  # it has ended
        pass
    os.close(mine)
    assert process.wait(30) == 0, shown.decode()
    return shown.decode()


def test_a_terminal_shows_what_is_done_and_a_bar(tmp_path: Path) -> None:
    shown = on_terminal([sys.executable, "-c", PROGRAM])
    assert "3/40" in shown and "round 3: gloo" in shown and "━" in shown
    assert shown.index("4 ranks: done") < shown.index("the last") < shown.index("the result")
    # it has gone
    assert (
        re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.rsplit("\x1b[2K", 1)[1]).strip() == "the result"
    )


def test_results_can_go_to_a_file_meanwhile(tmp_path: Path) -> None:
    shown = on_terminal([sys.executable, "-c", PROGRAM], result=tmp_path / "out")
    assert "round 3: gloo" in shown and "done" not in shown
    assert (tmp_path / "out").read_text() == "4 ranks: done\nthe result\n"


def test_lines_of_other_processes_stand_above() -> None:
    other = "import sys; print('rank 2 is [lost]', 'and rank 3', sep=chr(10), file=sys.stderr)"
    program = f"""
import subprocess, sys
from minidist.progress import progress
with progress("a storm") as show, show.stderr() as stderr:
    show("one fault so far")
    subprocess.run([sys.executable, "-c", {other!r}], stderr=stderr)
    show("the last")
"""
    shown = on_terminal([sys.executable, "-c", program])
    assert "\x1b[2Krank 2 is [lost]\r\n" in shown and "\x1b[2Kand rank 3\r\n" in shown
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("", "rank 2 is [lost]\nand rank 3\n")


def test_a_dumb_terminal_and_a_file_show_nothing_of_short_work() -> None:
    assert (
        on_terminal([sys.executable, "-c", PROGRAM], term="dumb")
        == "4 ranks: done\r\nthe result\r\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("4 ranks: done\nthe result\n", "")


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (
            "for number in range(12): show.at(number, 12, 'round'); time.sleep(0.05)",
            r"\d+ of 12  round",
        ),
        ("time.sleep(0.6)", "one call"),  # which says nothing of itself
    ],
)
def test_long_work_shows_signs_of_life_where_there_is_no_terminal(work: str, said: str) -> None:
    program = f"""
import time
from minidist.progress import Spoken
show = Spoken("one call", 0.2)
{work}
show.close()
print("the result")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    lines = done.stderr.splitlines()
    assert done.stdout == "the result\n" and lines
    assert all(re.fullmatch(rf"{said} \(\d+ s\)", line) for line in lines)


def test_what_stays_is_said_by_progress_that_shows_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show = Progress()
    show("work")
    show.at(1, 2)
    show.keep("a result")
    show.close()
    with progress("reading") as other:
        other("more")
    assert capsys.readouterr() == ("a result\n", "")


def test_a_bar_that_stays_counts_what_it_is_named_after() -> None:
    screen = io.StringIO()
    bar = Bar(Console(file=screen, force_terminal=True, width=100), noun="step", stays=True)
    for step in range(1, 4):
        bar.at(step, 3, f"loss {4 - step}.0")
    bar.keep("a line [above]")
    bar.close()
    bar.close()
    assert (
        "step" in screen.getvalue()
        and "3/3" in screen.getvalue()
        and "loss 1.0" in screen.getvalue()
    )
    assert "a line [above]" in screen.getvalue()


def test_lines_are_few() -> None:
    told: list[str] = []
    lines = Lines(told.append, "step", seconds=3600)
    for step in range(1, 101):
        lines.at(step, 100, "loss 2")
    assert told == ["step   1 of 100  loss 2", "step 100 of 100  loss 2"]
    told.clear()
    silent = Lines(told.append, "batch", seconds=3600, ends=False)
    for step in range(1, 101):
        silent.at(step, 100)
    assert told == []


def test_no_other_module_draws_progress() -> None:
    """All long commands use this one; the live view of a run is a view, not progress."""
    drawing = re.compile(r"rich\.(progress|status|live|spinner)|console\.status\(")
    found = {
        str(path.relative_to(ROOT))
        for folder in ("minidist", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        if drawing.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"minidist/progress.py", "minidist/cli/watch.py"}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("command", "cluster", "says"),
    [("simulate", "h100:1x2", "simulating 2 ranks"), ("plan", "h100:1x1", "ranking the plans")],
)
def test_long_commands_show_what_they_do(
    command: str, cluster: str, says: str, tmp_path: Path
) -> None:
    words = [command, "--cluster", cluster, "--model", "gpt2", "--batch", "2"]
    assert says in on_terminal([sys.executable, "-m", "minidist", *words], result=tmp_path / "out")
    assert (tmp_path / "out").read_text()
