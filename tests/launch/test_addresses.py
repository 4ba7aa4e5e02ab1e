"""Addresses of hosts: IPv6 as well as IPv4, and names that mean either; what leads nowhere is
refused at once."""

import errno
import re
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import SOON
from jobs import JOB, finish, free_port, start
from leftovers import nothing_left

from minidist.comm import wire
from minidist.comm.health.acceptor import listen, plain_address
from minidist.comm.health.monitor import Monitor
from minidist.comm.health.monitor_client import MonitorClient
from minidist.comm.transports import plain_tcp
from minidist.errors import LaunchError, TimeoutError
from minidist.launch.launchers import detect

TOKEN = wire.new_token()


def has_ipv6():
    """Return whether this host reaches itself by IPv6; many containers have none."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


on_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")


@on_ipv6
@pytest.mark.parametrize("address", ["::1", "[::1]"])
def test_two_nodes_meet_at_an_ipv6_address(address):
    port = free_port()
    with nothing_left() as environment:
        jobs = [
            start(
                [
                    sys.executable,
                    "-m",
                    "minidist",
                    "launch",
                    "-n",
                    "1",
                    "--nnodes",
                    "2",
                    "--node-rank",
                    str(node),
                    "--master-addr",
                    address,
                    "--master-port",
                    port,
                    JOB,
                    "ok",
                ],
                environment,
                MINIDIST_TOKEN=TOKEN.decode(),
            )
            for node in range(2)
        ]
        done = [finish(job) for job in jobs]
    assert [(one.returncode, one.stderr) for one in done] == [(0, "")] * 2
    assert done[1].stdout == "hello from 1 of 2 over tcp\ngoodbye from 1\n"


@on_ipv6
def test_a_monitor_that_listens_everywhere_is_reached_by_a_name_for_ipv6_alone(monkeypatch):
    monitor = Monitor(1, TOKEN, listen("", 0))
    monitor.start()
    port = monitor.address[1]
    found = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    link = MonitorClient(("six", port), TOKEN, 0, 1, limit=SOON)
    assert link.local_host == "::1" and link.beside_monitor
    link.goodbye()
    monitor.close()


def test_a_monitor_that_listens_everywhere_is_reached_by_ipv4():
    monitor = Monitor(1, TOKEN, listen("", 0))
    monitor.start()
    MonitorClient(("127.0.0.1", monitor.address[1]), TOKEN, 0, 1, limit=SOON).goodbye()
    monitor.close()


@on_ipv6
def test_the_plain_transport_connects_by_ipv6():
    class Link:
        def __init__(self, world_rank):
            self.world_rank = world_rank
            self.world_size = 2

        def meet(self, info):
            met[self.world_rank] = info
            while len(met) < 2:
                time.sleep(0.001)
            return [met[0], met[1]]

    met = {}
    with nothing_left(), ThreadPoolExecutor(2) as pool:
        for transport in pool.map(
            lambda rank: plain_tcp.connect(Link(rank), TOKEN, SOON, host="::1"), range(2)
        ):
            transport.close()


@pytest.mark.parametrize(
    ("text", "plain"),
    [("a", "a"), ("10.0.0.1", "10.0.0.1"), ("::1", "::1"), ("[fd00::1]", "fd00::1")],
)
def test_brackets_are_no_part_of_an_address(text, plain):
    assert plain_address(text) == plain
    variables = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": text,
        "MASTER_PORT": "29500",
    }
    assert detect(variables).master_addr == plain


@pytest.mark.parametrize("text", ["fe80::1", "[FE80::1]", "fe80::1%eth0"])
def test_a_link_local_address_is_refused_at_once(text):
    with pytest.raises(LaunchError, match=re.escape(f"{text} is a link-local address")) as caught:
        plain_address(text)
    assert "\n" not in str(caught.value)


def test_an_address_of_no_card_here_is_told_as_that():
    with pytest.raises(
        LaunchError, match=r"cannot listen on \[2001:db8::1\]:\d+ .* address of this host"
    ) as caught:
        listen("2001:db8::1", 29500)
    assert "another job" not in str(caught.value)


@pytest.mark.parametrize("number", ["ENETUNREACH", "EAFNOSUPPORT", "EADDRNOTAVAIL"])
def test_a_host_without_a_way_there_waits_for_nothing(number, monkeypatch):
    """The host has no IPv6 and is given an IPv6 address."""
    called = []

    def fail(*_, **__):
        called.append(1)
        raise OSError(getattr(errno, number), "no way")

    monkeypatch.setattr(socket, "create_connection", fail)
    with pytest.raises(
        TimeoutError, match=r"at \[fd00::9\]:29500 and this host has no route to it \(.*no way"
    ):
        MonitorClient(("fd00::9", 29500), TOKEN, 0, 1, limit=SOON)
    assert len(called) == 1


def test_an_address_is_written_with_its_port():
    assert wire.written(("fd00::1", 29500, 0, 0)) == "[fd00::1]:29500"
    assert wire.written(("::ffff:10.0.0.1", 29500, 0, 0)) == "10.0.0.1:29500"
