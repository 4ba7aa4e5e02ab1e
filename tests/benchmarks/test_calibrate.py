"""minidist bench calibrate: a profile that jobs use."""

import json
import subprocess
import sys

import pytest

import minidist as md
from minidist.bench import call_cost
from minidist.bench.calibrate import Fitted
from minidist.cli import main
from minidist.comm.cost.link_model import (
    ComputationCost,
    LinkCost,
    LinkWork,
    Profile,
    load_profile,
    save_profile,
)
from minidist.observe.machine import machine


@pytest.mark.soak
def test_calibrate_in_a_job_measures_the_link_of_that_job(tmp_path):
    """Rank 0 writes it beside what is there; a profile that cannot be read is replaced."""
    file = tmp_path / "profile.json"
    save_profile(
        Profile(
            [LinkCost("tcp", 2, 1e-6, 0, 0, 0, 0), LinkCost("shm", 2, 7.0, 0, 0, 0, 0)], machine()
        ),
        file,
    )
    job = subprocess.run(
        [
            sys.executable,
            "-m",
            "minidist",
            "launch",
            "-n",
            "2",
            "-m",
            "minidist",
            "bench",
            "calibrate",
            "--sizes",
            "256B,64KiB",
            "--rounds",
            "1",
            "--out",
            str(file),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert job.stdout.count("worst misfit") == 1
    links = {cost.link: cost for cost in load_profile(file).links}
    assert set(links) == {"shm", "tcp"}
    assert links["tcp"].alpha == 1e-6
    assert 0 < links["shm"].alpha < 7  # a job on sockets shares memory inside the host
    assert Profile([links["shm"]], {"processor": "abacus"}).beside(file).links == [links["shm"]]
    file.write_text("torn")
    assert Profile([links["shm"]], {}).beside(file).links == [links["shm"]]


def test_a_profile_that_misses_says_so(tmp_path, monkeypatch, capsys):
    """One of two links is missed by twice its time, and computation by 60 %."""
    good = LinkCost("threads", 2, 1e-6, 0, 0, 0, 0.5)
    bad = LinkCost("shm", 2, 1e-6, 0, 0, 0, 1.99)
    computation = ComputationCost(
        2, {"float32": 1e9, "float64": 1e9}, 1.0, 1e-6, 1e9, 1e6, 2.0, 0.6
    )
    monkeypatch.setattr(
        "minidist.bench.calibrate.measure_all", lambda *args: [Fitted(good, []), Fitted(bad, [])]
    )
    monkeypatch.setattr("minidist.bench.computation.measure_all", lambda *args: [computation])
    file = tmp_path / "calibrate.json"
    out = tmp_path / "profile.json"
    assert main(["bench", "calibrate", "--out", str(out), "--json", str(file)]) == 0
    misses = ["shm among 2 ranks by 199%", "computation of 2 at once by 60%"]
    assert json.loads(file.read_text())["misses"] == misses and load_profile(out).misses() == misses
    assert (
        f"the profile misses a measured time: {', '.join(misses)}. What is predicted"
        in capsys.readouterr().out
    )
    monkeypatch.setattr("minidist.bench.calibrate.measure_all", lambda *args: [Fitted(good, [])])
    assert (
        main(["bench", "calibrate", "--out", str(tmp_path / "other.json"), "--only", "threads"])
        == 0
    )
    assert "misses a measured" not in capsys.readouterr().out


def test_calibrate_leaves_a_profile_that_jobs_use(tmp_path, monkeypatch, capsys):
    """Measure only training steps with data parallelism: without the figures of computation,
    nothing uses them."""
    monkeypatch.setattr(call_cost, "kinds", lambda ranks: ("dp",))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file = tmp_path / "calibrate.json"
    picture = tmp_path / "fit.png"
    assert (
        main(
            [
                "bench",
                "calibrate",
                "--only",
                "threads",
                "-n",
                "2",
                "--sizes",
                "256B,64KiB",
                "--rounds",
                "1",
                "--json",
                str(file),
                "--figure",
                str(picture),
            ]
        )
        == 0
    )
    result = json.loads(file.read_text())
    profile = load_profile()
    assert profile.as_json()["links"] == result["links"]
    assert [(cost.link, cost.ranks) for cost in profile.links] == [("threads", 2)]
    # noise may make any one number 0
    assert all(cost.seconds(LinkWork(1, 1, 256, 0)) > 0 for cost in profile.links)
    # two sizes, each thrice, and the burst
    assert [len(samples) for samples in result["samples"]] == [7]
    assert str(tmp_path / "minidist" / "profile.json") in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert md.run(lambda world: world.link.link, size=2, transport="threads") == [
        "threads",
        "threads",
    ]
