"""minidist bench all-reduce|…: contenders take turns, results are checked before timing, bandwidth
is nccl-tests'."""

import json
from types import SimpleNamespace

import fake_cupy
import pytest
from helpers import run

from minidist.bench import collectives
from minidist.bench.collectives import VERBS, in_a_row, our_call, timed
from minidist.cli import main
from minidist.comm.transports.gpu import nccl
from minidist.comm.transports.gpu.staging import Gpu
from minidist.errors import LaunchError


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("title", "contenders"),
    [
        ("all-reduce", "tcp,bare-tcp"),
        *(
            pytest.param(title, "tcp,shm,copies,bare-tcp,bare-shm", marks=pytest.mark.soak)
            for title in ("all-reduce", "all-to-all")
        ),
    ],
)
def test_table_figure_and_json(title, contenders, tmp_path, capsys):
    """Ours and the floors at two sizes: every contender has a time for every size, and a picture is
    drawn."""
    file = tmp_path / "bench.json"
    picture = tmp_path / "bench.png"
    status = main(
        [
            "bench",
            title,
            "--only",
            contenders,
            "-n",
            "2",
            "--sizes",
            "1KiB,8KiB",
            "--rounds",
            "1",
            "--json",
            str(file),
            "--figure",
            str(picture),
        ]
    )
    assert status == 0
    result = json.loads(file.read_text())
    assert set(result["seconds"]["2"]) == set(contenders.split(","))
    assert all(set(times) == {"1024", "8192"} for times in result["seconds"]["2"].values())
    assert all(
        seconds > 0 for times in result["seconds"]["2"].values() for seconds in times.values()
    )
    assert result["machine"]["command"].startswith("minidist") and result["machine"]["date"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = " ".join(capsys.readouterr().out.split())  # the title is broken to the table's width
    assert "bus bandwidth" in printed
    assert ("copies: nothing is communicated" in printed) == ("copies" in contenders)
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


@pytest.mark.parametrize("verb", VERBS.values(), ids=lambda verb: verb.title)
def test_nccl_is_timed_on_arrays_of_the_gpu(verb, monkeypatch):
    """On the stand-in for CuPy."""
    modules = fake_cupy.modules()
    fake_cupy.stand_in(monkeypatch, modules)
    kinds = set()

    def on_gpus(world):
        gpu = Gpu(world.transport, modules["cupy"], world.rank)
        gpu.device.use()
        world.transport.device = nccl.GpuDevice(
            gpu, [f"gpu {rank}" for rank in range(world.size)], ipc=False
        )
        call = our_call(world, verb, "auto")

        def seen(send, recv):
            kinds.update({type(send), type(recv)})
            call(send, recv)

        return collectives.timed_on_gpus(verb, seen, world)(nbytes=64, repeats=2)

    times = run(on_gpus, size=2)
    assert [len(seconds) for seconds in times] == [2, 2]
    assert kinds == {modules["cupy"].ndarray}
    assert "nccl" in collectives.contenders_here(verb)


def test_without_a_gpu_nccl_is_no_contender(capsys):
    assert "nccl" not in collectives.contenders_here(VERBS["all-reduce"])
    assert main(["bench", "all-reduce", "--only", "nccl"]) == 2
    assert "nccl is not installed here; it needs a GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("verb", "wrong"),
    [
        ("all_reduce", lambda world: lambda send, recv: None),
        (
            "all_gather",
            lambda world: (
                lambda send, recv: recv.__setitem__(slice(None), world.all_gather(send)[::-1])
            ),
        ),
        ("all_to_all", lambda world: lambda send, recv: recv.__setitem__(slice(None), send)),
        ("reduce_scatter", lambda world: lambda send, recv: recv.fill(send.sum())),
    ],
)
def test_a_contender_whose_result_is_wrong_is_not_timed(verb, wrong):
    verb = VERBS[verb.replace("_", "-")]
    with pytest.raises(ArithmeticError, match=f"{verb.title} of 60 B over 3 ranks: rank . has"):
        run(measured, verb, wrong, size=3)


@pytest.mark.parametrize(
    ("title", "crossings"),
    [("all-reduce", 2), ("all-gather", 1), ("reduce-scatter", 1), ("all-to-all", 1)],
)
def test_bus_bandwidth_is_what_a_link_carries(title, crossings):
    """1 MiB over 4 ranks in 1 ms: each link carries 3/4 MiB in that time, all-reduce's twice."""
    assert VERBS[title].bus_bandwidth(1 << 20, 1e-3, 4) == crossings * 0.75 * 2**20 / 1e-3


def test_bus_bandwidth_counts_only_what_was_moved():
    """64 B over 3 ranks are blocks of five numbers: 60 B."""
    assert VERBS["all-gather"].bus_bandwidth(64, 1.0, 3) == pytest.approx(60 * 2 / 3)


def test_short_messages_are_timed_several_in_a_row(monkeypatch):
    assert [in_a_row(nbytes) for nbytes in (1, 512 << 10, 1 << 20, 4 << 20, 64 << 20)] == [
        10,
        10,
        8,
        2,
        1,
    ]
    done: list[str] = []
    monkeypatch.setattr(
        collectives, "time", SimpleNamespace(perf_counter=lambda: 3.0 * done.count("call"))
    )
    measure = timed(
        VERBS["all-gather"],
        lambda send, recv: done.append("call"),
        lambda: done.append("barrier"),
        0,
        1,
        check=False,
    )
    assert measure(nbytes=4 << 20, repeats=1) == [3.0]  # seconds of a call, not of a row
    # one is checked, two repetitions warm up
    assert done == ["call"] + ["barrier", "call", "call"] * 3


def test_a_peer_that_cannot_is_left_out_unless_asked_for(monkeypatch):
    def start(verb, name, size):
        raise LaunchError(
            f"bench: {name} started 0 of 2 ranks: gloo of PyTorch 1.0 has no all-to-all: never "
            "heard"
        )

    monkeypatch.setattr(collectives, "start_job", start)
    arguments = VERBS["all-to-all"], [64], 2, 1, ["gloo"]
    times, left_out = collectives.measure_all(*arguments, False, print)
    assert times == {}
    assert "gloo of PyTorch 1.0 has no all-to-all" in left_out[0]
    with pytest.raises(LaunchError, match="has no all-to-all"):
        collectives.measure_all(*arguments, True, print)
