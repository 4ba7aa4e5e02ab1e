"""Elastic jobs: ranks are killed, and the losses are those of a training without them, or with its changes of plan."""

import json
import signal
import sys
import time
from pathlib import Path

import pytest
from elastic_rank import replay
from jobs import finish, start
from leftovers import nothing_left

from minidist.launch.elastic_job import spawn_elastic
from minidist.launch.generation import Elastic

RANK = str(Path(__file__).parents[1] / "support" / "elastic_rank.py")


def run_job(folder, elastic, **settings):
    """The result that rank 0 wrote, and the events; the status must be 0."""
    with nothing_left():
        status = spawn_elastic([sys.executable, RANK, str(folder), json.dumps(settings)], elastic,
                               record=folder / "elastic.jsonl")
    assert status == 0
    return (json.loads((folder / "result.json").read_text()),
            [json.loads(line) for line in (folder / "elastic.jsonl").read_text().splitlines()])


def check(folder, settings, result, sizes):
    """The job had generations of these sizes, and is the replay of its changes, bit for bit."""
    told = result["elastic"]
    assert [generation["size"] for generation in told] == sizes
    losses, digest = replay(folder, settings, [(one["size"], one["step"]) for one in told])
    assert (result["losses"], result["sha256"]) == (losses, digest)


def test_a_spare_takes_the_place_of_a_killed_rank(tmp_path, capfd):
    """Under ZeRO only the partner has the lost shards. The bits are those of a training that nothing disturbs."""
    settings = {"zero": 1, "steps": 8, "deaths": {"1": (3, "within")}}
    elastic = Elastic((3,), spares=1)
    result, _ = run_job(tmp_path, elastic, **settings)
    assert [one["size"] for one in result["elastic"]] == [3, 3]
    assert replay(tmp_path, settings, [(3, 0)]) == (result["losses"], result["sha256"])
    second = result["elastic"][1]
    assert (second["step"], len(second["joined"]), second["lost"][0]["how"]) == (3, 1, "was killed by SIGKILL")
    assert "was killed by SIGKILL" in capfd.readouterr().err


def test_a_job_shrinks_and_grows_again(tmp_path):
    """The ranks that are left go on at once; when the replacement has started, all stop after the same step."""
    settings = {"steps": 9, "wait": 6, "deaths": {"0": (4, "before")}}
    result, events = run_job(tmp_path, Elastic((3, 4), restarts=1), **settings)
    check(tmp_path, settings, result, [4, 3, 4])
    left = next(event for event in events if event["event"] == "left")
    assert left["step"] == result["elastic"][2]["step"] >= 7    # the step that rank 0 named was made, and not again
    assert [event["event"] for event in events if event["event"] != "at"] == [
        "forming", "formed", "stepped", "broken", "reached", "forming", "formed", "stepped", "left", "reached",
        "forming", "formed", "stepped", "done", "end"]


CASES = {
    "with the update half sent": {"zero": 2, "deaths": {"2": (5, "within")}},
    "while copies are sent": {"zero": 3, "deaths": {"2": (5, "copying")}},
    "over tcp": {"zero": 1, "transport": "tcp", "deaths": {"0": (2, "within")}},
    "tensor parallel": {"plan": {"tp": 2}, "zero": 1, "deaths": {"3": (4, "within")}},
    "a pipeline": {"plan": {"pp": 2}, "deaths": {"0": (4, "within")}},
    "tensor parallel alone": {"plan": {"tp": 4}, "deaths": {"1": (3, "copying")}},
    "stopped": {"zero": 1, "deaths": {"1": (3, "stop")}},
    "the replacement, too": {"zero": 1, "deaths": {"1": (3, "before"), "4": (0, "joining")}},
    "one after another": {"zero": 1, "deaths": {"1": (3, "before"), "2": (4, "within"), "4": (5, "copying")}},
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
        status = spawn_elastic([sys.executable, RANK, str(tmp_path), json.dumps(settings)], Elastic((1, 2, 3)))
    assert status == 1
    assert "minidist: ranks were lost with the only copies of their state, and there is no checkpoint; " \
        "the job ends" in capfd.readouterr().err.splitlines()
    status = spawn_elastic([sys.executable, RANK, str(tmp_path), json.dumps(settings)], Elastic((2, 3)))
    assert (status, "1 processes are left, and the job needs 2" in capfd.readouterr().err) == (1, True)


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_is_told_to_stop_or_killed(number, tmp_path):
    """No process of the job stays."""
    script = ("import sys; from pathlib import Path; from minidist.launch.elastic_job import spawn_elastic; "
              "from minidist.launch.generation import Elastic; "
              "sys.exit(spawn_elastic(sys.argv[2:], Elastic((2, 3), spares=1), record=Path(sys.argv[1])))")
    settings = json.dumps({"steps": 10**6, "deaths": {}})
    with nothing_left() as environment:
        log = tmp_path / "log"
        job = start([sys.executable, "-c", script, str(log), sys.executable, RANK, str(tmp_path), settings],
                    environment)
        while not log.exists() or "stepped" not in log.read_text():
            time.sleep(0.05)
        job.send_signal(number)
        done = finish(job)
    assert done.returncode == (128 + number if number == signal.SIGTERM else -number)
    assert "Traceback" not in done.stderr
    if number == signal.SIGTERM:
        assert "was told to stop by SIGTERM; its 4 processes ended" in done.stderr
