"""`minidist storm --compare`: the undisturbed run of a storm, made later; without any training
here."""

import json
import signal
import subprocess
import sys
import time
from argparse import Namespace

import pytest
from leftovers import nothing_left

from minidist.cli import main, storm
from minidist.console import Parser

TOLD = [
    {"event": event, "time": time, "generation": 1, "step": step, "processes": [0, 1]}
    for event, time, step in (
        ("forming", 1.0, 0),
        ("formed", 2.0, 0),
        ("stepped", 2.5, 1),
        ("trained", 10.0, 40),
    )
]
METRICS = {"losses": [2.0, 1.0], "weights_sha256": "abc", "validation_loss": 1.5}


@pytest.fixture
def kept(tmp_path):
    """The folder of a storm of 40 steps in 10 s, without --compare."""
    figures = {
        "happened": [],
        "faults": 1,
        "recovered": 1,
        "steps": 40,
        "save_every": 5,
        "exit_status": 0,
        "seconds": {"kill": [0.4, 0.6, 2.0]},
        "full_seconds": {"kill": [0.5, 0.7, 4.0]},
        "kept": 0.99,
        "participation": 0.97,
        "sizes": [2, 2],
        "work_seconds": 10.0,
        "bits": None,
        "rate": 0.7,
        "arguments": {
            "ranks": 2,
            "minutes": 1.0,
            "every": 10.0,
            "faults": "kill",
            "elastic": None,
            "spares": 1,
            "transport": "shm",
            "seed": 0,
            "options": ["--zero=1"],
        },
    }
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "storm.json").write_text(json.dumps(figures))
    (folder / "metrics.json").write_text(json.dumps(METRICS))
    return folder


def undisturbed(monkeypatch, metrics, status=0):
    """Return what the run without a fault ends with; the commands that were to be run."""
    commands = []

    def run(trainings, name, steps, save_every=0):
        out = trainings.scratch / name
        commands.append(trainings.command(out, steps, save_every))
        out.mkdir()
        (out / "metrics.json").write_text(json.dumps(metrics))
        (out / storm.LOG).write_text("".join(f"{json.dumps(event)}\n" for event in TOLD))
        return status

    monkeypatch.setattr(storm.Trainings, "undisturbed", run)
    return commands


def test_the_undisturbed_run_may_come_later(kept, monkeypatch, capsys, tmp_path):
    commands = undisturbed(monkeypatch, METRICS)
    assert main(["storm", "--compare", str(kept), "--json", str(tmp_path / "figures.json")]) == 0
    words = commands[0]
    told = capsys.readouterr().out
    assert {"-n2", "--transport=shm", "--steps=40", "--save-every=5", "--spares=1", "--zero=1"} <= {
        *words
    }
    for figures in (tmp_path / "figures.json", kept / "storm.json"):
        found = json.loads(figures.read_text())
        assert (found["bits"], found["rate"]) == ("equal", 0.8)  # 8 s of work beside 10
    assert (
        "to the next step that counts: median 0.60 s, at most 2.00 s; to full strength: median "
        "0.70 s, at most 4.00 s"
        in told
        and ", 80% of an undisturbed" in told
        and "have the bits of the undisturbed run" in told
    )


def test_other_bits_and_a_run_that_fails_are_told_by_the_status(kept, monkeypatch, capsys):
    undisturbed(monkeypatch, METRICS | {"weights_sha256": "abd"})
    assert main(["storm", "--compare", str(kept)]) == 1
    assert "DIFFER" in capsys.readouterr().out
    undisturbed(monkeypatch, METRICS, status=3)
    assert main(["storm", "--compare", str(kept)]) == 3


def test_a_folder_without_a_storm_is_refused_in_one_line(tmp_path, capsys):
    assert main(["storm", "--compare", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "no figures of a storm are there" in error and error.count("\n") == 1


def test_a_storm_that_failed_is_not_compared(kept, monkeypatch, capsys):
    commands = undisturbed(monkeypatch, METRICS)
    (kept / "storm.json").write_text(
        json.dumps(json.loads((kept / "storm.json").read_text()) | {"exit_status": 1})
    )
    assert main(["storm", "--compare", str(kept)]) == 2 and commands == []
    assert "ended with status 1, so there is nothing to compare" in capsys.readouterr().err


def test_the_storm_says_what_it_plants_among_the_lines_of_the_training(kept, capfd):
    def said(words):
        trainings = storm.Trainings(Namespace(out=str(kept)), ["kill"], kept)
        trainings.stderr = words
        trainings.tell_planted("rank 1 is killed")
        return capfd.readouterr().err

    assert said(None) == said(2) == "minidist storm: planted: rank 1 is killed\n"


def test_an_undisturbed_run_that_fails_costs_no_figures(tmp_path, monkeypatch):
    """They are written before it, and the pictures come after it."""

    def broken(*_):
        raise OSError("a mistake")

    figures = {"happened": [], "exit_status": 0, "steps": 40}
    monkeypatch.setattr(storm.Trainings, "undisturbed", lambda *_: 0)
    monkeypatch.setattr(storm, "_weather", lambda *_: figures)
    monkeypatch.setattr(storm, "_compare", broken)
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(OSError, match="a mistake"):
        storm.run(
            storm_arguments(
                "--kinds", "kill", "--out", str(run), "--json", str(tmp_path / "figures.json")
            )
        )
    for file in (run / "storm.json", tmp_path / "figures.json"):
        assert json.loads(file.read_text()) == figures


def storm_arguments(*words):
    parser = Parser()
    storm.add_arguments(parser)
    return parser.parse_args(words)


def test_a_storm_over_hosts_is_refused(capsys):
    """It would kill processes of this host that have the numbers of the other's."""
    assert main(["storm", "-n", "2", "--", "--hosts", "a:1,b:1"]) == 2
    assert "kills only processes of this host" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [["--local-steps=10"], ["--strategy=parameter-server", "--asynchronous"]]
)
def test_a_storm_of_a_job_that_is_not_elastic_is_refused(options, capsys):
    assert main(["storm", "-n", "2", "--", *options]) == 2
    error = capsys.readouterr().err
    assert options[-1].partition("=")[0] in error and "elastic" in error
    assert error.count("\n") == 1


@pytest.mark.soak
def test_sigterm_ends_the_training_with_the_storm(tmp_path):
    with nothing_left() as environment:
        run = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "minidist",
                "storm",
                "-n",
                "2",
                "--minutes",
                "2",
                "--out",
                str(tmp_path / "run"),
            ],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 60
        while not (tmp_path / "run" / storm.LOG).exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        run.send_signal(signal.SIGTERM)
        assert run.wait(30) == 128 + signal.SIGTERM
