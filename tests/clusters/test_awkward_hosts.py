"""Hosts as they are: a name that means 127.0.1.1, a network card that leads nowhere, packets of
different lengths."""

import json
import os
import re
import signal
import time

import pytest
from cluster_launchers import TOKEN, by_hand, by_hosts, by_mpich
from clusters import RANK, hosts_up
from jobs import JOB, finish, start, torchrun
from leftovers import nothing_left

WHERE = {"a": 1, "b": 2}
MET = {"hosts": ["a", "b", "b"], "nodes": [0, 1, 1], "transport": "shm+tcp"}


def met(processes):
    done = [finish(process) for process in processes]
    assert [process.returncode for process in done] == [0] * len(done), done
    assert [json.loads(line) for process in done for line in process.stdout.splitlines()] == [MET]


def test_a_first_host_that_others_reach_by_a_name_that_is_loopback_to_itself():
    """And a second one whose name is a network card that leads nowhere."""
    with hosts_up("a:loopback", "b:dead") as cluster, nothing_left() as environment:
        met(by_hand(cluster, WHERE, [RANK, "meet"], environment))


@pytest.mark.cluster
@pytest.mark.parametrize(
    "first", ["a", "a:loopback", "a:dead", "a:mtu=1400", "a:mtu=1400:loopback"]
)
@pytest.mark.parametrize("second", ["b", "b:loopback", "b:dead"])
def test_every_pair_of_awkward_hosts(first, second):
    with hosts_up(first, second) as cluster, nothing_left() as environment:
        met(by_hosts(cluster, WHERE, [RANK, "meet"], environment))


@pytest.mark.cluster
def test_a_cable_that_loses_long_packets_silently_is_named_with_what_to_do():
    """The connection is made and short messages pass; the cards know nothing of it, and no ICMP
    tells."""
    with hosts_up("a", "b:hole=1200") as cluster, nothing_left() as environment:
        done = [
            finish(node)
            for node in by_hand(
                cluster, {"a": 1, "b": 1}, [RANK, "long"], environment | {"CLUSTER_LIMIT": "60"}
            )
        ]
        assert [node.returncode for node in done] == [1, 1]
        assert sorted(json.loads(node.stdout)["short"] for node in done) == [0, 1]
        # what rank 1 tells may be too long for the cable
        far, near = (node.stderr for node in done)
        assert "minidist: rank 1" in far
        assert re.search(
            r"LinkLostError: .*acknowledged for 5 s.*\(its MTU\).* ip link set dev eth0 mtu 1200",
            near,
        )
        assert re.search(r"the link between rank (0 and rank 1|1 and rank 0) is lost", near)


@pytest.mark.cluster
def test_the_same_cable_between_cards_that_know_of_it():
    """What the hint says to do is enough."""
    with hosts_up("a:mtu=1200", "b:hole=1200:mtu=1200") as cluster, nothing_left() as environment:
        done = [
            finish(node)
            for node in by_hand(
                cluster, {"a": 1, "b": 1}, [RANK, "long"], environment | {"CLUSTER_LIMIT": "6"}
            )
        ]
        assert [node.returncode for node in done] == [0, 0], done


@pytest.mark.cluster
@pytest.mark.parametrize("first", ["a:loopback", "a:dead"])
def test_the_token_file_of_torchruns_ranks(first):
    """They share a home and no secret; rank 0's host listens for a name."""
    with hosts_up(first, "b") as cluster, nothing_left() as environment:
        met(
            [
                start(
                    cluster.on("ab"[rank > 0], "python3", RANK, "meet"),
                    environment,
                    **{
                        **torchrun(rank),
                        "LOCAL_RANK": str(max(0, rank - 1)),
                        "LOCAL_WORLD_SIZE": "12"[rank > 0],
                        "GROUP_RANK": "01"[rank > 0],
                        "MASTER_ADDR": "a",
                    },
                )
                for rank in (2, 1, 0)
            ]
        )


@pytest.mark.cluster
@pytest.mark.parametrize("first", ["a:loopback", "a:dead"])
def test_open_mpis_ranks_try_all_addresses_of_the_first(first):
    """By the variables that Open MPI's mpirun sets: without its MPI ranks meet by a file, which has
    the addresses."""
    with hosts_up(first, "b") as cluster, nothing_left() as environment:
        met(
            [
                start(
                    cluster.on("ab"[rank > 0], "python3", RANK, "meet"),
                    environment,
                    OMPI_COMM_WORLD_RANK=str(rank),
                    OMPI_COMM_WORLD_SIZE="3",
                    OMPI_COMM_WORLD_LOCAL_RANK=str(max(0, rank - 1)),
                    OMPI_COMM_WORLD_LOCAL_SIZE="12"[rank > 0],
                    PMIX_NAMESPACE=str(cluster.folder),
                )
                for rank in (0, 1, 2)
            ]
        )


@pytest.mark.cluster
def test_two_jobs_on_the_same_hosts():
    """One loses a rank; the other notices nothing."""
    with hosts_up("a", "b") as cluster, nothing_left() as environment:
        first = by_hand(cluster, WHERE, [RANK, "wait", "0"], environment, port="29500")
        for _ in range(2):
            assert "met" in json.loads(first[0].stdout.readline())
        done = [
            finish(node)
            for node in by_hand(cluster, WHERE, [RANK, "kill", "1"], environment, port="29600")
        ]
        assert all(node.returncode for node in done)
        met(by_hand(cluster, WHERE, [RANK, "meet"], environment, port="29700"))
        assert [node.poll() for node in first] == [None, None]
        first[0].terminate()
        for node in first:
            assert re.search("was told to stop by SIGTERM", finish(node).stderr)


@pytest.mark.cluster
def test_a_port_that_another_job_has_is_named():
    with hosts_up("a", "b") as cluster, nothing_left() as environment:
        first = by_hand(cluster, WHERE, [JOB, "cut"], environment)
        first[1].stdout.readline()
        second = start(
            cluster.on(
                "a",
                "python3",
                "-m",
                "minidist",
                "launch",
                "--hosts",
                "a,b",
                "--node-rank",
                "0",
                "--master-port",
                "29500",
                "true",
            ),
            environment,
            **TOKEN,
        )
        done = finish(second)
        assert (done.returncode, done.stdout) == (2, "")
        assert re.fullmatch("minidist launch: cannot listen on any address:29500 .*\n", done.stderr)
        for node in first:
            node.terminate()
            finish(node)


@pytest.mark.cluster
def test_a_host_that_dies_is_named_with_its_ranks():
    """All its processes at once, and its network card with them, as if someone had pulled the
    plug."""
    with hosts_up("a", "b", "c") as cluster, nothing_left() as environment:
        nodes = by_hand(cluster, {"a": 1, "b": 2, "c": 1}, [JOB, "cut", "auto", "0"], environment)
        for node in nodes:
            node.stdout.readline()
        os.kill(cluster.pid("b"), signal.SIGKILL)
        started = time.monotonic()
        *_, third, second, first = [None, *(finish(node) for node in nodes)]
        assert time.monotonic() - started < 10  # 5 s of silence at most, and the time to end
        assert first.returncode and second.returncode and third.returncode
        for node in (first, third):
            assert re.search(
                r"minidist: rank [12] \(process \d+ on b\) .*; the job ends$", node.stderr, re.M
            ), node


@pytest.mark.cluster
def test_mpirun_with_awkward_hosts():
    """MPI finds its own way; ours goes by all addresses that rank 0 tells by MPI."""
    with hosts_up("a:dead", "b", options=["--sshd"]) as cluster, nothing_left() as environment:
        done = [
            finish(process) for process in by_mpich(cluster, WHERE, [RANK, "meet"], environment)
        ]
        assert [process.returncode for process in done] == [0], done
        assert json.loads(done[0].stdout) == {**MET, "transport": "mpi"}
