"""An elastic training over two hosts: a rank on the other host is killed, the whole host, its
cable; the bits stay.

pytest -m cluster tests/clusters/test_elastic_hosts.py          # needs openssh-server
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from clusters import hosts_up
from jobs import finish, start
from leftovers import nothing_left

LIMIT = 120
WORDS = [
    "-m",
    "minidist",
    "train",
    "--quiet",
    "--elastic=4:4",
    "--spares=1",
    "--max-restarts=8",
    "--elastic-wait=60",
    "--zero=1",
    "--layers=1",
    "--width=16",
    "--heads=2",
    "--context=8",
    "--batch=8",
    "--dtype=float64",
    "--steps=400",
    "--transport=tcp",
]

pytestmark = pytest.mark.cluster


@pytest.fixture
def hosts():
    """Two hosts, of this test alone: it may break one."""
    if not Path("/usr/sbin/sshd").exists():
        pytest.skip("--hosts reaches other hosts by ssh: `apt-get install openssh-server`")
    with hosts_up("a", "b", options=["--sshd"]) as cluster:
        yield cluster


def events(run):
    log = run / "elastic.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def train(cluster, run, disturb=None):
    """The training on a, with ranks on a and b. disturb(job's first generation): once 20 steps are
    made."""
    words = cluster.on(
        "a", sys.executable, *WORDS, "--hosts=a:2,b:2", f"--ssh={cluster.ssh}", f"--out={run}"
    )
    with nothing_left() as environment:
        job = start(words, environment)
        while (
            disturb
            and job.poll() is None
            and not any(e["event"] == "at" and e["step"] >= 20 for e in events(run))
        ):
            time.sleep(0.05)
        if disturb:
            disturb(events(run)[0])
        done = finish(job, LIMIT)
    assert done.returncode == 0, done
    return json.loads((run / "metrics.json").read_text()), done.stderr


def same(one, other):
    return [one[key] for key in ("losses", "weights_sha256")] == [
        other[key] for key in ("losses", "weights_sha256")
    ]


def test_a_killed_rank_and_a_lost_host_change_no_bit(hosts, tmp_path):
    calm, _ = train(hosts, tmp_path / "calm")
    assert [one["hosts"] for one in calm["elastic"]] == [["a", "a", "b", "b"]]

    def kill(first):
        assert first["hosts"][3] == "b"
        hosts.ask("b", "kill", "-KILL", str(first["pids"][3]))

    killed, said = train(hosts, tmp_path / "killed", kill)
    assert "on b) was killed by SIGKILL" in said
    second = killed["elastic"][1]
    assert (second["size"], second["processes"][:3], second["lost"][0]["rank"]) == (
        4,
        [0, 1, 2],
        3,
    ), second
    assert second["seconds"] < 5 and same(killed, calm)

    lost, said = train(
        hosts, tmp_path / "lost", lambda first: os.kill(hosts.pid("b"), signal.SIGKILL)
    )
    assert "minidist: host b is lost (" in said
    last = lost["elastic"][-1]
    assert (last["size"], last["hosts"], last["processes"][:2]) == (4, ["a"] * 4, [0, 1]), last
    assert last["seconds"] < 30 and same(lost, calm)


def test_a_host_behind_a_broken_cable_is_lost_after_seconds_of_silence(hosts, tmp_path):
    """Nothing says that it is gone. It ends its processes, which would else go on without the
    others."""
    switch = (hosts.folder / "switch.pid").read_text().strip()
    before = {line for line in hosts.processes() if line.startswith("b ")}

    def pull(first):
        subprocess.run(
            ["nsenter", "-t", switch, "-n", "ip", "link", "set", "port2", "down"], check=True
        )

    calm, _ = train(hosts, tmp_path / "calm")
    cut, said = train(hosts, tmp_path / "cut", pull)
    assert "minidist: host b is lost (" in said
    last = cut["elastic"][-1]
    assert (
        (last["size"], last["hosts"]) == (4, ["a"] * 4) and last["seconds"] < 30 and same(cut, calm)
    )
    deadline = time.monotonic() + 60
    while (
        left := {line for line in hosts.processes() if line.startswith("b ") and "minidist" in line}
        - before
    ) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == set()
