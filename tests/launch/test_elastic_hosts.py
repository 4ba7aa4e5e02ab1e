"""A process on another host, as its launcher sees it; without any other host."""

import signal
import subprocess
import sys
import time

import psutil

from minidist.launch import elastic_hosts
from minidist.launch.elastic_hosts import KILL_LIMIT, RemoteProcess


class SilentHost:
    """A host that takes frames and does nothing."""

    name = "b"

    def __init__(self):
        self.told = []
        self.dropped = 0

    def tell(self, kind, **content):
        self.told.append((kind, content))

    def drop(self):
        self.dropped += 1


def test_a_host_that_carries_out_no_sigkill_is_lost(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(elastic_hosts.time, "monotonic", lambda: now[0])
    host = SilentHost()
    process = RemoteProcess(host, 3)
    process.send_signal(signal.SIGTERM)
    now[0] += 2 * KILL_LIMIT  # SIGTERM may be ignored as long as it likes
    process.send_signal(signal.SIGKILL)
    now[0] += KILL_LIMIT
    process.send_signal(signal.SIGKILL)
    assert (host.dropped, [content["signal"] for _, content in host.told]) == (0, [15, 9, 9])
    now[0] += 0.1
    process.send_signal(signal.SIGKILL)
    assert (host.dropped, len(host.told)) == (1, 3)
    process.end(-9, "is lost with host b")
    process.send_signal(signal.SIGKILL)
    assert (host.dropped, len(host.told)) == (1, 3)


def test_ctrl_c_while_hosts_connect_ends_at_once(tmp_path):
    """The command that is to reach the host never answers, and is gone afterwards."""
    words = [
        "--hosts",
        "here:1,elsewhere:1",
        "--elastic",
        "1:2",
        "--ssh",
        "sh -c 'exec sleep 60'",
        "--quiet",
        "--out",
        str(tmp_path / "run"),
    ]
    job = subprocess.Popen(
        [sys.executable, "-m", "minidist", "train", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        process = psutil.Process(job.pid)
        reaching = []
        deadline = time.monotonic() + 20
        while not reaching and time.monotonic() < deadline:
            time.sleep(0.05)
            reaching = [child for child in process.children() if "60" in child.cmdline()]
        assert reaching
        told = time.monotonic()
        job.send_signal(signal.SIGINT)
        said, _ = job.communicate(timeout=20)
    finally:
        job.kill()
    assert (job.returncode, time.monotonic() - told < 3) == (130, True)
    assert len(said.splitlines()) == 1 and "was told to stop by SIGINT" in said
    assert not any(child.is_running() for child in reaching)
