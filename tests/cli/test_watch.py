"""minidist watch: on a terminal, as lines, once; of a run that ends, and of none."""

import codecs
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest
from watched import WatchedRun

from minidist.cli import main, watch
from minidist.cli.watch import lines
from minidist.observe.live.looking import Looking


class Screen:
    """`minidist watch` on a pseudo-terminal of so many columns."""

    def __init__(self, *words: str, columns: int = 80, **environment: str) -> None:
        self.file, end = pty.openpty()
        fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        env = {
            name: value
            for name, value in os.environ.items()
            if name not in ("NO_COLOR", "COLUMNS", "FORCE_COLOR")
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "minidist", "watch", *words],
            stdin=end,
            stdout=end,
            stderr=end,
            start_new_session=True,
            env={**env, "TERM": "xterm-256color", "PYTHONUTF8": "1", **environment},
        )
        os.close(end)
        self.text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def until(self, word: str, limit: float = 30.0) -> str:
        """Return what it has written when `word` is there."""
        end = time.monotonic() + limit
        while word not in self.text:
            assert time.monotonic() < end, self.text
            with suppress(OSError):  # it has ended
                self.text += self._decoder.decode(os.read(self.file, 1 << 16))
        return self.text

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.file)


def test_the_view_follows_a_run_and_ctrl_c_leaves_it(tmp_path: Path) -> None:
    run = WatchedRun(tmp_path, slow=2)
    with closing(Screen(str(tmp_path), "--every", "0.1")) as screen:
        first = screen.until("power: ")
        assert "\x1b[" in first and "step 20 of 50" in first and "slow" in first
        file = tmp_path / "metrics.jsonl"
        file.write_bytes(file.read_bytes() + run.state(33).line(time.time()))
        screen.until("step 33 of 50")
        screen.process.send_signal(signal.SIGINT)
        assert screen.process.wait(20) == 0
        assert "Traceback" not in screen.text and run.job.flights[0].pid == os.getpid()


@pytest.mark.soak  # test_a_view_beside_a_training_says_its_lines_and_ends_with_it
def test_the_view_ends_with_the_run(tmp_path: Path) -> None:
    run = WatchedRun(tmp_path)
    with closing(Screen(str(tmp_path), "--every", "0.1")) as screen:
        screen.until("power: ")
        run.finish()
        screen.until("50 steps; validation loss 1.5000")
        assert screen.process.wait(20) == 0


def plain(text: str) -> list[str]:
    """The lines of a screen without the codes that move the cursor."""
    # a view drawn again begins with \\r
    return re.split("[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-ln-z]", "", text))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("columns", [40, 80, 200])
def test_no_colour_at_any_width(columns: int, tmp_path: Path) -> None:
    WatchedRun(tmp_path, alive=False, steps=50).finish()
    with closing(Screen(str(tmp_path), columns=columns, NO_COLOR="1")) as screen:
        text = screen.until("power: ")
        assert screen.process.wait(20) == 0
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", text)
    assert max(map(len, plain(re.sub(r"\x1b\[[0-9;]*m", "", text)))) <= columns
    assert "█" in text and "▒" in text


@pytest.mark.soak  # the next test: lines; test_no_colour_at_any_width: another terminal
def test_a_dumb_terminal_gets_lines(tmp_path: Path) -> None:
    run = WatchedRun(tmp_path)
    with closing(Screen(str(tmp_path), "--every", "0.1", TERM="dumb")) as screen:
        screen.until("running: step 20 of 50  loss 3.0000")
        run.finish()
        text = screen.until("finished: 50 steps; validation loss 1.5000")
        assert screen.process.wait(20) == 0 and "\x1b" not in text


def test_without_a_terminal_each_look_that_shows_something_new_is_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = WatchedRun(tmp_path)
    looking = Looking(tmp_path)

    class Looks:
        """In place of the event by which it ends: waits 0 s, and changes the run between looks."""

        count = 0

        def is_set(self) -> bool:
            return False

        def wait(self, seconds: float) -> None:
            self.count += 1
            if self.count == 3:
                run.finish()

    now = lines(looking, looking.look(), 5.0, Looks())
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in printed] == [
        "running",
        "finished",
    ] and now.state == "finished"


def test_one_look(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its status says whether the run is well."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)  # a long path would take the line of the state
    WatchedRun(tmp_path / "one")
    file = tmp_path / "now.json"
    assert main(["watch", "one", "--once", "--json", str(file)]) == 0
    assert "running  step 20 of 50" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert found["state"] == "running" and len(found["ranks"]) == 4 and found["estimate"]
    assert found["ranks"][0]["parts"]["exposed"] == pytest.approx(0.05, abs=1e-4)
    run = WatchedRun(tmp_path / "two", alive=False)
    run.end(1, why="ValueError: no such token")
    assert main(["watch", str(tmp_path / "two")]) == 1
    assert capsys.readouterr().out.startswith("died: rank 1 failed with ValueError: no such token")
    run = WatchedRun(tmp_path / "three", quiet=60.0)
    assert main(["watch", "three", "--once"]) == 1 and "stalled" in capsys.readouterr().out


def test_no_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path)]) == 2 and main(["watch", str(tmp_path / "none")]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 and told[0].startswith(
        f"minidist watch: {tmp_path}: nothing of a run is here; name a run "
    )
    assert told[1].startswith(f"minidist watch: {tmp_path}/none: there is no such folder; name ")


def test_a_view_beside_a_training_says_its_lines_and_ends_with_it(tmp_path: Path) -> None:
    run = WatchedRun(tmp_path)
    view = subprocess.Popen(
        [sys.executable, "-m", "minidist", "watch", str(tmp_path), "--beside-train"],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    told, _ = view.communicate("step 10 is saved\n", timeout=30)
    assert (
        view.returncode == 0 and "step 10 is saved\n" in told and "running: step 20 of 50" in told
    )
    assert run.job.size == 4 and watch.EVERY < watch.LINES_EVERY
