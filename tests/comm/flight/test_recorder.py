"""The flight recorder: what stands in the ring while calls are made, after them, and after the rank
was killed."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from flights import made

import minidist as md
from minidist.comm.flight.recorder import FlightRecorder
from minidist.comm.flight.slots import (
    RING_BYTES,
    SLOT_BYTES,
    SLOTS,
    TEXTS,
    entry_at,
    place,
    read_ring,
)
from minidist.errors import ConfigError, PeerLostError

SIGNATURE = ("all_reduce", "ring", "sum", None, "<f4", (3, 4), "train.py:40")


def make(recorder, sequence=1, group=7):
    return made(recorder, group, sequence, *SIGNATURE, axis="dp", world_ranks=(0, 2))


def test_a_call_is_made_begun_and_ended():
    recorder = FlightRecorder(2)
    number = make(recorder)
    assert [(entry["state"], entry["begun"]) for entry in recorder.entries()] == [("made", 0.0)]
    recorder.begun(number)
    assert recorder.entries()[0]["state"] == "begun"
    recorder.ended(number, 96, 2)
    (entry,) = recorder.entries()
    assert entry["made"] <= entry["begun"] <= entry["ended"]
    assert {
        key: entry[key]
        for key in ("number", "kind", "state", "step", "sequence", "nbytes", "messages", "group")
    } == {
        "number": 1,
        "kind": "call",
        "state": "ended",
        "step": None,
        "sequence": 1,
        "nbytes": 96,
        "messages": 2,
        "group": 7,
    }
    assert (
        tuple(entry[key] for key in ("verb", "algorithm", "op", "root", "dtype", "where"))
        == SIGNATURE[:5] + SIGNATURE[6:]
    )
    assert entry["shape"] == [3, 4]


def test_a_record_says_how_long_the_program_stood_still():
    recorder = FlightRecorder()
    blocking, started, message = (make(recorder, sequence) for sequence in (1, 2, 3))
    recorder.begun(blocking)
    time.sleep(0.02)
    recorder.ended(blocking, 96, 2, blocking=True)
    recorder.ended(started, 96, 2)
    assert recorder.entries()[1]["stood"] == 0.0
    recorder.stood(started, 0.25)
    recorder.ended(message, 8, 1, stood=0.5)
    first, *others = recorder.entries()
    assert (
        first["stood"] == pytest.approx(first["ended"] - first["begun"], rel=1e-6)
        and first["stood"] >= 0.02
    )
    assert [(entry["stood"], entry["nbytes"], entry["sequence"]) for entry in others] == [
        (0.25, 96, 2),
        (0.5, 8, 3),
    ]
    for sequence in range(4, SLOTS + 4):
        make(recorder, sequence)
    recorder.stood(started, 9.0)  # its slot belongs to a later call now
    assert 9.0 not in [entry["stood"] for entry in recorder.entries()]


def test_a_step_leaves_its_memory_and_joules_whatever_their_size():
    recorder = FlightRecorder()
    recorder.start_step(4)
    recorder.state([2**62] * 7, [2**62] * 8, 2**62, 1e300, "a source of joules of a long name")
    (_, entry) = recorder.entries()
    assert (entry["kind"], entry["step"], entry["memory"], entry["peak"]) == (
        "state",
        4,
        [2**62] * 7,
        [2**62] * 8,
    )
    assert (entry["limit"], entry["joules"], entry["source"]) == (2**62, 1e300, "a source of ")
    recorder.state([0] * 7, [0] * 8, None, 0.0, "nvml + rapl")
    assert (
        recorder.entries()[-1]["source"] == "nvml + rapl"
        and recorder.entries()[-1]["limit"] is None
    )


def test_the_ring_goes_round_and_keeps_the_newest():
    recorder = FlightRecorder()
    first = make(recorder, 1)
    for sequence in range(2, SLOTS + 10):
        make(recorder, sequence)
    recorder.ended(first, 1, 1)  # its slot belongs to a later call now
    kept = recorder.entries()
    assert [entry["sequence"] for entry in kept] == [*range(10, SLOTS + 10)]
    assert {entry["state"] for entry in kept} == {"made"}


def test_steps_and_waits_stand_between_the_calls():
    recorder = FlightRecorder()
    recorder.start_step(3)
    number = recorder.waiting("a message from rank 2", (2,), 0.5, group=7, sequence=1)
    assert recorder.entries()[-1]["state"] == "begun"
    recorder.ended(number)
    make(recorder)
    step, wait, call = recorder.entries()
    assert (wait["state"], wait["group"], wait["sequence"]) == ("ended", 7, 1)
    assert (step["kind"], step["step"], call["step"]) == ("step", 3, 3)
    assert (wait["what"], wait["ranks"]) == ("a message from rank 2", [2])
    assert wait["ended"] - wait["begun"] == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("where", ["x" * 400 + "/train.py:40", "字" * 200 + "/train.py:40"])
def test_a_long_place_keeps_its_end(where):
    recorder = FlightRecorder()
    made(recorder, 7, 1, *SIGNATURE[:-1], where, axis="dp", world_ranks=(0,))
    assert recorder.entries()[0]["where"].endswith("/train.py:40")


def test_threads_write_side_by_side():
    recorder = FlightRecorder()

    def calls(group):
        for sequence in range(500):
            number = make(recorder, sequence, group)
            recorder.begun(number)
            recorder.ended(number, sequence, 1)

    threads = [threading.Thread(target=calls, args=(group,)) for group in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entries = recorder.entries()
    assert len(entries) == 2000
    assert all(entry["nbytes"] == entry["sequence"] for entry in entries)


def test_a_ring_in_a_file_is_read_by_others(tmp_path):
    recorder = FlightRecorder(2)
    path = tmp_path / "flight" / "00002.ring"
    make(recorder, 1)
    recorder.keep_in(path)
    make(recorder, 2)
    header, entries = read_ring(path)
    assert path.stat().st_size == RING_BYTES
    assert (header["rank"], header["pid"], header["groups"]) == (
        2,
        os.getpid(),
        {7: ["dp", [0, 2]]},
    )
    assert [entry["sequence"] for entry in entries] == [1, 2]


def test_a_folder_that_another_rank_removes_meanwhile_is_made_again(tmp_path, monkeypatch):
    """A rank that can keep no ring removes the folder, if it is empty."""
    made = Path.mkdir
    folder = tmp_path / "flight"

    def removed_once(path, **options):
        made(path, **options)
        monkeypatch.setattr(Path, "mkdir", made)
        path.rmdir()

    monkeypatch.setattr(Path, "mkdir", removed_once)
    FlightRecorder(0).keep_in(folder / "0.ring")
    assert (folder / "0.ring").is_file()


def test_a_folder_that_goes_while_mkdir_looks_at_it_is_made_again(tmp_path, monkeypatch):
    """mkdir meets the folder, it goes, and mkdir says that something else must be there: "File
    exists"."""
    is_dir = Path.is_dir
    folder = tmp_path / "flight"
    folder.mkdir()

    def gone_once(path, **options):
        monkeypatch.setattr(Path, "is_dir", is_dir)
        path.rmdir()
        return path.is_dir(**options)

    monkeypatch.setattr(Path, "is_dir", gone_once)
    FlightRecorder(0).keep_in(folder / "0.ring")
    assert (folder / "0.ring").is_file()


def test_what_is_no_ring_is_refused(tmp_path):
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ConfigError, match="text is not a flight recorder's ring"):
        read_ring(tmp_path / "text")
    with pytest.raises(ConfigError, match="no flight recorder in .*missing: No such file"):
        read_ring(tmp_path / "missing")
    with pytest.raises(ConfigError, match="rank 3 cannot keep its flight recorder"):
        FlightRecorder(3).keep_in(tmp_path / "text" / "ring")


def test_a_record_that_was_torn_is_left_out(tmp_path):
    recorder = FlightRecorder()
    path = tmp_path / "ring"
    recorder.keep_in(path)
    for sequence in range(1, SLOTS + 1):
        make(recorder, sequence)
    old = slot_of(path, 1)
    make(recorder, SLOTS + 1)  # over record 1
    new = slot_of(path, 1)
    assert (entry_at(old, 0)["sequence"], entry_at(new, 0)["sequence"]) == (1, SLOTS + 1)
    for written in range(1, SLOT_BYTES - 7):  # bytes, when the process died
        assert entry_at(new[:written] + old[written:], 0) is None


def slot_of(path, number):
    return path.read_bytes()[place(number) : place(number) + SLOT_BYTES]


def test_a_record_that_is_overwritten_while_it_is_read_is_left_out(tmp_path, monkeypatch):
    recorder = FlightRecorder()
    path = tmp_path / "ring"
    recorder.keep_in(path)
    for sequence in range(1, SLOTS + 1):
        make(recorder, sequence)
    old = bytearray(path.read_bytes())
    make(recorder, SLOTS + 1)  # in the slot of record 1
    new = path.read_bytes()
    texts = slice(place(1) + 64, place(1) + 64 + TEXTS)
    old[texts] = new[texts]
    old[place(2) + 64 : place(2) + 64 + TEXTS] = bytes(TEXTS)  # record 2: no msgpack of its length
    reads = iter([bytes(old), new])
    monkeypatch.setattr("minidist.comm.flight.slots.read_regular", lambda path, **_: next(reads))
    assert [entry["number"] for entry in read_ring(path)[1]][:2] == [3, 4]


def test_the_calls_of_a_group_are_recorded_on_every_transport():
    def job(world):
        world.tell_step(4)
        world.all_reduce(np.ones(5, np.float32))
        pending = world.start_all_gather(np.ones(2))
        pending.wait()
        return [
            (
                entry["step"],
                entry["verb"],
                entry["state"],
                entry["nbytes"],
                entry["where"].rpartition("/")[2],
            )
            for entry in world.ledger.flight.entries()
            if entry["kind"] == "call" and entry["step"] == 4
        ]

    for transport in ("threads", "tcp"):
        for calls in md.run(job, size=2, transport=transport):
            assert [call[:3] for call in calls] == [
                (4, "all_reduce", "ended"),
                (4, "all_gather", "ended"),
            ]
            assert [call[3] for call in calls] == [20, 16]
            assert all(call[4].startswith("test_recorder.py:") for call in calls)


KILLED = """
import os, signal, sys, time
import numpy as np, minidist as md
from minidist.comm.flight.slots import read_ring
def all_reduce_begun(ring):
    return any((entry.get("verb"), entry["state"]) == ("all_reduce", "begun") for entry in read_ring(ring)[1])
def job(world):
    world.ledger.flight.keep_in(f"{sys.argv[1]}/{world.rank}")
    world.barrier()
    if world.rank == 1:
        end = time.monotonic() + 30
        while time.monotonic() < end and not all_reduce_begun(f"{sys.argv[1]}/0"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    world.all_reduce(np.ones(3))
md.run(job, size=2, transport="tcp")
"""


def test_a_killed_rank_leaves_its_last_calls(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert PeerLostError.__name__ in done.stderr
    assert signal.SIGKILL.name in done.stderr
    rings = [read_ring(tmp_path / str(rank))[1] for rank in range(2)]
    last = [[entry for entry in ring if entry["kind"] == "call"][-1] for ring in rings]
    assert [(entry["verb"], entry["state"]) for entry in last] == [
        ("all_reduce", "failed"),
        ("barrier", "ended"),
    ]
    assert [ring[-1].get("why", "")[:13] for ring in rings] == ["PeerLostError", ""]


def test_messages_are_numbered_by_direction():
    def job(world):
        peer = 1 - world.rank
        world.send(np.ones(3), peer) if world.rank == 0 else world.recv(peer)
        world.exchange(np.ones(2), peer, peer)
        return [
            (
                entry["verb"],
                entry["dst"],
                entry["src"],
                entry["sequence"],
                entry["state"],
                entry["nbytes"],
            )
            for entry in world.ledger.flight.entries()
            if entry["kind"] == "message"
        ]

    first, second = md.run(job, size=2, transport="threads")
    assert first == [
        ("send", 1, None, 1, "ended", 24),
        ("exchange", None, 1, 1, "ended", 0),
        ("exchange", 1, None, 2, "ended", 16),
    ]
    assert second == [
        ("recv", None, 0, 1, "ended", 0),
        ("exchange", None, 0, 2, "ended", 0),
        ("exchange", 0, None, 1, "ended", 16),
    ]


def test_a_wait_that_lasts_is_recorded_with_its_call():
    def job(world):
        if world.rank == 1:
            time.sleep(0.4)
        world.barrier()
        return [
            (
                entry["what"],
                entry["ranks"],
                entry["state"],
                entry["sequence"],
                entry["ended"] - entry["begun"],
            )
            for entry in world.ledger.flight.entries()
            if entry["kind"] == "wait"
        ]

    waits, _ = md.run(job, size=2, transport="tcp")
    ((what, ranks, state, sequence, seconds),) = waits
    assert (ranks, state, sequence) == ([1], "ended", 1) and "rank 1" in what
    assert 0.2 < seconds < 30


@pytest.mark.parametrize(("why", "says"), [("ValueError", "ValueError: bad batch"), ("", "")])
def test_how_a_rank_ended_is_recorded(why, says):
    kept = []

    def job(world):
        kept.append(world.ledger.flight)
        world.barrier()
        if why:
            raise ValueError("bad batch")

    with suppress(ValueError):
        md.run(job, size=1)
    ends = [entry for entry in kept[0].entries() if entry["kind"] == "end"]
    assert (ends[0]["why"], ends[0]["state"]) == (says, "failed" if why else "ended")


def test_the_line_of_an_own_error_is_recorded_and_of_a_lost_peer_none():
    """It is where the program failed, and not its last call."""
    kept = {}

    def job(world):
        kept[world.rank] = world.ledger.flight
        world.barrier()
        if world.rank == 1:
            raise ValueError("bad batch " * 40)  # LINE
        world.barrier()

    with suppress(ValueError):
        md.run(job, size=2, transport="threads")
    (own,), (lost,) = (
        [entry for entry in kept[rank].entries() if entry["kind"] == "end"][:1] for rank in (1, 0)
    )
    line = next(
        n
        for n, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if text.endswith("# LINE")
    )
    assert own["where"].endswith(f"test_recorder.py:{line}") and own["why"].startswith(
        "ValueError: bad batch bad"
    )
    assert lost["where"] == "" and lost["why"].startswith("PeerLostError")


def test_a_planted_link_is_not_written_through(tmp_path):
    """Neither that of a ring nor those of the names that its drafts may have; the ring is this
    user's alone."""
    target = tmp_path / "target"
    target.write_text("precious")
    for name in ("00000.ring", f".00000.ring.{os.getpid()}"):
        (tmp_path / name).symlink_to(target)
    recorder = FlightRecorder()
    recorder.keep_in(tmp_path / "00000.ring")
    assert target.read_text() == "precious"
    ring = tmp_path / "00000.ring"
    assert not ring.is_symlink() and ring.stat().st_mode & 0o777 == 0o600
    read_ring(ring, member=True)
