"""Elastic jobs: ranks are killed, and the losses are those of a training without them, or with its
changes of plan."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from elastic_rank import replay
from jobs import finish, start
from leftovers import nothing_left

from minidist.launch.elastic_job import spawn_elastic
from minidist.launch.generation import Elastic
from minidist.launch.template import FORK_LIMIT, Template

RANK = str(Path(__file__).parents[1] / "support" / "elastic_rank.py")


def test_what_a_step_and_a_save_load_at_their_first_use_is_there_before_a_fork():
    """Else each of eight ranks loads it, while all wait: numpy.ma, for a median, takes 10 ms."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            """
import sys
import numpy as np
from minidist.launch.generations import warm_up
from minidist.survive.elastic import rehearse
rehearse()
warm_up("tcp")
before = set(sys.modules)
np.median([0.5]), "127.0.0.1".encode("idna")
print(sorted(set(sys.modules) - before))
""",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"


def run_job(folder, elastic, **settings):
    """The result that rank 0 wrote, and the events; the status must be 0."""
    with nothing_left():
        status = spawn_elastic(
            [sys.executable, RANK, str(folder), json.dumps(settings)],
            elastic,
            record=folder / "elastic.jsonl",
            forks=True,
        )
    assert status == 0
    return (
        json.loads((folder / "result.json").read_text()),
        [json.loads(line) for line in (folder / "elastic.jsonl").read_text().splitlines()],
    )


def check(folder, settings, result, sizes):
    """The job had generations of these sizes, and is the replay of its changes, bit for bit."""
    told = result["elastic"]
    assert [generation["size"] for generation in told] == sizes
    losses, digest = replay(folder, settings, [(one["size"], one["step"]) for one in told])
    assert (result["losses"], result["sha256"]) == (losses, digest)


@pytest.fixture
def late_fork(monkeypatch, tmp_path):
    """A replacement is forked when generation 2 has made a step: the ranks that are left do not
    wait for the fork."""
    fork = Template.fork
    record = tmp_path / "elastic.jsonl"
    waited = []

    def fork_late(template, number, variables):
        deadline = time.monotonic() + FORK_LIMIT
        while record.exists() and not has_stepped(record, 2) and time.monotonic() < deadline:
            time.sleep(0.005)
        if record.exists():
            waited.append(time.monotonic() < deadline)
        return fork(template, number, variables)

    monkeypatch.setattr(Template, "fork", fork_late)
    yield
    assert waited == [True]


def has_stepped(record, generation):
    """Return whether the launcher's record has a step of this generation."""
    events = [json.loads(line) for line in record.read_text().splitlines()]
    return any(
        (event["event"], event.get("generation")) == ("stepped", generation) for event in events
    )


def test_a_spare_takes_the_place_of_a_killed_rank(tmp_path, capfd):
    """Under ZeRO only the partner has the lost shards. The bits are those of a training that
    nothing disturbs."""
    settings = {"zero": 1, "steps": 8, "deaths": {"1": (3, "within")}}
    elastic = Elastic((3,), spares=1)
    result, _ = run_job(tmp_path, elastic, **settings)
    assert [one["size"] for one in result["elastic"]] == [3, 3]
    assert replay(tmp_path, settings, [(3, 0)]) == (result["losses"], result["sha256"])
    second = result["elastic"][1]
    assert (second["step"], len(second["joined"]), second["lost"][0]["how"]) == (
        3,
        1,
        "was killed by SIGKILL",
    )
    assert "was killed by SIGKILL" in capfd.readouterr().err


@pytest.mark.soak
def test_a_job_shrinks_and_grows_again(tmp_path, late_fork):
    """The ranks that are left go on at once; when the replacement has started, all stop after the
    same step."""
    settings = {"steps": 9, "wait": 6, "deaths": {"0": (4, "before")}}
    result, events = run_job(tmp_path, Elastic((3, 4), restarts=1), **settings)
    check(tmp_path, settings, result, [4, 3, 4])
    left = next(event for event in events if event["event"] == "left")
    # the step that rank 0 named was made, and not again
    assert left["step"] == result["elastic"][2]["step"] > 4
    assert [event["event"] for event in events if event["event"] != "at"] == [
        "forming",
        "formed",
        "stepped",
        "broken",
        "reached",
        "forming",
        "formed",
        "stepped",
        "left",
        "reached",
        "forming",
        "formed",
        "stepped",
        "done",
        "end",
    ]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("seconds", "limit", "ended"), [(12.0, None, "left"), (3.0, 1.5, "broken")]
)
def test_a_rank_that_agrees_late(seconds, limit, ended, tmp_path, late_fork):
    """Rank 0 does not go on past the step that others stop after: it waits, or the generation
    breaks."""
    settings = {
        "steps": 24,
        "wait": 14,
        "deaths": {"1": (7, "before")},
        "agree": {"2": seconds},
        **({"agree_limit": limit} if limit else {}),
    }
    result, events = run_job(tmp_path, Elastic((2, 3), restarts=1), **settings)
    assert [one["size"] for one in result["elastic"]] == [3, 2, 3]
    assert [event["event"] for event in events if event["event"] in ("left", "broken")] == [
        "broken",
        ended,
    ]


@pytest.mark.soak
def test_a_template_that_hangs_delays_no_rank(tmp_path, monkeypatch):
    """Its fork is given up after FORK_LIMIT s. Meanwhile the ranks that are left go on; then a
    process is started."""
    fork = Template.fork
    record = tmp_path / "elastic.jsonl"
    stopped = []

    def stop_first(template, number, variables):
        if record.exists() and not stopped:
            stopped.append(time.time())
            os.kill(template.pid, signal.SIGSTOP)
        return fork(template, number, variables)

    monkeypatch.setattr(Template, "fork", stop_first)
    settings = {"steps": 24, "wait": 14, "deaths": {"1": (7, "before")}}
    result, events = run_job(tmp_path, Elastic((2, 3), restarts=1), **settings)
    assert [one["size"] for one in result["elastic"]] == [3, 2, 3]
    formed = [event["time"] - stopped[0] for event in events if event["event"] == "forming"]
    assert formed[1] < FORK_LIMIT / 2 and formed[2] > FORK_LIMIT


CASES = {
    "with the update half sent": {"zero": 2, "deaths": {"2": (5, "within")}},
    "while copies are sent": {"zero": 3, "deaths": {"2": (5, "copying")}},
    "over tcp": {"zero": 1, "transport": "tcp", "deaths": {"0": (2, "within")}},
    "tensor parallel": {"plan": {"tp": 2}, "zero": 1, "deaths": {"3": (4, "within")}},
    "a pipeline": {"plan": {"pp": 2}, "deaths": {"0": (4, "within")}},
    "tensor parallel alone": {"plan": {"tp": 4}, "deaths": {"1": (3, "copying")}},
    "stopped": {"zero": 1, "deaths": {"1": (3, "stop")}},
    "the replacement, too": {"zero": 1, "deaths": {"1": (3, "before"), "4": (0, "joining")}},
    "one after another": {
        "zero": 1,
        "deaths": {"1": (3, "before"), "2": (4, "within"), "4": (5, "copying")},
    },
    "a connection cut over tcp": {"zero": 1, "transport": "tcp", "deaths": {"1": (3, "cut")}},
    "its monitor out of reach": {"zero": 1, "deaths": {"1": (3, "deaf")}},
    "two at once": {"zero": 1, "deaths": {"0": (3, "before"), "2": (3, "before")}},
}


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES)
def test_any_death(case, tmp_path):
    """However ranks die: with spares the bits are those of a training that nothing disturbs."""
    settings = {"steps": 8, **CASES[case]}
    result, _ = run_job(tmp_path, Elastic((4,), restarts=4, spares=1, wait=60.0), **settings)
    assert len(result["elastic"]) > 1
    assert replay(tmp_path, settings, [(4, 0)]) == (result["losses"], result["sha256"])


@pytest.mark.soak
def test_a_job_that_cannot_go_on_says_why(tmp_path, capfd):
    """The rank and its partner are lost, and with them the only copies of a part of the state."""
    settings = {"zero": 1, "steps": 8, "deaths": {"1": (3, "before"), "2": (3, "before")}}
    with nothing_left():
        status = spawn_elastic(
            [sys.executable, RANK, str(tmp_path), json.dumps(settings)], Elastic((1, 2, 3))
        )
    assert status == 1
    assert (
        "minidist: ranks were lost with the only copies of their state, and there is no "
        "checkpoint; the job ends" in capfd.readouterr().err.splitlines()
    )
    status = spawn_elastic(
        [sys.executable, RANK, str(tmp_path), json.dumps(settings)], Elastic((2, 3))
    )
    assert (status, "1 processes are left, and the job needs 2" in capfd.readouterr().err) == (
        1,
        True,
    )


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_is_told_to_stop_or_killed(number, tmp_path):
    """No process of the job stays."""
    script = (
        "import sys; from pathlib import Path; from minidist.launch.elastic_job import "
        "spawn_elastic; from minidist.launch.generation import Elastic; "
        "sys.exit(spawn_elastic(sys.argv[2:], Elastic((2, 3), spares=1), "
        "record=Path(sys.argv[1])))"
    )
    settings = json.dumps({"steps": 10**6, "deaths": {}})
    with nothing_left() as environment:
        log = tmp_path / "log"
        job = start(
            [sys.executable, "-c", script, str(log), sys.executable, RANK, str(tmp_path), settings],
            environment,
        )
        while not log.exists() or "stepped" not in log.read_text():
            time.sleep(0.05)
        job.send_signal(number)
        done = finish(job)
    assert done.returncode == (128 + number if number == signal.SIGTERM else -number)
    assert "Traceback" not in done.stderr
    if number == signal.SIGTERM:
        assert "was told to stop by SIGTERM; its 4 processes ended" in done.stderr


def test_a_process_that_is_stopped_at_its_start_is_killed(capfd):
    """It would be waited for for START_LIMIT s."""
    stops = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"]
    with nothing_left():
        assert spawn_elastic(stops, Elastic((1,)), patience=0.3) == 1
    assert re.search(
        r"minidist: process 0 \(process \d+\) was frozen \(stopped\) at its start, and is killed\n"
        "minidist: 0 processes are left",
        capfd.readouterr().err,
    )
