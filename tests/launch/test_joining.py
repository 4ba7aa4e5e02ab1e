"""joining: the monitor as a process of its own, and the token's way to the ranks."""

import os
import re
import signal
import stat
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import SOON, nobodys_port
from leftovers import nothing_left

from minidist.comm import wire
from minidist.comm.health import acceptor
from minidist.comm.health.failure import Failure
from minidist.comm.health.monitor_client import MonitorClient
from minidist.comm.health.process_state import state_of
from minidist.errors import ConfigError, HandshakeError, LaunchError, PeerLostError, TimeoutError
from minidist.launch import joining
from minidist.launch.addresses import connect_to_any
from minidist.launch.joining import MonitorAddress, MonitorProcess, NodeAgentProcess
from minidist.launch.launchers import Launch
from minidist.launch.token_file import TokenFile

TOKEN = wire.new_token()


@pytest.fixture(autouse=True)
def _clean(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MINIDIST_TOKEN", raising=False)
    with nothing_left():
        yield


def connect(monitor, rank, size):
    return MonitorClient(monitor.place.address, monitor.place.token, rank, size, limit=10, grace=60)


def test_rank_0_may_end_with_the_last_goodbye_and_the_monitor_process_with_the_last_rank(
    monkeypatch,
):
    monitor = MonitorProcess(2, TOKEN)
    ranks = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(acceptor.os, "getpid", iter([rank.pid for rank in ranks]).__next__)
        links = [connect(monitor, rank, 2) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        met = list(pool.map(lambda link: link.meet({"rank": link.world_rank}), links))
    assert met == [[{"rank": 0}, {"rank": 1}]] * 2
    links[0].goodbye()  # rank 0 ends first: the monitor stays for the others
    time.sleep(0.3)
    assert monitor._process.poll() is None
    links[1].goodbye()
    monitor.close()
    assert monitor._process.returncode == 0
    for rank in ranks:
        assert state_of(monitor._process.pid) not in ("Z", "")
        rank.kill()
        rank.wait()
    assert os.waitpid(monitor._process.pid, 0)[1] == 0


def test_a_monitor_process_ends_when_rank_0_is_gone_and_says_so(capfd):
    monitor = MonitorProcess(2, TOKEN)
    link = connect(monitor, 1, 2)
    connect(monitor, 0, 2).close()  # no goodbye
    assert link.wait_for_loss(SOON).world_rank == 0
    link.close()
    monitor.close()
    assert "minidist: rank 0 (process" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("late", "way"),
    [
        (False, "SIGKILL"),
        (True, "SIGSTOP"),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in ((False, "SIGSTOP"), (True, "SIGKILL"))
        ),
    ],
)
def test_a_monitor_process_that_is_killed_or_frozen_ends_the_job_and_is_named(late, way, capfd):
    """`late`: after the goodbye, where rank 0 would wait for it for ever."""
    monitor = MonitorProcess(2, TOKEN, patience=0.1)
    links = [connect(monitor, rank, 2) for rank in range(2)]
    if late:
        links[0].goodbye()
    monitor._process.send_signal(getattr(signal, way))
    if not late:
        assert (
            links[1].wait_for_loss(SOON).how.startswith("lost its connection to the job's monitor")
        )
    monitor.close()
    how = {"SIGKILL": "was killed by SIGKILL", "SIGSTOP": r"was frozen \(stopped\), and is killed"}[
        way
    ]
    assert re.fullmatch(
        rf"minidist: the job's monitor \(process {monitor._process.pid} on \S+\) {how}\n",
        capfd.readouterr().err,
    )
    for link in links:
        link.close()


@pytest.mark.parametrize("way", ["SIGKILL", "SIGSTOP"])
def test_a_monitor_process_that_dies_at_its_start_is_named_to_the_ranks_that_come(way, capfd):
    """Rank 0 finds it gone, and tells the others in its place."""
    launch = Launch("torchrun", world_rank=0, world_size=2, local_size=2)
    monitor = MonitorProcess(2, TOKEN, patience=0.1)
    monitor._process.send_signal(getattr(signal, way))
    with ThreadPoolExecutor(2) as pool:
        zero = pool.submit(joining._connect_to_own, launch, monitor, 3 * SOON)
        while not monitor.loss and not zero.done():
            time.sleep(0.01)
        one = connect(monitor, 1, 2)  # patient: it cannot know that a monitor was there
        assert one.wait_for_loss(SOON).how == monitor.loss.how
        one.close()
        with pytest.raises(
            PeerLostError, match=rf"the job's monitor \(process {monitor._process.pid} on \S+\) was"
        ):
            zero.result(SOON)
    assert "minidist: the job's monitor (process" in capfd.readouterr().err


def test_a_monitor_that_is_gone_is_waited_for_by_no_rank_that_knows_of_it():
    with (
        nobodys_port() as address,
        pytest.raises(PeerLostError, match="rank 1 has lost the job's monitor at "),
    ):
        MonitorClient(address, TOKEN, 1, 2, limit=SOON, begun=True)
    with (
        nobodys_port() as (_, port),
        pytest.raises(PeerLostError, match="has lost the job.s monitor"),
    ):
        connect_to_any(
            ["127.0.0.1", "127.0.0.2"],
            port,
            TOKEN,
            Launch(world_rank=1, world_size=2),
            SOON,
            begun=True,
        )


@pytest.mark.parametrize("when", ["at its start", "connected"])
def test_a_node_agent_that_dies_ends_the_job(when, capfd):
    monitor = MonitorProcess(2, TOKEN)
    links = [connect(monitor, rank, 2) for rank in range(2)]
    agent = NodeAgentProcess(links[1], TOKEN)
    if when == "connected":  # it looks at the ranks, so the monitor has let it in
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda link: link.meet({}), links))
    agent._process.kill()
    for link in links:
        assert link.wait_for_loss(SOON) is not None
    agent.close()
    for link in links:
        link.close()
    monitor.close()
    assert re.search(
        r"minidist: the job's node agent \(process \d+ on \S+\) was killed by SIGKILL\n",
        capfd.readouterr().err,
    )


def test_a_helper_that_cannot_be_started_is_one_line(monkeypatch):
    def refuse(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(joining.subprocess, "Popen", refuse)
    with pytest.raises(
        LaunchError, match="cannot start the job's monitor on .*: Resource temporarily unavailable"
    ):
        MonitorProcess(2, TOKEN)


def test_a_rank_that_comes_after_the_first_has_failed_and_gone_hears_of_it():
    """Else each would say what is wrong with the input of them all, as if it were the first."""
    monitor = MonitorProcess(2, TOKEN)
    first = connect(monitor, 1, 2)
    assert first.report(ConfigError("no such file"))
    first.close()
    time.sleep(0.5)
    late = connect(monitor, 0, 2)
    assert not late.report(ConfigError("no such file"))
    late.close()
    monitor.close()
    assert monitor._process.returncode == 0


def test_a_monitor_process_outlives_the_sigterm_that_slurm_sends_to_all_of_a_step():
    """The ranks may be saving their work, and wait for each other."""
    monitor = MonitorProcess(2, TOKEN)
    links = [connect(monitor, rank, 2) for rank in range(2)]  # so it runs
    monitor._process.terminate()
    with ThreadPoolExecutor(2) as pool:
        assert len(list(pool.map(lambda link: link.meet({}), links))) == 2
    links[0].close()
    assert links[1].wait_for_loss(SOON).world_rank == 0  # it still says so
    links[1].close()
    monitor.close()
    assert monitor._process.returncode == 0


def test_a_monitor_process_ends_when_nobody_ever_came():
    monitor = MonitorProcess(2, TOKEN)
    monitor.close()
    assert monitor._process.returncode == 0


def test_a_taken_port_is_one_line():
    monitor = MonitorProcess(1, TOKEN)
    try:
        with pytest.raises(
            LaunchError, match=f"cannot listen on 127.0.0.1:{monitor.place.port}"
        ) as caught:
            MonitorProcess(1, TOKEN, port=monitor.place.port)
        assert "\n" not in str(caught.value)
    finally:
        monitor.close()


def test_the_token_file_is_private_and_goes_away():
    file = TokenFile("job 1")
    assert file.read() is None
    file.write(TOKEN)
    assert file.read() == TOKEN
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.path.parent.stat().st_mode) == 0o700
    file.write(b"again")  # a file left by a job that crashed is replaced
    assert file.read() == b"again"
    assert TokenFile("job 2").read() is None
    file.remove()
    file.remove()
    assert list(file.path.parent.iterdir()) == []


def test_the_token_of_a_killed_job_goes_when_the_next_is_written():
    living = TokenFile("living")
    living.write(TOKEN)
    killed = living.path.with_name("job-killed")
    killed.touch(mode=0o600)
    for path in (living.path, killed):
        os.utime(path, (0, 0))
    file = TokenFile("job")
    file.write(TOKEN)
    assert sorted(file.path.parent.iterdir()) == sorted([living.path, file.path])
    living.remove()
    file.remove()


def test_a_token_that_others_could_read_is_refused():
    file = TokenFile("job")
    file.write(TOKEN)
    file.path.chmod(0o644)
    with pytest.raises(LaunchError, match="not private"):
        file.read()


def test_a_link_in_place_of_the_token_file_is_not_followed(tmp_path):
    file = TokenFile("job")
    file.write(TOKEN)
    moved = file.path.rename(tmp_path / "elsewhere")
    file.path.symlink_to(moved)
    assert file.read() is None


def test_a_cache_that_cannot_be_written_is_one_line(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    with pytest.raises(LaunchError, match="set MINIDIST_TOKEN for every rank"):
        TokenFile("job").write(TOKEN)


def test_a_stale_token_is_read_anew(monkeypatch):
    """A file of a job that crashed is there first; rank 0 replaces it a moment later."""
    # the monitor waits for no end of this process
    monkeypatch.setattr(acceptor, "this_system", lambda: "far")
    file = TokenFile("job")
    file.write(wire.new_token())
    monitor = MonitorProcess(1, TOKEN)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(joining.connect_by_file, file, monitor.place.address, Launch(), 10.0)
        time.sleep(0.2)
        file.write(TOKEN)
        link, token = joined.result()
    assert token == TOKEN
    link.goodbye()
    monitor.close()
    os.waitpid(monitor._process.pid, 0)  # it is not awaited


def test_no_token_in_time():
    with pytest.raises(TimeoutError, match="waited 0.2 s for rank 0 to write the job's token"):
        joining.connect_by_file(
            TokenFile("job"), ("127.0.0.1", 9), Launch(world_rank=1, world_size=2), 0.2
        )


def test_a_wrong_token_in_time_is_what_is_told():
    monitor = MonitorProcess(1, TOKEN)
    file = TokenFile("job")
    file.write(wire.new_token())
    with pytest.raises(HandshakeError, match="token"):
        joining.connect_by_file(file, monitor.place.address, Launch(), 1.0)
    monitor.close()


def test_places_in_the_environment(monkeypatch):
    assert joining.place_from_environment() is None
    for name, value in MonitorAddress("10.0.0.1", 4711, TOKEN).variables().items():
        monkeypatch.setenv(name, value)
    assert joining.place_from_environment() == MonitorAddress("10.0.0.1", 4711, TOKEN)
    monkeypatch.setenv("MINIDIST_MONITOR", "nonsense")
    with pytest.raises(LaunchError, match="host:port"):
        joining.place_from_environment()


def test_losses_read_well():
    assert str(Failure(2, 0, "", "never came")) == "rank 2 never came"


@pytest.mark.parametrize(
    ("token", "says"),
    [
        (b"short", "fewer than 16 characters"),
        (b"\xff" * 20, "is not one line of UTF-8 text"),
        (b"two lines\nof a secret", "is not one line"),
        (b"\0" * 20, "is not one line"),
        (b"x" * 3000, "more than 2048"),
    ],
)
def test_what_cannot_be_a_secret_is_one_line(token, says, monkeypatch):
    with pytest.raises(LaunchError, match=says) as caught:
        joining.checked_token(token, "--token-file f")
    assert str(caught.value).startswith("--token-file f ") and "\n" not in str(caught.value)
    if b"\0" not in token:
        monkeypatch.setenv("MINIDIST_TOKEN", os.fsdecode(token))
        with pytest.raises(LaunchError, match=f"MINIDIST_TOKEN .*{says}"):
            joining.token_from_environment()


def test_a_secret_is_taken_without_the_white_space_around_it(monkeypatch):
    monkeypatch.setenv("MINIDIST_TOKEN", " pässword of several words \n")
    assert joining.token_from_environment() == "pässword of several words".encode()


def test_a_token_without_its_holder_is_a_killed_jobs():
    file = TokenFile("a job")
    assert not file.is_held()
    file.write(TOKEN)
    assert TokenFile("a job").is_held()
    os.close(file._lock)
    assert not TokenFile("a job").is_held()
