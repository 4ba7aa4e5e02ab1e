"""metrics.jsonl: small whole lines, also of a writer that is killed; and a disk that takes no
more."""

import json
import os
import resource
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from minidist.observe.step_log import MOST_BYTES, LogFollower, StepLog, StepState, read_step_log

STATE = StepState(
    step=1,
    steps=9,
    loss=2.5,
    seconds=0.125,
    tokens_per_second=2048.0,
    sent_bytes={"dp": {"all_reduce": 123456789}, "control": {"all_reduce": 96}},
    memory={"parameters": 4096, "workspace": 0, "total": 4096},
    joules=1.25,
    energy_source="estimate",
)


def test_a_line_has_what_the_rank_knows() -> None:
    assert json.loads(STATE.line(1700000000.12345)) == {
        "step": 1,
        "steps": 9,
        "time": 1700000000.123,
        "loss": 2.5,
        "seconds": 0.125,
        "tokens_per_second": 2048.0,
        "joules": 1.25,
        "energy_source": "estimate",
        "memory": {"parameters": 4096, "total": 4096},
        "sent_bytes": {"dp": {"all_reduce": 123456789}, "control": {"all_reduce": 96}},
    }


def test_a_line_is_small_and_json_whatever_the_plan() -> None:
    verbs = dict.fromkeys(
        (
            "all_reduce",
            "reduce_scatter",
            "all_gather",
            "all_to_all",
            "broadcast",
            "exchange",
            "send",
        ),
        10**15,
    )
    axes = ("dp", "pp", "ep", "cp", "tp", "dp.shard", "control")
    full = replace(
        STATE,
        step=10**9,
        loss=float("nan"),
        sent_bytes=dict.fromkeys(axes, verbs),
        memory=dict.fromkeys(
            (
                "parameters",
                "gradients",
                "optimizer",
                "activations",
                "communication",
                "workspace",
                "total",
            ),
            10**15,
        ),
    )
    line = full.line(1.7e9)
    assert len(line) <= MOST_BYTES and line.endswith(b"\n")
    values = json.loads(line, parse_constant=pytest.fail)
    assert values["loss"] is None and values["sent_bytes"]["tp"] == 7 * 10**15


@pytest.mark.parametrize("killed_in_a_line", [False, True])
def test_lines_of_a_killed_run_are_whole_and_it_goes_on(
    killed_in_a_line: bool, tmp_path: Path
) -> None:
    file = tmp_path / "metrics.jsonl"
    child = os.fork()
    if child == 0:
        log = StepLog(file, goes_on=False)
        for step in range(1, 6):
            log.write(replace(STATE, step=step).line(0.0))
        if killed_in_a_line:
            log.write(replace(STATE, step=6).line(0.0)[:40])
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert [line["step"] for line in read_step_log(file)] == [1, 2, 3, 4, 5]
    log = StepLog(file, goes_on=True)  # from a checkpoint of step 3
    for step in (4, 5, 6, 7):
        log.write(replace(STATE, step=step, loss=9.0).line(0.0))
    log.close()
    assert [(line["step"], line["loss"]) for line in read_step_log(file)] == [
        (1, 2.5),
        (2, 2.5),
        (3, 2.5),
        (4, 9.0),
        (5, 9.0),
        (6, 9.0),
        (7, 9.0),
    ]


def test_a_new_run_begins_a_new_file_with_its_first_step(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    StepLog(file, goes_on=False).close()
    assert not file.exists()
    for run in range(2):
        log = StepLog(file, goes_on=False)
        log.write(replace(STATE, step=run + 1).line(0.0))
        log.close()
    assert [line["step"] for line in read_step_log(file)] == [2]


def test_a_full_disk_is_one_line_and_the_run_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / "metrics.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    log = StepLog(file, goes_on=False)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        for step in range(1, 20):
            log.write(replace(STATE, step=step).line(0.0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (
        capfd.readouterr().err
        == f"minidist train: {file}: File too large; later steps are not written there\n"
    )
    whole = 1000 // len(STATE.line(0.0))
    assert file.stat().st_size == 1000 and [line["step"] for line in read_step_log(file)] == [
        *range(1, whole + 1)
    ]


def test_a_follower_reads_what_is_new(tmp_path: Path) -> None:
    """Also when a later run has begun the file again, and has written more than the first."""
    file = tmp_path / "metrics.jsonl"
    line = STATE.line(1.0)
    follower = LogFollower(file)
    assert follower.poll() == []
    log = StepLog(file, goes_on=False)
    for step in (1, 2):
        log.write(replace(STATE, step=step).line(1.0))
        assert (
            [values["step"] for values in follower.poll()]
            == [*range(1, step + 1)]
            == [values["step"] for values in read_step_log(file)]
        )
    with file.open("ab") as stream:  # a line that is being written
        stream.write(replace(STATE, step=3).line(1.0)[:50])
    assert len(follower.poll()) == 2
    with file.open("ab") as stream:
        stream.write(replace(STATE, step=3).line(1.0)[50:])
    assert [values["step"] for values in follower.poll()] == [1, 2, 3]
    log.close()
    later = StepLog(file, goes_on=False)
    for step in range(1, 6):
        later.write(replace(STATE, step=step, loss=7.0).line(2.0))
    assert len(line) > 128 and [(values["step"], values["loss"]) for values in follower.poll()] == [
        (step, 7.0) for step in range(1, 6)
    ]
    file.unlink()
    assert follower.poll() == []
