"""The flight recorders of a training: which stay when it has ended, and what a killed rank leaves
to diagnose."""

import errno
import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from flights import VirtualJob

from minidist.cli import main
from minidist.cli.train.rings import drop_rings, keep_ring
from minidist.comm.flight import recorder
from minidist.comm.flight.recorder import FlightRecorder
from minidist.comm.flight.slots import read_ring

TINY = ["--layers", "1", "--width", "16", "--heads", "2", "--context", "8", "--batch", "4"]


@pytest.mark.parametrize(
    ("status", "age", "stays"),
    [
        (2, 0.0, False),
        (143, 0.0, False),
        (130, 0.0, False),
        (143, 60.0, True),
        (1, 0.0, True),
        (137, 0.0, True),
        (75, 0.0, True),
        (0, 0.0, True),
    ],
)
def test_rings_that_tell_nothing_go(status, age, stays, tmp_path):
    """Those of bad input, and of a job that was going when it was told to stop; not those of one
    that stood still."""
    job = VirtualJob(tmp_path / "flight", 2)
    job.call(0, -age - 1.0, -age)
    drop_rings(tmp_path, status)
    assert (tmp_path / "flight").exists() == stays


@pytest.mark.parametrize(
    ("error", "lines"), [(errno.ENOSPC, 0), (errno.EROFS, 1)], ids=["full disk", "read-only"]
)
def test_a_training_goes_on_where_no_ring_can_be_kept(error, lines, tmp_path, monkeypatch, capfd):
    """A full disk is told by the files of the run itself."""

    def refuse(*_):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(recorder, "reserve", refuse)
    world = SimpleNamespace(
        ledger=SimpleNamespace(flight=FlightRecorder(0)),
        world_rank=0,
        size=1,
        transport=SimpleNamespace(inside=None),
    )
    keep_ring(tmp_path, world)
    assert capfd.readouterr().err.count("\n") == lines
    assert os.listdir(tmp_path) == []


def test_a_file_that_another_process_has_mapped_is_replaced(tmp_path):
    """Writing it over would kill that process (SIGBUS) as the file became shorter."""
    first = FlightRecorder(0)
    second = FlightRecorder(0)
    first.keep_in(tmp_path / "ring")
    second.keep_in(tmp_path / "ring")
    second.start_step(5)
    first.start_step(1)
    assert [entry["step"] for entry in first.entries()] == [1]
    assert [entry["step"] for entry in read_ring(tmp_path / "ring")[1]] == [5]


# tests/cli/test_diagnose.py kills a rank; test_command.py looks for the rings of a training
@pytest.mark.soak
def test_a_killed_rank_of_a_training_is_diagnosed(tmp_path, capsys):
    book = tmp_path / "book.txt"
    book.write_text("to be or not to be, that is the question\n" * 50)
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "minidist",
            "train",
            "-n",
            "2",
            *TINY,
            "--steps",
            "100000",
            "--data",
            str(book),
            "--out",
            str(tmp_path / "run"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        assert next(line for line in run.stdout if line.startswith("step "))
        os.kill(read_ring(tmp_path / "run" / "flight" / "00001.ring")[0]["pid"], signal.SIGKILL)
        run.communicate(timeout=60)
    assert run.returncode == 137
    assert main(["diagnose", str(tmp_path / "run"), "--json", str(tmp_path / "found.json")]) == 1
    (finding,) = json.loads((tmp_path / "found.json").read_text())["findings"]
    assert (finding["cause"], finding["ranks"], finding["sure"]) == ("killed", [1], "certain")
