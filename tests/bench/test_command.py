"""minidist bench: contenders measured in turn, figures that mean what they say, bad input refused in one line."""

import json
import subprocess
import sys
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import run

import minidist as md
from minidist.bench import collectives, floors
from minidist.bench.collectives import VERBS, in_a_row, our_call, timed
from minidist.bench.floors import connected, copies_call, tcp_call
from minidist.bench.jobs import Job
from minidist.bench.overlap import OverlapRow
from minidist.bench.step import ranks
from minidist.cli import main
from minidist.comm.cost.link_model import LinkCost, LinkWork, Profile, load_profile, save_profile
from minidist.errors import LaunchError, PeerLostError
from minidist.observe.machine import machine


@pytest.mark.parametrize("title", ["all-reduce", "all-to-all"])
def test_table_figure_and_json(title, tmp_path, capsys):
    """Ours and the floors at two sizes: every contender has a time for every size, and a picture is drawn."""
    file, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    status = main(["bench", title, "--only", "tcp,shm,copies,bare-tcp", "-n", "2", "--sizes", "1KiB,8KiB", "--rounds",
                   "1", "--json", str(file), "--figure", str(picture)])
    assert status == 0
    result = json.loads(file.read_text())
    assert set(result["seconds"]["2"]) == {"tcp", "shm", "copies", "bare-tcp"}
    assert all(set(times) == {"1024", "8192"} for times in result["seconds"]["2"].values())
    assert all(seconds > 0 for times in result["seconds"]["2"].values() for seconds in times.values())
    assert result["machine"]["command"].startswith("minidist") and result["machine"]["date"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = " ".join(capsys.readouterr().out.split())     # the title is broken to the table's width
    assert "bus bandwidth" in printed and "copies: nothing is communicated" in printed
    assert "tcp: nothing is reduced" in printed


def measured(world, verb, run, nbytes=60):
    return timed(verb, run(world), world.barrier, world.rank, world.size)(nbytes=nbytes, repeats=2)


def by_our_call(verb):
    return lambda world: our_call(world, verb, "auto")


@pytest.mark.parametrize("verb", VERBS.values(), ids=lambda verb: verb.title)
@pytest.mark.parametrize("size", [2, 3])
def test_what_is_timed_gives_what_it_must(verb, size):
    """60 B do not always divide by the ranks: what is left over is left off."""
    times = run(measured, verb, by_our_call(verb), size=size)
    assert [len(seconds) for seconds in times] == [2] * size


@pytest.mark.parametrize(("verb", "wrong"), [
    ("all_reduce", lambda world: lambda send, recv: None),
    ("all_gather", lambda world: lambda send, recv: recv.__setitem__(slice(None), world.all_gather(send)[::-1])),
    ("all_to_all", lambda world: lambda send, recv: recv.__setitem__(slice(None), send)),
    ("reduce_scatter", lambda world: lambda send, recv: recv.fill(send.sum())),
])
def test_a_contender_whose_result_is_wrong_is_not_timed(verb, wrong):
    verb = VERBS[verb.replace("_", "-")]
    with pytest.raises(ArithmeticError, match=f"{verb.title} of 60 B over 3 ranks: rank . has"):
        run(measured, verb, wrong, size=3)


def test_step_measures_ours(tmp_path, monkeypatch):
    """A tiny model: tokens/s are batch × context × ranks over the median step. With PyTorch: the soak tests."""
    monkeypatch.setattr(ranks.importlib.util, "find_spec", lambda name: None)
    file = tmp_path / "step.json"
    tiny = ["--layers", "1", "--width", "8", "--heads", "2", "--context", "8", "--batch", "2", "--vocab", "16"]
    assert main(["bench", "step", "-n", "2", "--rounds", "1", "--steps", "2", *tiny, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    ours = next(row for row in rows if row["name"] == "minidist")
    assert ours["ranks"] == 2
    assert ours["tokens_per_second"] == pytest.approx(2 * 8 * 2 / ours["step_seconds"])


@pytest.mark.soak
def test_overlap_of_a_step(tmp_path, capsys):
    """ZeRO-3 with prefetch off and on over delayed links: shares, and the step that the figure shows."""
    file, picture = tmp_path / "step.json", tmp_path / "step.png"
    assert main(["bench", "overlap-step", "--strategy", "zero3", "--only", "delayed", "--layers", "2", "--width", "16",
                 "--context", "8", "--rounds", "1", "--steps", "1", "--json", str(file), "--figure", str(picture)]) == 0
    result = json.loads(file.read_text())
    assert [row["name"] for row in result["rows"]] == ["zero3, prefetch off, delayed", "zero3, prefetch on, delayed"]
    for row in result["rows"]:
        assert 0 <= row["share"] <= 1 and 0 < row["communication"] < row["step_seconds"]
        for spans in row["steps"]:      # each rank's: six units, gathered twice
            assert sum(span["details"].get("verb") == "all_gather" and span["details"]["axis"] != "control"
                       for span in spans) == 2 * 6
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "prefetch off" in capsys.readouterr().out


def test_overlap_measures_each_alone_and_both(tmp_path):
    """Over links that hold 64 KiB back for 100 ms and more, the products run meanwhile."""
    file, picture = tmp_path / "overlap.json", tmp_path / "overlap.png"
    assert main(["bench", "overlap", "--only", "delayed", "--bytes", "64KiB", "--alpha", "0.05", "--bandwidth", "10MB",
                 "--rounds", "1", "--json", str(file), "--figure", str(picture)]) == 0
    row, = json.loads(file.read_text())["rows"]
    assert row["communicate"] > 2 * (0.05 + (32 << 10) / 10e6)
    assert row["of_longer"] == pytest.approx(row["both"] / max(row["communicate"], row["compute"]))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.soak
def test_overlap_hides_some(tmp_path):
    file = tmp_path / "overlap.json"
    assert main(["bench", "overlap", "--only", "delayed", "--bytes", "64KiB", "--alpha", "0.05", "--bandwidth", "10MB",
                 "--rounds", "3", "--json", str(file)]) == 0
    row, = json.loads(file.read_text())["rows"]
    assert row["both"] < 0.9 * (row["communicate"] + row["compute"])


def test_what_is_hidden():
    """Wholly hidden: both take as long as the longer; not at all: as long as one after the other."""
    assert (OverlapRow("", 2.0, 3.0, 3.0).of_longer, OverlapRow("", 2.0, 3.0, 3.0).hidden) == (1.0, 1.0)
    assert (OverlapRow("", 3.0, 3.0, 6.0).of_longer, OverlapRow("", 3.0, 3.0, 6.0).hidden) == (2.0, 0.0)


@pytest.mark.soak
def test_calibrate_in_a_job_measures_the_link_of_that_job(tmp_path):
    """Rank 0 writes it beside what is there; a profile that cannot be read is replaced."""
    file = tmp_path / "profile.json"
    save_profile(Profile([LinkCost("tcp", 2, 1e-6, 0, 0, 0, 0), LinkCost("shm", 2, 7.0, 0, 0, 0, 0)], machine()),
                 file)
    job = subprocess.run([sys.executable, "-m", "minidist", "launch", "-n", "2", "-m", "minidist", "bench", "calibrate",
                          "--sizes", "256B,64KiB", "--rounds", "1", "--out", str(file)], capture_output=True, text=True,
                         timeout=60, check=True)
    assert job.stdout.count("worst misfit") == 1
    links = {cost.link: cost for cost in load_profile(file).links}
    assert set(links) == {"shm", "tcp"}
    assert links["tcp"].alpha == 1e-6
    assert 0 < links["shm"].alpha < 7         # a job on sockets shares memory inside the host
    assert Profile([links["shm"]], {"processor": "abacus"}).beside(file).links == [links["shm"]]
    file.write_text("torn")
    assert Profile([links["shm"]], {}).beside(file).links == [links["shm"]]


def test_calibrate_leaves_a_profile_that_jobs_use(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file, picture = tmp_path / "calibrate.json", tmp_path / "fit.png"
    assert main(["bench", "calibrate", "--only", "threads,shm", "-n", "2", "--sizes", "256B,64KiB", "--rounds", "1",
                 "--json", str(file), "--figure", str(picture)]) == 0
    result, profile = json.loads(file.read_text()), load_profile()
    assert profile.as_json()["links"] == result["links"]
    assert [(cost.link, cost.ranks) for cost in profile.links] == [("threads", 2), ("shm", 2)]
    assert all(cost.seconds(LinkWork(1, 1, 256, 0)) > 0 for cost in profile.links)    # noise may make any one number 0
    assert [len(samples) for samples in result["samples"]] == [7, 7]        # two sizes, each thrice, and the burst
    assert str(tmp_path / "minidist" / "profile.json") in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert md.run(lambda world: world.link.link, size=2, transport="shm") == ["shm", "shm"]


@pytest.mark.parametrize(("options", "expected"), [
    (["all-reduce", "--only", "glooo"], "no contender 'glooo'"),
    (["all-reduce", "--sizes", "3B"], "multiples of 4"),
    (["all-reduce", "--sizes", "many"], "is not a size"),
    (["all-reduce", "-n", "1"], "one rank sends nothing"),
    (["all-to-all", "-n", "2,8", "--sizes", "16B"], "16 B are not one float32 number for each of 8 ranks"),
    (["all-gather", "--only", "MPI_Allreduce"], "no contender 'MPI_Allreduce'"),
    (["all-gather", "--only", "shm:tree"], "no algorithm 'tree'"),
    (["overlap", "--only", "sox"], "no 'sox'; choose from delayed"),
    (["overlap-step", "--strategy", "zero4"], "no 'zero4'; did you mean zero3?"),
    (["overlap-step", "-n", "1"], "choose -n of at least 2"),
    (["overlap", "--bytes", "6"], "whole float32 numbers"),
    (["calibrate", "--only", "thread"], "did you mean threads?"),
    (["calibrate", "--sizes", "1KiB"], "two --sizes or more"),
    (["step", "--heads", "3"], "heads"),
    (["step", "--zero", "4"], "are not ZeRO stages"),
    (["step", "--zero", "2", "-n", "1"], "one rank divides nothing"),
    (["step", "--plan", "dp=2", "-n", "2,4"], "leave -n out"),
    (["nonsense"], "invalid choice"),
])
def test_bad_input_is_one_line_and_status_2(options, expected, capsys):
    assert main(["bench", *options]) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(("title", "crossings"), [
    ("all-reduce", 2), ("all-gather", 1), ("reduce-scatter", 1), ("all-to-all", 1)])
def test_bus_bandwidth_is_what_a_link_carries(title, crossings):
    """1 MiB over 4 ranks in 1 ms: each link carries 3/4 MiB in that time, all-reduce's twice."""
    assert VERBS[title].bus_bandwidth(1 << 20, 1e-3, 4) == crossings * 0.75 * 2**20 / 1e-3


def test_bus_bandwidth_counts_only_what_was_moved():
    """64 B over 3 ranks are blocks of five numbers: 60 B."""
    assert VERBS["all-gather"].bus_bandwidth(64, 1.0, 3) == pytest.approx(60 * 2 / 3)


@pytest.mark.parametrize(("title", "brought", "got", "expected"), [
    ("all-reduce", 6, 6, [6, 6, 6, 6, 6, 6]),               # chunk 0 of three is summed, and copied over the others
    ("reduce-scatter", 6, 2, [6, 6]),
    ("all-gather", 2, 6, [1, 1, 1, 1, 1, 1]),
    ("all-to-all", 6, 6, [1, 1, 2, 2, 3, 3]),
])
def test_copies_touch_every_number_that_a_rank_must(title, brought, got, expected, monkeypatch):
    """Where every rank brings what this one does, the sums are right."""
    monkeypatch.setattr(floors, "CACHED", 1)
    send = np.repeat(np.arange(1, brought // 2 + 1), 2).astype(np.float32)
    recv = send if title == "all-reduce" else np.zeros(got, np.float32)
    copies_call(VERBS[title], 3)(send, recv)
    assert recv.tolist() == expected


@pytest.mark.parametrize(("title", "brought", "got", "expected"), [
    ("all-reduce", 6, 6, 4),            # of three blocks of two numbers: two come from each
    ("all-reduce", 1, 1, 1),            # no byte more than there is
    ("reduce-scatter", 6, 2, 2), ("all-gather", 2, 6, 2), ("all-to-all", 6, 6, 2)])
def test_tcp_carries_what_a_rank_must(title, brought, got, expected):
    """Every rank sends its rank, and gets one of the others'."""
    def rank(world):
        send = np.full(brought, world.rank, np.float32)
        recv = send.copy() if title == "all-reduce" else np.full(got, -1, np.float32)
        with ExitStack() as opened:
            tcp_call(VERBS[title], [opened.enter_context(sock) for sock in connected(world)])(send, recv)
        others = [other for other in range(world.size) if other != world.rank]
        return np.isin(recv[:expected], others).all() and not np.isin(recv[expected:], others).any()

    assert all(run(rank, size=3))


def test_short_messages_are_timed_several_in_a_row(monkeypatch):
    assert [in_a_row(nbytes) for nbytes in (1, 512 << 10, 1 << 20, 4 << 20, 64 << 20)] == [10, 10, 8, 2, 1]
    done: list[str] = []
    monkeypatch.setattr(collectives, "time", SimpleNamespace(perf_counter=lambda: 3.0 * done.count("call")))
    measure = timed(VERBS["all-gather"], lambda send, recv: done.append("call"), lambda: done.append("barrier"), 0, 1,
                    check=False)
    assert measure(nbytes=4 << 20, repeats=1) == [3.0]      # seconds of a call, not of a row
    assert done == ["call"] + ["barrier", "call", "call"] * 3   # one is checked, two repetitions warm up


def test_a_peer_that_cannot_is_left_out_unless_asked_for(monkeypatch):
    def start(verb, name, size):
        raise LaunchError(f"bench: {name} started 0 of 2 ranks: gloo of PyTorch 1.0 has no all-to-all: never heard")

    monkeypatch.setattr(collectives, "start_job", start)
    arguments = VERBS["all-to-all"], [64], 2, 1, ["gloo"]
    times, left_out = collectives.measure_all(*arguments, False, print)
    assert times == {}
    assert "gloo of PyTorch 1.0 has no all-to-all" in left_out[0]
    with pytest.raises(LaunchError, match="has no all-to-all"):
        collectives.measure_all(*arguments, True, print)


def test_a_job_that_does_not_start_says_what_it_printed():
    with pytest.raises(LaunchError, match="started 0 of 1 ranks.*no such wind"):
        Job("sail", 1, [sys.executable, "-c", "raise SystemExit('no such wind')"])


def test_a_rank_that_dies_is_named(tmp_path):
    program = tmp_path / "mortal.py"
    program.write_text("import sys\nfrom minidist.bench.jobs import answer\n"
                       "answer(sys.argv[2], 0, lambda: sys.exit('struck by lightning'))\n")
    job = Job("mortal", 1, [sys.executable, str(program)])
    try:
        with pytest.raises(PeerLostError, match="rank 0 of mortal ended.*lightning"):
            job.ask()
    finally:
        job.close()


TINY_STEP = ["--rounds", "1", "--steps", "1", "--layers", "1", "--width", "8", "--heads", "2", "--context", "8",
             "--batch", "2", "--vocab", "16"]


def test_stages_are_measured_and_drawn(tmp_path, monkeypatch, capsys):
    """Ours alone, where PyTorch is not installed."""
    monkeypatch.setattr(ranks.importlib.util, "find_spec", lambda name: None)
    file, picture = tmp_path / "step.json", tmp_path / "step.png"
    assert main(["bench", "step", "--plan", "dp=2", "--zero", "1,3", *TINY_STEP, "--json", str(file), "--figure",
                 str(picture)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["name"], row["zero"], row["ranks"]) for row in rows] == [("minidist", 1, 2), ("minidist", 3, 2)]
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "ZeRO-3" in printed and "PyTorch was left out" in printed


def test_a_peer_that_pytorch_lacks_is_named_with_its_reason(monkeypatch):
    started = []

    def start(contender, ranks, model, transport, zero=0):
        if contender != "minidist":
            raise LaunchError(f"bench: {contender} started 0 of 2 ranks: Traceback\nImportError: no fully_shard")
        started.append(zero)

    monkeypatch.setattr(ranks.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(ranks, "start_job", start)
    monkeypatch.setattr(ranks, "measure_jobs", lambda *arguments: [])
    _, left_out = ranks.measure_stages(ranks.Model(), [2], [0, 2], 1, 1, "tcp", print)
    assert started == [0, 2] and left_out[-1] == "PyTorch FSDP2 keep on 2 ranks: ImportError: no fully_shard"


@pytest.mark.soak
def test_every_peer_takes_a_step(tmp_path):
    pytest.importorskip("torch", reason="needs PyTorch: the extra `bench`")
    file = tmp_path / "step.json"
    assert main(["bench", "step", "--zero", "0,1,2,3", "-n", "2", *TINY_STEP, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["left_out"] == []
    assert [row["name"] for row in result["rows"] if row["name"] != "minidist"] == [
        peer for zero in range(4) for peer in ranks.PEERS[zero]]
