"""Two jobs on one host share only its cores: a rank that goes astray is refused, and a dead job
harms no other."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest
from leftovers import nothing_left

import minidist as md
from minidist.comm import wire
from minidist.comm.group import Group
from minidist.comm.health.monitor import Monitor
from minidist.comm.health.monitor_client import MonitorClient
from minidist.errors import HandshakeError
from minidist.launch.children import Forked


@contextlib.contextmanager
def monitor_of_two() -> Iterator[tuple[Monitor, bytes]]:
    token = wire.new_token()
    monitor = Monitor(2, token)
    monitor.start()
    try:
        yield monitor, token
    finally:
        monitor.close()


def test_a_rank_at_the_other_jobs_monitor_is_refused_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With its own token, or as a rank that the other job has; both jobs stay as they were."""
    with monitor_of_two() as (first, own), monitor_of_two() as (second, other):
        link = MonitorClient(second.address, other, 1, 2)
        try:
            with pytest.raises(
                HandshakeError, match="its job token differs .a different job on that port"
            ):
                MonitorClient(second.address, own, 0, 2, limit=5.0)
            with pytest.raises(HandshakeError, match="refused rank 1: .*rank 1"):
                MonitorClient(second.address, other, 1, 2, limit=5.0)
            with pytest.raises(
                HandshakeError, match="refused rank 2: this job has 2 ranks, it says 3"
            ):
                MonitorClient(second.address, other, 2, 3, limit=5.0)
            assert first.loss is second.loss is None and link.loss is None
            deadline = time.monotonic() + 10
            # its threads say so after the answer
            while len(caplog.records) < 3 and time.monotonic() < deadline:
                time.sleep(0.005)
            refused = [record.getMessage() for record in caplog.records]
            assert sum("127.0.0.1" in line and "refused" in line for line in refused) == 3, refused
        finally:
            link.close()


def _sums(world: Group, there: int, go: int) -> float:
    """Say that the job has begun, wait for a word from outside, and sum once more."""
    total = world.all_reduce(np.ones(1000))
    if world.rank == 0:
        os.write(there, b".")
        os.read(go, 1)
    world.barrier()
    return float(world.all_reduce(total).sum())


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.soak)])
def test_a_job_that_dies_at_once_with_its_launcher_leaves_the_other_alone(transport: str) -> None:
    with nothing_left():
        there, say = os.pipe()
        go, let = os.pipe()
        ours, theirs = (
            Forked(
                lambda: int(md.run(_sums, say, go, size=2, transport=transport) != [4000.0, 4000.0])
            )
            for _ in range(2)
        )
        try:
            assert len(os.read(there, 1) + os.read(there, 1)) == 2
            theirs.send_signal(signal.SIGKILL)
            os.write(let, b"..")
            deadline = time.monotonic() + 30
            while ours.poll() is None and time.monotonic() < deadline:
                time.sleep(0.005)
            assert ours.poll() == 0 and theirs.poll() == -signal.SIGKILL
        finally:
            for job in (ours, theirs):
                job.send_signal(signal.SIGKILL)
            for end in (there, say, go, let):
                os.close(end)
