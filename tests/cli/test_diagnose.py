"""`minidist diagnose` on jobs that ran: what it prints, its JSON and its exit status."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from flights import VirtualJob

from minidist.cli import main


@pytest.mark.parametrize("kind", ["ring", "json"])
def test_recorders_and_dumps_are_named_file_by_file(kind, tmp_path, capsys):
    """The temporary folder, where SIGUSR2 writes, also has others' files."""
    job = VirtualJob(tmp_path, 2)
    job.call(0, -12.0, None)
    for rank in range(2):
        with job.at(rank, 0.0):
            job.flights[rank].dump(tmp_path / f"0000{rank}.json")
    (tmp_path / "package.json").write_text("{}")
    files = [str(tmp_path / f"0000{rank}.{kind}") for rank in range(2)]
    assert main(["diagnose", *files]) == 1
    assert (
        "rank 1 has not made call 1 (all_reduce), for which rank 0 waits" in capsys.readouterr().out
    )
    assert main(["diagnose", *files, str(tmp_path / "package.json")]) == 2
    assert "package.json is not a flight recorder's dump" in capsys.readouterr().err


PROGRAM = """
import os, signal, sys, time
import numpy as np
import minidist as md

world, fault = md.init(limit=20), sys.argv[1]
for step in range(12):
    world.tell_step(step)
    time.sleep(0.05 if fault == "slow" and world.rank == 1 else 0.02)
    world.all_reduce(np.ones(100))
    if step == 5 and world.rank == 1:
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "exception":
            raise ValueError("bad batch")
        if fault == "wrong shape":
            world.all_reduce(np.ones(50))
        if fault == "stopped":
            print("stops", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "behind":
            print("sleeps", flush=True)
            time.sleep(60)
    world.all_reduce(np.ones(10))
"""


def start(folder: Path, fault: str) -> "subprocess.Popen[str]":
    (folder / "job.py").write_text(PROGRAM)
    # where others must be told from rank 1
    size = 2 if fault in ("killed", "behind", "stopped") else 3
    command = [
        sys.executable,
        "-m",
        "minidist",
        "launch",
        "-n",
        str(size),
        "--flight",
        "rings",
        "--patience",
        "30",
        "job.py",
        fault,
    ]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def diagnosis(folder: Path, *options: str) -> dict:
    status = main(
        ["diagnose", str(folder / "rings"), "--json", str(folder / "found.json"), *options]
    )
    found = json.loads((folder / "found.json").read_text())
    assert status == (0 if found["healthy"] else 1)
    return found


@pytest.mark.sampled(every=27)
@pytest.mark.parametrize(
    "fault",
    ["killed", "exception", "wrong shape", "none"]
    + [
        pytest.param(fault, marks=pytest.mark.soak, id=f"{fault} {turn}")
        for turn in range(10)
        for fault in ("killed", "exception", "wrong shape", "slow", "none")
    ],
)
def test_a_job_that_ended(fault, tmp_path, capsys):
    run = start(tmp_path, fault)
    run.communicate(timeout=100)
    assert (run.returncode == 0) == (fault in ("none", "slow"))
    found = diagnosis(tmp_path)
    said = capsys.readouterr().out
    if fault == "none":
        assert found["healthy"] and "every rank ended well\nnothing wrong was found" in said
        return
    (finding,) = found["findings"]
    assert (finding["cause"], finding["ranks"]) == (fault, [1])
    assert "job.py:" in finding["where"] and "what to do:" in said and "rank 1" in said
    assert sorted(finding) == [
        "advice",
        "cause",
        "evidence",
        "ranks",
        "steps",
        "sure",
        "what",
        "where",
    ]


@pytest.mark.soak  # the next tests: a job that runs, and a rank that is behind
def test_a_job_that_hangs_is_diagnosed_while_it_runs(tmp_path, capsys):
    run = start(tmp_path, "behind")
    try:
        assert run.stdout.readline() == "sleeps\n"
        time.sleep(1.5)
        (finding,) = diagnosis(tmp_path, "--stuck", "1")["findings"]
    finally:
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=60)
    assert (finding["cause"], finding["ranks"], finding["sure"]) == ("behind", [1], "certain")
    assert finding["where"].endswith("job.py:10"), "its last call"
    assert diagnosis(tmp_path)["findings"][0]["ranks"] == [1], "after it was told to stop, too"


def test_a_stopped_rank_is_diagnosed_while_its_job_runs(tmp_path):
    run = start(tmp_path, "stopped")
    try:
        assert run.stdout.readline() == "stops\n"
        time.sleep(0.3)
        (finding,) = diagnosis(tmp_path)["findings"]
    finally:
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=60)
    assert (finding["cause"], finding["ranks"], finding["sure"]) == ("stopped", [1], "certain")
    assert "kill -CONT" in finding["advice"]


def test_the_table_names_culprit_cause_place_and_how_sure(tmp_path, capsys):
    job = VirtualJob(tmp_path, 4, alive=True)
    for rank in (0, 1, 3):
        job.call(rank, -1800.0, None)
    assert main(["diagnose", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "culprit" in said and "rank 2" in said and "behind" in said and "30 min" in said
    assert os.linesep in said


def test_a_folder_without_recorders_is_one_line(tmp_path, capsys):
    for place in (tmp_path, tmp_path / "none"):
        assert main(["diagnose", str(place)]) == 2
        captured = capsys.readouterr()
        assert (
            captured.out == ""
            and captured.err.startswith("minidist diagnose: ")
            and captured.err.count("\n") == 1
        )
