"""A follower sees what read_ring sees, while the rank writes, and goes over to a new rank's
ring."""

from pathlib import Path

import pytest
from flights import VirtualJob

from minidist.comm.flight.slots import SLOTS, read_ring
from minidist.launch.flight import ring_file
from minidist.observe.live import ring_follower
from minidist.observe.live.ring_follower import RingFollower


def test_a_follower_sees_what_the_ring_holds_at_each_look(tmp_path: Path) -> None:
    job = VirtualJob(tmp_path, 2)
    file = ring_file(tmp_path, 0)
    follower = RingFollower(file)
    opened = None
    for step in range(12):
        job.step(0, step, 10.0 * step)
        if opened is not None:  # a call of the last step ends in this one
            with job.at(0, 10.0 * step + 1):
                job.flights[0].ended(opened, 8, 1)
            follower.poll()
            job.flights[0].stood(opened, 0.5)  # known a moment after its end
        for call in range(3):
            job.call(0, 10.0 * step + call, 10.0 * step + call + 0.5)
        opened = job.call(0, 10.0 * step + 8, None)
        assert follower.poll()
        header, entries = read_ring(file)
        assert follower.header == header and follower.entries() == entries


def test_it_keeps_the_newest_records_of_a_ring_that_has_gone_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_follower, "KEPT", 50)
    job = VirtualJob(tmp_path, 1)
    follower = RingFollower(ring_file(tmp_path, 0))
    for start in (0, SLOTS - 20, 2 * SLOTS + 7):
        while job.call(0, 0.0, 0.5) < start + 30:
            pass
        follower.poll()
    newest = read_ring(follower.path)[1][-50:]
    assert len(newest) == 50 and follower.entries() == newest


def test_no_ring_a_file_that_is_none_and_a_new_rank_s_ring(tmp_path: Path) -> None:
    follower = RingFollower(ring_file(tmp_path, 0))
    assert not follower.poll() and follower.entries() == []
    follower.path.write_bytes(b"nothing")
    assert not follower.poll()
    VirtualJob(tmp_path, 1).call(0, 1.0, 2.0)
    assert follower.poll() and len(follower.entries()) == 1
    VirtualJob(tmp_path, 3)
    assert follower.poll() and follower.entries() == [] and follower.header is not None
    assert follower.header["size"] == 3
