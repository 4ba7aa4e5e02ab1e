"""Flight recorders as JSON: the keys of PyTorch's dumps, what is read back, and SIGUSR2."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from flights import made

import minidist as md
from minidist.comm.flight.dumps import read_dump
from minidist.comm.flight.recorder import FlightRecorder
from minidist.comm.group import Group
from minidist.comm.health import flight_signals
from minidist.errors import ConfigError

KEYS = {
    "frames",
    "record_id",
    "pg_id",
    "process_group",
    "collective_seq_id",
    "p2p_seq_id",
    "op_id",
    "profiling_name",
    "time_created_ns",
    "time_discovered_started_ns",
    "time_discovered_completed_ns",
    "duration_ms",
    "input_sizes",
    "input_dtypes",
    "output_sizes",
    "output_dtypes",
    "state",
    "is_p2p",
    "retired",
    "timeout_ms",
}


def dumped(folder: Path) -> list[dict]:
    """The JSON of two ranks that have reduced, gathered, scattered a sum, sent, and made a call
    that stays open."""

    def job(world: Group) -> None:
        world.all_reduce(np.ones((2, 3), np.float32))
        world.all_gather(np.ones(2))
        world.reduce_scatter(np.ones(5))
        world.send(np.ones(4), 1) if world.rank == 0 else world.recv(0, out=np.empty(4))
        world.barrier()
        made(
            world.ledger.flight,
            0,
            9,
            "all_reduce",
            "ring",
            "sum",
            None,
            "<f4",
            (7,),
            "train.py:5",
            axis="world",
            world_ranks=(0, 1),
        )
        world.ledger.flight.dump(folder / f"{world.rank}.json")

    md.run(job, size=2, transport="threads")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_the_keys_are_those_of_pytorch(tmp_path):
    for rank, dump in enumerate(dumped(tmp_path)):
        assert (dump["version"], dump["rank"]) == ("2.10", rank)
        assert dump["pg_config"] == {"0": {"name": "0", "desc": "world", "ranks": "[0, 1]"}}
        assert dump["pg_status"] == {
            "0": {
                "last_enqueued_collective": 9,
                "last_started_collective": 4,
                "last_completed_collective": 4,
            }
        }
        assert all(set(entry) == KEYS for entry in dump["entries"])
        names = [entry["profiling_name"] for entry in dump["entries"]]
        assert names == [
            "gloo:all_reduce",
            "gloo:all_gather",
            "gloo:reduce_scatter",
            "gloo:send 0->1" if rank == 0 else "gloo:recv 1<-0",
            "gloo:barrier",
            "gloo:all_reduce",
        ]
        assert [(entry["input_sizes"], entry["output_sizes"]) for entry in dump["entries"][:4]] == [
            ([[2, 3]], [[2, 3]]),
            ([[1]], [[2]]),
            ([[6]], [[3]]),
            ([[4]], [[4]]),
        ]
        assert [entry["state"] for entry in dump["entries"]] == ["completed"] * 5 + ["scheduled"]
        assert dump["entries"][0]["frames"][0]["filename"].endswith("test_dumps.py")


def test_what_was_dumped_is_read_back(tmp_path):
    recorder = FlightRecorder(3)
    made(
        recorder,
        1 << 60,
        1,
        "all_reduce",
        "ring",
        "sum",
        None,
        "<f4",
        (7,),
        "train.py:5",
        axis="dp",
        world_ranks=(2, 3),
    )
    recorder.waiting("a message from rank 2", (2,), 0.5)
    recorder.dump(tmp_path / "a.json")
    header, entries = read_dump(tmp_path / "a.json")
    assert (header["rank"], header["groups"]) == (3, {1 << 60: ["dp", [2, 3]]})
    assert entries == recorder.entries()
    for text in ("", "[]", '{"minidist": 3}'):
        (tmp_path / "b.json").write_text(text)
        with pytest.raises(ConfigError, match="is not a flight recorder's dump"):
            read_dump(tmp_path / "b.json")


SLEEPS = """
import os, sys, time
import minidist as md
def job(world):
    if sys.argv[1:] and world.rank:
        world.ledger.flight.keep_in(f"{sys.argv[1]}/0000{world.rank}.ring")
    world.barrier()
    os.write(1, b"%d\\n" % os.getpid())
    if world.rank:
        time.sleep(60)              # if both waited for each other, that would soon end as a deadlock
    world.recv(1)
md.run(job, size=2, transport="tcp", limit=60)
"""


def test_sigusr2_writes_the_ring_beside_its_file_or_in_the_temporary_folder(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPS, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as run:
        try:
            for pid in [int(run.stdout.readline()) for _ in range(2)]:
                os.kill(pid, signal.SIGUSR2)
            deadline = time.monotonic() + 30
            while len(found := sorted(tmp_path.glob("*.json"))) < 2 and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(0.2)
        finally:
            run.terminate()
            error = run.communicate(timeout=30)[1]
    assert len(found) == 2, error
    assert found[0].name == "00001.json"
    assert found[1].name.startswith("minidist-flight-00000-") and str(found[1]) in error
    assert [read_dump(path)[0]["rank"] for path in found] == [1, 0]


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("follows", [False, True], ids=["leads", "follows"])
def test_a_signal_that_does_not_end_the_sleep_is_heard(follows, transport, tmp_path):
    """Another thread takes it while the main thread sleeps: as a signal that comes just before the
    sleep begins."""

    def job(world: Group) -> bool:
        other = world.split(0)
        if world.rank:
            world.ledger.flight.keep_in(tmp_path / "1.ring")
            if follows:
                threading.Thread(target=other.recv, args=(0,), daemon=True).start()
                time.sleep(0.2)
            threading.Timer(
                0.3, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)
            ).start()
            world.recv(0)
            return True
        deadline = time.monotonic() + 15
        while not (found := (tmp_path / "1.json").exists()) and time.monotonic() < deadline:
            time.sleep(0.01)
        world.send(np.ones(1), 1)
        other.send(np.ones(1), 1)
        return found

    assert md.run(job, size=2, transport=transport, limit=40) == [True, True]


@pytest.mark.soak
def test_pytorch_analyses_the_dumps(tmp_path, caplog):
    """PyTorch's own analysis finds that the calls of two ranks match, and the one that a rank did
    not make."""
    pytest.importorskip("torch")
    from argparse import Namespace

    from torch.distributed.flight_recorder.components.builder import build_db

    dumps = dumped(tmp_path)
    whole = build_db(
        {str(rank): dump for rank, dump in enumerate(json.loads(json.dumps(dumps)))},
        Namespace(
            verbose=False, just_print_entries=False, allow_incomplete_ranks=False, mismatch_cap=10
        ),
        dumps[0]["version"],
    )
    assert [found.collective_name for found in whole.collectives if found.pass_check][:3] == [
        "gloo:all_reduce",
        "gloo:all_gather",
        "gloo:reduce_scatter",
    ]
    assert all(found.pass_check for found in whole.collectives)
    dumps[1]["entries"][0]["input_sizes"] = dumps[1]["entries"][0]["output_sizes"] = [[9]]
    torn = build_db(
        {str(rank): dump for rank, dump in enumerate(dumps)},
        Namespace(
            verbose=False, just_print_entries=False, allow_incomplete_ranks=False, mismatch_cap=10
        ),
        dumps[0]["version"],
    )
    assert not torn.collectives[0].pass_check and 1 in torn.collectives[0].mismatch_collectives


def test_a_dump_is_this_users_alone_and_follows_no_link(tmp_path, monkeypatch):
    """SIGUSR2 writes it next to the ring, or in the folder for temporary files, where all users may
    write."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "target").write_text("precious")
    recorder = FlightRecorder(3)
    recorder.keep_in(tmp_path / "00003.ring")
    (tmp_path / "00003.json").symlink_to(tmp_path / "target")
    other = FlightRecorder(4)
    for dump in (Path(flight_signals._dump(recorder)), Path(flight_signals._dump(other))):
        assert dump.stat().st_mode & 0o777 == 0o600 and not dump.is_symlink()
        read_dump(dump, member=True)
    assert (tmp_path / "target").read_text() == "precious"
