"""A job on two hosts, as network namespaces joined by a link of 200 Mbit/s: how it meets, what goes
over the link."""

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest
from jobs import JOB, finish, start, torchrun
from leftovers import nothing_left

from minidist.errors import LaunchError
from minidist.lessons import namespaces
from minidist.lessons.namespaces import joined_hosts

HOSTS_JOB = str(Path(__file__).parents[1] / "support" / "hosts_job.py")
PORT = "29500"  # of a namespace of our own
WHO = r"rank 2 \(process \d+ on minidist-\w+-1\)"


@pytest.fixture(scope="module")
def hosts():
    why = namespaces.missing()
    if why is not None:
        pytest.skip(why)
    try:
        with joined_hosts("200mbit") as both:
            yield both
    except LaunchError as error:
        pytest.skip(str(error))


def launch(environment, hosts, *program):
    """`minidist launch --nnodes 2` on each host, two ranks each; the second host first."""
    return [
        start(
            [
                *hosts[rank].enter,
                sys.executable,
                "-m",
                "minidist",
                "launch",
                "-n",
                "2",
                "--nnodes",
                "2",
                "--node-rank",
                str(rank),
                "--master-addr",
                hosts[0].address,
                "--master-port",
                PORT,
                *program,
            ],
            environment,
            MINIDIST_TOKEN="s" * 32,
        )
        for rank in (1, 0)
    ]


def ended(nodes):
    """How the launcher of the first host ended, and that of the second."""
    return [finish(node) for node in reversed(nodes)]


@pytest.mark.soak
def test_two_hosts_meet_and_only_leaders_use_the_link_between(hosts):
    with nothing_left() as environment:
        done = ended(launch(environment, hosts, HOSTS_JOB))
    assert [node.returncode for node in done] == [0, 0], done
    told = json.loads(done[0].stdout)
    assert told["nodes"] == [0, 0, 2, 2]
    # whatever their launchers count them to: unix sockets do not reach
    assert told["systems"] == [0, 0, 2, 2]
    assert told["links"] == ["ShmLink", "TcpLink", "TcpLink"]
    assert told["boards"] == [False, True, False]  # world, inside, across
    assert told["auto"] == "hierarchical"
    assert told["listens"] == [hosts[0].address, hosts[1].address]
    # test_04_topology.py (soak) has which is faster
    assert all(seconds > 0 for seconds in told["seconds"].values())


@pytest.mark.soak  # tests/comm/health/test_node_agent.py has these without namespaces for every run
@pytest.mark.parametrize(
    ("mode", "how"),
    [
        ("kill", "was killed by SIGKILL"),
        ("_exit", "exited with status 3 without goodbye"),
        ("stop", r"is frozen \(stopped\)"),
        ("stop all", r"is frozen \(stopped\)"),
        ("raise", "failed with ValueError: boom"),
    ],
)
def test_a_rank_of_the_other_host_that_dies_is_named_on_both(hosts, mode, how):
    with nothing_left() as environment:
        started = time.monotonic()
        done = ended(launch(environment, hosts, JOB, mode))
    assert time.monotonic() - started < 10
    assert all(node.returncode for node in done), done
    said = done[0].stderr + done[1].stderr
    if mode == "kill":
        for node in done:
            assert re.search(rf"^minidist: {WHO} {how}; the job ends$", node.stderr, re.M), (
                node.stderr
            )
    for rank in (0, 1) if mode == "stop all" else (0, 1, 3):
        assert re.search(rf"minidist: rank {rank} stops: PeerLostError: {WHO} {how}", said), said


@pytest.mark.soak
def test_under_torchrun_the_first_rank_of_a_host_starts_its_agent(hosts):
    """Ranks 0 and 1 on the first host, rank 2 alone on the second, where it stops."""
    with nothing_left() as environment:
        ranks = [
            start(
                [
                    *hosts[rank // 2].enter,
                    "sh",
                    "-c",
                    '"$0" "$@"; exit $?',
                    sys.executable,
                    JOB,
                    "stop",
                ],
                environment,
                MINIDIST_TOKEN="s" * 32,
                **{
                    **torchrun(rank, port=PORT),
                    "LOCAL_RANK": "0",
                    "LOCAL_WORLD_SIZE": "1",
                    "GROUP_RANK": str(rank),
                    "MASTER_ADDR": hosts[0].address,
                },
            )
            for rank in range(3)
        ]
        done = [finish(rank) for rank in ranks]
    assert [rank.returncode for rank in done] == [1, 1, 137], done
    for rank in (0, 1):
        assert re.search(
            rf"rank {rank} stops: PeerLostError: {WHO} is frozen \(stopped\)", done[rank].stderr
        ), done


@pytest.mark.soak
def test_a_rank_that_holds_its_interpreter_for_longer_than_a_host_may_be_silent_is_not_lost(hosts):
    with nothing_left() as environment:
        done = ended(launch(environment, hosts, JOB, "hold"))
    assert [(node.returncode, node.stderr) for node in done] == [(0, "")] * 2, done


@pytest.mark.soak
@pytest.mark.parametrize("what", ["link", "launcher"])
def test_a_host_that_is_lost_is_named_with_its_ranks(hosts, what):
    with nothing_left() as environment:
        nodes = launch(environment, hosts, JOB, "cut")
        for node in nodes:
            for _ in range(2):
                node.stdout.readline()  # they have met
        started = time.monotonic()
        if what == "link":
            hosts[1].cut()
        else:
            nodes[0].kill()
        try:
            done = ended(nodes)
        finally:
            hosts[1].mend()
    # 5 s of silence, and the time to end
    assert time.monotonic() - started < (8 if what == "link" else 3)
    how = {
        "link": r"it sent nothing for 5 s",
        "launcher": r"its node agent \(process \d+\) is gone \(.*\)",
    }[what]
    for rank in (0, 1):
        line = rf"rank {rank} stops: PeerLostError: {WHO} is out of reach with its whole host \(ranks 2, 3\): {how}"
        assert re.search(line, done[0].stderr), done[0].stderr
    if what == "link":
        assert re.search(
            r"PeerLostError: rank 3 .* lost its connection to the job's monitor", done[1].stderr
        )


def test_nothing_of_two_hosts_is_left():
    if namespaces.missing() is not None:
        pytest.skip(namespaces.missing())
    before = set(os.listdir("/run/netns")) if Path("/run/netns").is_dir() else set()
    with pytest.raises(LaunchError, match="tc -n .* rate fast .* says "), joined_hosts("fast"):
        pass
    assert set(os.listdir("/run/netns")) == before


def test_why_this_machine_cannot(monkeypatch):
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: None)
    assert namespaces.missing() == "ip and tc and unshare of iproute2 and util-linux not installed"
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    with (
        pytest.raises(
            LaunchError, match="no two hosts on this machine: network namespaces are made by root"
        ),
        joined_hosts("1gbit"),
    ):
        pass
