"""Node agent: what becomes of the ranks of another host, and of the host itself; threads of this
process play it."""

import contextlib
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers import SOON
from leftovers import nothing_left

from minidist.comm import wire
from minidist.comm.health import acceptor, node_agent
from minidist.comm.health.failure import Failure
from minidist.comm.health.monitor import Monitor
from minidist.comm.health.monitor_client import MonitorClient
from minidist.comm.health.node_agent import NodeAgent
from minidist.comm.health.process_state import has_ended, this_system
from minidist.launch.joining import HelperProcess

TOKEN = wire.new_token()


@pytest.fixture
def far(monkeypatch):
    """From here on ranks and node agents say that they are on another system; the monitor stays
    where it is."""
    this_system()  # it is remembered: here, before any test gives the host another name
    monkeypatch.setattr("minidist.comm.health.acceptor.this_system", lambda: "far")
    monkeypatch.setattr("minidist.comm.health.watchdog.LOOK", 0.05)
    for patience in ("_TRY", "ANSWER_LIMIT"):  # this machine may be busy
        monkeypatch.setattr(f"minidist.comm.health.node_agent.{patience}", SOON)
    monkeypatch.setattr("minidist.comm.health.watchdog.AGENT_WAIT", SOON)


@pytest.fixture
def process():
    """A process to be watched."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as sleeper:
        yield sleeper
        sleeper.kill()


@contextlib.contextmanager
def job(agent, *, pid=None):
    """Rank 0 here; ranks 1 and 2 far away, with their node agent; rank 2 is process `pid`. Gives
    monitor and links."""
    with nothing_left(), pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        monitor = Monitor(3, TOKEN)
        monitor.start()
        stack.callback(monitor.close)
        patch.setattr("minidist.comm.health.acceptor.platform.node", lambda: "far")
        links = []
        with pytest.MonkeyPatch.context() as here:
            here.setattr("minidist.comm.health.acceptor.this_system", this_system)
            links.append(MonitorClient(monitor.address, TOKEN, 0, 3, grace=60))
        links.append(MonitorClient(monitor.address, TOKEN, 1, 3, grace=60))
        patch.setattr("minidist.comm.health.monitor_client.os.getpid", lambda: pid or 4711)
        links.append(MonitorClient(monitor.address, TOKEN, 2, 3, grace=60))
        for link in links:
            stack.callback(link.goodbye)
        threading.Thread(target=agent.serve, args=(monitor.address, TOKEN), daemon=True).start()
        stack.callback(agent.close)
        wait_for(monitor._watchdog.agents)
        yield monitor, links


def wait_for(condition, limit=SOON):
    deadline = time.monotonic() + limit
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert condition()


def vanish(link):
    """As a process does that dies."""
    link._closed = True
    link._sock.shutdown(socket.SHUT_RDWR)


@pytest.mark.soak
def test_a_frozen_rank_alone_on_its_host_is_found_and_ended(far, process):
    agent = NodeAgent([2])
    with job(agent, pid=process.pid) as (monitor, links):
        time.sleep(0.15)
        assert monitor.loss is None
        process.send_signal(signal.SIGSTOP)
        wait_for(lambda: links[0].loss and links[1].loss and agent.loss)
        assert (
            str(links[0].loss)
            == str(agent.loss)
            == f"rank 2 (process {process.pid} on far) is frozen (stopped)"
        )
        assert process.wait(SOON) == -signal.SIGKILL


def test_how_a_far_rank_ended_is_known_everywhere(far):
    with job(NodeAgent([1, 2], {1: "never", 2: "was killed by SIGSEGV"}.get)) as (_, links):
        vanish(links[2])
        wait_for(lambda: links[0].loss and links[1].loss)
        assert (
            str(links[0].loss)
            == str(links[1].loss)
            == "rank 2 (process 4711 on far) was killed by SIGSEGV"
        )


def test_an_agent_of_a_whole_system_looks_for_the_process_itself(far, process):
    with job(NodeAgent(), pid=process.pid) as (_, links):
        process.kill()
        wait_for(lambda: has_ended(process.pid))
        vanish(links[2])
        wait_for(lambda: links[0].loss)
        assert str(links[0].loss) == f"rank 2 (process {process.pid} on far) was killed by SIGKILL"


def test_a_rank_that_ends_before_it_joins_is_told_by_its_agent(far):
    agent = NodeAgent([1, 2])
    with job(agent) as (_, links):
        loss = Failure(2, 4711, "far", "exited with status 3 without goodbye")
        agent.lose(loss)
        assert agent.loss == loss
        wait_for(lambda: links[0].loss and links[1].loss)
        assert links[0].loss == links[1].loss == loss


def test_one_that_is_closed_as_it_comes_says_goodbye_still(far, monkeypatch):
    agent = NodeAgent([1, 2])
    late = NodeAgent([2])
    real = late._connect

    def connect(*where):
        sock = real(*where)
        late.close()
        return sock

    monkeypatch.setattr(late, "_connect", connect)
    with job(agent) as (monitor, _):
        late.serve(monitor.address, TOKEN)
        wait_for(lambda: [post.ranks for post in monitor._watchdog.agents()] == [(1, 2)])
        assert monitor.loss is None


def test_the_death_of_an_expendable_rank_is_told_as_such(far):
    agent = NodeAgent([1, 2])
    with job(agent) as (monitor, links):
        links[2]._send({"kind": "expendable"})
        wait_for(lambda: monitor._seats[2].expendable)
        loss = Failure(2, 4711, "far", "was killed by SIGKILL")
        agent.lose(loss)
        assert (agent.loss, agent.spared, monitor.loss) == (None, {2: loss}, None)


def test_a_host_of_which_nothing_is_heard_is_lost_with_its_ranks(far, monkeypatch):
    monkeypatch.setattr("minidist.comm.health.watchdog.SILENCE", 1.0)
    agent = NodeAgent([1, 2])
    pid = os.getpid()
    with job(agent) as (_, links):
        time.sleep(1.3)
        assert links[0].loss is None, "it answers"
        agent._take = lambda frame: None
        wait_for(lambda: links[0].loss)
        assert str(links[0].loss) == (
            f"rank 1 (process {pid} on far) is out of reach with its whole host "
            "(ranks 1, 2): it sent nothing for 1 s"
        )


def test_an_agent_that_is_gone_takes_its_ranks_along_unless_it_said_goodbye(far):
    agent = NodeAgent([2])
    with job(agent) as (monitor, links):
        agent.close()
        wait_for(lambda: not monitor._watchdog.agents())
        assert monitor.loss is None
        second = NodeAgent([2])
        threading.Thread(target=second.serve, args=(monitor.address, TOKEN), daemon=True).start()
        wait_for(monitor._watchdog.agents)
        wait_for(lambda: second._sock)
        second._sock.shutdown(socket.SHUT_RDWR)
        wait_for(lambda: links[0].loss)
        assert re.fullmatch(
            rf"rank 2 \(process 4711 on far\) is out of reach with its whole host \(rank 2\): its "
            rf"node agent \(process {os.getpid()}\) is gone \(.* closed the connection\)",
            str(links[0].loss),
        )


@pytest.mark.parametrize(
    "frame", [{"kind": "dance"}, [1, 2], {"no": "kind"}, {"kind": "seen"}, {"kind": "ended"}]
)
def test_an_agent_that_speaks_nonsense_is_lost_not_the_monitor(far, frame):
    agent = NodeAgent([2])
    with job(agent) as (monitor, links):
        wait_for(lambda: agent._sock)
        wire.send_frame(agent._sock, frame)
        wait_for(lambda: links[0].loss)
        assert f"its node agent (process {os.getpid()}) is gone" in str(links[0].loss)
        assert not monitor._watchdog.agents()


def test_the_kernels_ask_whether_the_other_host_is_there(far):
    with job(NodeAgent()) as (monitor, links):
        for sock in (links[0]._sock, monitor._seats[0].sock, monitor._watchdog.agents()[0].sock):
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                assert (
                    sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
                    == 1000 * acceptor.SILENCE
                )
                assert (
                    sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) + 1 == acceptor.SILENCE
                )


def test_an_agent_as_a_process_ends_with_the_monitor():
    with nothing_left():
        monitor = Monitor(1, TOKEN)
        monitor.start()
        child = HelperProcess(TOKEN, "node_agent", *monitor.address)
        wait_for(monitor._watchdog.agents, 60.0)  # it starts Python
        [post] = monitor._watchdog.agents()
        assert (post.host, post.pid, post.ranks) == (platform.node(), child._process.pid, ())
        assert TOKEN not in Path(f"/proc/{post.pid}/cmdline").read_bytes()
        monitor.close()
        child.close()


def test_an_agent_that_comes_when_the_job_is_over_releases_its_rank_at_once(far, monkeypatch):
    """A short job ends before the agent's process has started."""
    # it may have been asked about this process, which does not end
    monkeypatch.setattr(node_agent, "ENDING", 0.1)
    released = []
    monkeypatch.setattr(node_agent, "release_parent", lambda: released.append(1))
    with job(NodeAgent([1])) as (monitor, _):
        monitor.release_agents()
        late = NodeAgent([2])
        threading.Thread(target=late.serve, args=(monitor.address, TOKEN), daemon=True).start()
        wait_for(lambda: len(released) == 2)
        late.close()


def test_an_agent_looks_on_when_the_job_is_over_and_the_monitor_has_gone(
    far, process, monkeypatch, capfd
):
    released = []
    monkeypatch.setattr(node_agent, "release_parent", lambda: released.append(1))
    monkeypatch.setattr(node_agent, "LOOK", 0.05)
    with job(agent := NodeAgent(), pid=process.pid) as (monitor, links):
        wait_for(lambda: process.pid in agent._pids)
        for link in links:
            link.goodbye()
        wait_for(lambda: not monitor.present())
        assert 2 in monitor.running()
        monitor.release_agents()
        wait_for(lambda: released)
        monitor.close()
        # not this process, which plays the others
        agent._pids = {process.pid}
        agent._looks.patience = 0.1
        process.send_signal(signal.SIGSTOP)
        assert process.wait(SOON) == -signal.SIGKILL
        agent._pids = set()  # this test plays with what os.getpid says
        wait_for(lambda: agent._closed)
    assert f"process {process.pid} on far is frozen" in capfd.readouterr().err


def test_an_agent_that_nobody_lets_in_gives_up():
    monitor = Monitor(1, TOKEN)
    monitor.start()
    try:
        NodeAgent().serve(monitor.address, wire.new_token())
        assert not monitor._watchdog.agents()
    finally:
        monitor.close()
