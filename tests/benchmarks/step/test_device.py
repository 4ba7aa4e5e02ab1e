"""minidist bench step --device: one process on one device, its floor, its peers; what must be
refused."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import fake_gpu
import numpy as np
import pytest
from kernel_checks import needs_compiler
from rich.console import Console

from minidist.bench.step import device
from minidist.bench.step.device import CAPTURED, COMPILED, EAGER, row_of, timed
from minidist.bench.step.floor import FloorPart, floor, operations, parameters, step_parts
from minidist.bench.step.plots import draw_device
from minidist.bench.step.ranks import MODELS, OURS, Model
from minidist.bench.step.tables import show_device
from minidist.cli import main
from minidist.device import account
from minidist.errors import LaunchError, PeerLostError
from minidist.nn import GPT

GPT2 = MODELS["gpt2-124m"]
TINY = Model(layers=1, width=8, heads=2, context=8, batch=2, vocab=16)
TINY_OPTIONS = [f"--{name}={value}" for name, value in vars(TINY).items()]
CEILINGS = {"copy": 1e9, "matrix": 1e9, "about": None}


# ---------------------------------------------------------------------------------------- the floor


@pytest.mark.parametrize(
    "model", [TINY, GPT2, Model(layers=3, width=24, heads=3, context=5, batch=7, vocab=33)]
)
def test_products_are_two_operations_a_weight_and_token_thrice(model):
    """Each matrix once forward, twice backward; the table as the output layer, positions not at
    all."""
    weights = sum(
        p.size
        for name, p in GPT(model.config(tied=True)).named_parameters()
        if len(p.shape) == 2 and not name.startswith("positions")
    )
    tokens = model.batch * model.context
    products, attention, *others = step_parts(model, 2)
    assert products.operations == 3 * 2 * tokens * weights
    heads = model.batch * model.heads
    forward = 4 * model.context**2 * (model.width // model.heads) * heads / 2
    assert attention.operations == model.layers * 3.5 * forward
    assert operations([products, attention, *others]) == products.operations + attention.operations


def test_bytes_of_a_small_step():
    """Counted by hand: 16 tokens, width 8, one layer, 16 words, two bytes a number."""
    moved = {part.name: part.bytes for part in step_parts(TINY, 2)}
    row = 16 * 8 * 2
    matrices = [(8, 24), (8, 8), (8, 32), (32, 8), (8, 16)]
    assert moved["products"] == 3 * 2 * sum(16 * m + m * n + 16 * n for m, n in matrices)
    assert (moved["norms"], moved["gelu"], moved["residuals"]) == (
        3 * 5 * row,
        5 * 4 * row,
        12 * row,
    )
    assert (moved["attention"], moved["loss"]) == (12 * row, 2 * 16 * 16 * 2)
    assert moved["optimizer"] == 30 * parameters(TINY)
    assert parameters(GPT2) == 124_475_904


def test_a_part_takes_the_longer_of_its_times():
    parts = [FloorPart("products", 6e9, 1e9), FloorPart("norms", 0.0, 2e9)]
    assert floor(parts, copy=1e9, matrix=1e9) == 8.0
    assert floor(parts, copy=1e9, matrix=1e12) == 3.0


def test_a_row():
    turns = [{"seconds": seconds, "peak_bytes": 7, "memory": None} for seconds in (4.0, 1.0, 2.0)]
    row = row_of(EAGER, turns, TINY, [FloorPart("products", 1e9, 0.0)], CEILINGS)
    assert (row.step_seconds, row.tokens_per_second, row.utilisation, row.of_floor) == (
        2.0,
        8.0,
        0.5,
        0.5,
    )


# -------------------------------------------------------------------------------------------- turns


def test_a_turn_warms_up_once_and_waits_only_at_its_end():
    told = []

    def start():
        told.append("step")
        return len(told)

    turn = timed(start, lambda loss: told.append("wait") or float(loss), lambda: {"peak_bytes": 5})
    assert turn(steps=2)["loss"] == 8.0 and turn(steps=2)["peak_bytes"] == 5
    assert told == ["step", "wait"] * 3 + ["step", "step", "wait"] * 2


class FakeJob:
    """Answers as a contender; `fails` says who ends, and `absent` who does not start."""

    fails = ""
    absent = ""
    closed = []

    def __init__(self, name, size, command):
        if name == self.absent:
            raise LaunchError(
                f"bench: {name} started 0 of 1 ranks: Traceback\nImportError: no luck"
            )
        self.name = name
        self.size = size

    def ask(self, steps=None):
        if steps is None:
            return [CEILINGS]
        if self.name == self.fails:
            raise PeerLostError(
                f"bench: rank 0 of {self.name} ended: Traceback\nRuntimeError: no triton"
            )
        seconds = {OURS: 1.0, EAGER: 2.0, COMPILED: 0.5, CAPTURED: 0.8}
        return [
            {
                "seconds": seconds[self.name],
                "loss": 1.0,
                "peak_bytes": 1 << 20,
                "memory": {"parameters": 3 << 20, "total": 3 << 20} if self.name == OURS else None,
            }
        ]

    def close(self):
        self.closed.append(self.name)


@pytest.fixture
def jobs(monkeypatch):
    monkeypatch.setattr(FakeJob, "closed", [])
    monkeypatch.setattr(device, "Job", FakeJob)
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: True)
    return FakeJob


def measure(graph=False):
    return device.measure(TINY, "cpu", "bf16", 2, 3, lambda line: None, graph=graph)


def test_contenders_stand_beside_each_other(jobs, tmp_path):
    result = {"model": vars(TINY), **measure()}
    assert [row["name"] for row in result["rows"]] == [OURS, EAGER, COMPILED] and result[
        "left_out"
    ] == []
    assert jobs.closed == ["ceilings", OURS, EAGER, COMPILED]
    with open(tmp_path / "table", "w") as file:
        show_device(result, Console(file=file, width=200))
    text = (tmp_path / "table").read_text()
    cells = [
        cell.strip()
        for cell in next(line for line in text.splitlines() if OURS in line).strip("│").split("│")
    ]
    assert (
        cells[1:5] == ["1,000.00", "16", "2.00×", "0.50×"] and "parameters 3.0, total 3.0" in text
    )
    draw_device(tmp_path / "step.png", result)
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.soak  # test_contenders_stand_beside_each_other has the others
def test_a_captured_step_stands_behind_ours(jobs, monkeypatch, tmp_path):
    """And is ours: the bench ends if it fails."""
    assert [row["name"] for row in measure(graph=True)["rows"]] == [OURS, CAPTURED, EAGER, COMPILED]
    draw_device(tmp_path / "step.png", {"model": vars(TINY), **measure(graph=True)})
    assert (tmp_path / "step.png").exists()
    monkeypatch.setattr(jobs, "fails", CAPTURED)
    with pytest.raises(PeerLostError, match="no triton"):
        measure(graph=True)


@pytest.mark.parametrize(
    ("what", "reason"), [("absent", "ImportError: no luck"), ("fails", "RuntimeError: no triton")]
)
def test_a_peer_that_cannot_is_left_out_with_its_reason(jobs, monkeypatch, what, reason):
    monkeypatch.setattr(jobs, what, COMPILED)
    result = measure()
    assert [row["name"] for row in result["rows"]] == [OURS, EAGER]
    assert result["left_out"] == [f"torch.compile was left out: {reason}"]
    monkeypatch.setattr(jobs, what, OURS)
    with pytest.raises((LaunchError, PeerLostError)):
        measure()
    assert jobs.closed[-1] in (COMPILED, "ceilings")


# --------------------------------------------------------------------------------- the command line


def test_ours_on_the_cpu(tmp_path, monkeypatch, capsys):
    """The path that a GPU takes, with a tiny model and no PyTorch."""
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: None)
    file = tmp_path / "step.json"
    assert (
        main(
            [
                "bench",
                "step",
                "--device",
                "cpu",
                "--precision",
                "bf16",
                "--rounds",
                "1",
                "--steps",
                "2",
                *TINY_OPTIONS,
                "--json",
                str(file),
            ]
        )
        == 0
    )
    result = json.loads(file.read_text())
    (row,) = result["rows"]
    assert row["tokens_per_second"] == pytest.approx(16 / row["step_seconds"])
    assert row["memory"]["parameters"] >= 2 * parameters(TINY) and row["memory"][
        "optimizer"
    ] >= 12 * parameters(TINY)
    assert row["of_floor"] > row["utilisation"] > 0
    assert "PyTorch was left out" in capsys.readouterr().out


@pytest.mark.soak
@needs_compiler
@pytest.mark.parametrize("captured", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_ours_over_the_stand_in_for_cupy(captured, monkeypatch):
    """The way a GPU takes: steps are queued, waited for at the end; its pools say what was held."""
    cupy = fake_gpu.install(monkeypatch)
    monkeypatch.setattr(
        cupy,
        "get_default_memory_pool",
        lambda: SimpleNamespace(total_bytes=lambda: 77),
        raising=False,
    )
    monkeypatch.setattr(device, "limit_blas_threads", lambda *threads, **local: 1)
    monkeypatch.setattr(device, "WARM_UP", 1)
    monkeypatch.setattr(fake_gpu.MemoryPool, "total_bytes", lambda pool: 5)
    with account.use(account.MemoryAccount()):
        turn = device.ours(replace(TINY, heads=1), "cuda", "bf16", captured=captured)
        answers = [turn(steps=1)]
        fake_gpu.waits.clear()
        answers.append(turn(steps=2))
    assert (
        answers[0]["peak_bytes"] == 77 + 5 * captured
        and answers[1]["loss"] < answers[0]["loss"] < 3.0
    )
    assert answers[1]["memory"]["optimizer"] >= 12 * parameters(TINY)
    assert [wait.partition(" at ")[0] for wait in fake_gpu.waits] == ["an event", "a stream"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--model", "gpt2-124m", "-n", "2"], "one process on one device; leave -n"),
        (["--device", "cpu", "--zero", "1"], "leave -n, --plan and --zero out"),
        (["--model", "gpt3"], "invalid choice"),
        (["--precision", "fp16"], "invalid choice"),
        (
            ["--graph"],
            "--graph captures a step on a GPU in bf16; add --device cuda --precision bf16",
        ),
        (["--graph", "--device", "cuda"], "add --device cuda --precision bf16, or leave it out"),
        (["--device", "cpu", "--heads", "7"], "heads"),
    ],
)
def test_bad_input_is_one_line(options, expected, capsys):
    assert main(["bench", "step", *options]) == 2
    told = capsys.readouterr().err
    assert expected in told and told.count("\n") == 1


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert (
        main(["bench", "step", "--model", "gpt2-124m", "--device", "cuda", "--precision", "bf16"])
        == 2
    )
    told = capsys.readouterr().err
    assert "device cuda needs CuPy, which is not installed" in told and told.count("\n") == 1


def test_a_named_model_and_sizes_that_change_it(monkeypatch):
    asked = []

    def record(model, *rest, graph):
        asked.append((model, *rest[:4]))
        raise KeyboardInterrupt

    monkeypatch.setattr(device, "measure", record)
    assert (
        main(["bench", "step", "--model", "gpt2-124m", "--device", "cuda", "--precision", "bf16"])
        == 130
    )
    assert main(["bench", "step", "--model", "gpt2-124m", "--batch", "4"]) == 130
    assert asked[0] == (GPT2, "cuda", "bf16", 4, 5)
    assert asked[1][0] == Model(layers=12, width=768, heads=12, context=1024, batch=4, vocab=50304)
    assert asked[1][1:3] == ("cpu", "fp32")


@pytest.mark.soak
def test_every_contender_takes_a_step(tmp_path):
    pytest.importorskip("torch", reason="needs PyTorch: the extra `bench`")
    file = tmp_path / "step.json"
    assert (
        main(
            [
                "bench",
                "step",
                "--device",
                "cpu",
                "--precision",
                "bf16",
                "--rounds",
                "1",
                "--steps",
                "1",
                *TINY_OPTIONS,
                "--json",
                str(file),
            ]
        )
        == 0
    )
    result = json.loads(file.read_text())
    assert [row["name"] for row in result["rows"]] == [OURS, EAGER, COMPILED] and result[
        "left_out"
    ] == []


@pytest.mark.soak
def test_the_peer_starts_and_learns_like_ours():
    """The same model: the first loss is that of equal chances, and falls."""
    torch = pytest.importorskip("torch", reason="needs PyTorch: the extra `bench`")
    from minidist.bench.step.peers import torch_device_step
    from minidist.bench.step.ranks import random_batch

    model = Model(layers=2, width=32, heads=2, context=16, batch=4, vocab=64)
    ids, targets = map(torch.from_numpy, random_batch(64, 4, 16))
    for precision in ("fp32", "bf16"):
        step = torch_device_step(
            model.config(tied=True), device="cpu", precision=precision, compiled=False, clip=1.0
        )
        losses = [float(step(ids, targets)) for _ in range(20)]
        assert abs(losses[0] - np.log(64)) < 0.2 and losses[-1] < losses[0] - 0.5


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    file = tmp_path / "step.json"
    picture = tmp_path / "step.png"
    assert (
        main(
            [
                "bench",
                "step",
                "--model",
                "gpt2-124m",
                "--device",
                "cuda",
                "--precision",
                "bf16",
                "--layers",
                "2",
                "--graph",
                "--rounds",
                "2",
                "--steps",
                "3",
                "--json",
                str(file),
                "--figure",
                str(picture),
            ]
        )
        == 0
    )
    result = json.loads(file.read_text())
    assert all(0 < row["utilisation"] <= row["of_floor"] < 1 for row in result["rows"])
