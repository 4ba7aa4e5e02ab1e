"""A job on two hosts, as network namespaces joined by a link of 200 Mbit/s: how it meets, what goes over the link."""

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest
from jobs import JOB, finish, start
from leftovers import nothing_left

from minidist.errors import LaunchError
from minidist.launch import namespaces
from minidist.launch.namespaces import joined_hosts

HOSTS_JOB = str(Path(__file__).parent / "hosts_job.py")
PORT = "29500"      # of a namespace of our own


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


def launched(environment, hosts, *program):
    """`minidist launch --nnodes 2` on each host, two ranks each; the second host first."""
    nodes = [start([*hosts[rank].enter, sys.executable, "-m", "minidist", "launch", "-n", "2", "--nnodes", "2",
                    "--node-rank", str(rank), "--master-addr", hosts[0].address, "--master-port", PORT, *program],
                   environment, MINIDIST_TOKEN="s" * 32) for rank in (1, 0)]
    return [finish(node) for node in reversed(nodes)]


def test_two_hosts_meet_and_only_leaders_use_the_link_between(hosts):
    with nothing_left() as environment:
        done = launched(environment, hosts, HOSTS_JOB)
    assert [node.returncode for node in done] == [0, 0], done
    told = json.loads(done[0].stdout)
    assert told["nodes"] == [0, 0, 2, 2]
    assert told["systems"] == [0, 0, 2, 2]          # whatever their launchers count them to: unix sockets do not reach
    assert told["links"] == ["ShmLink", "SocketLink", "SocketLink"]
    assert told["boards"] == [False, True, False]                           # world, inside, across
    assert told["auto"] == "hierarchical"
    assert told["listens"] == [hosts[0].address, hosts[1].address]
    assert told["seconds"]["hierarchical"] < 0.85 * told["seconds"]["ring"], told["seconds"]    # 2/3 of its bytes cross


@pytest.mark.soak       # tests/comm/transports/test_processes.py has a kill across nodes for every run
@pytest.mark.parametrize(("mode", "how"), [("kill", "ended without a word"), ("stop", "is frozen"),
                                           ("raise", "failed with ValueError: boom")])
def test_a_rank_of_the_other_host_that_dies_is_named_on_both(hosts, mode, how):
    with nothing_left() as environment:
        started = time.monotonic()
        done = launched(environment, hosts, JOB, mode)
    assert time.monotonic() - started < 10
    assert all(node.returncode for node in done), done
    said = done[0].stderr + done[1].stderr
    if mode == "kill":
        line = r"^minidist: rank 2 \(process \d+ on \S+\) was killed by SIGKILL; the job ends$"
        assert re.search(line, done[1].stderr, re.M), done[1].stderr
    for rank in (0, 1, 3):
        line = rf"minidist: rank {rank} stops: PeerLostError: rank 2 \(process \d+ on \S+\) .*{how}"
        assert re.search(line, said), said


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
    assert namespaces.missing() == "ip and tc of iproute2 not installed"
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    with pytest.raises(LaunchError, match="no two hosts on this machine: network namespaces are made by root"), \
            joined_hosts("1gbit"):
        pass
