"""minidist bench step on one rank and several, and by ZeRO stages: ours and its peers."""

import json

import pytest

from minidist.bench.step import ranks
from minidist.cli import main
from minidist.errors import LaunchError


@pytest.mark.soak  # test_plan.py measures the same of two ranks and of one
def test_step_measures_ours(tmp_path, monkeypatch):
    """A tiny model: tokens/s are batch × context × ranks over the median step. With PyTorch: the
    soak tests."""
    monkeypatch.setattr(ranks.importlib.util, "find_spec", lambda name: None)
    file = tmp_path / "step.json"
    tiny = [
        "--layers",
        "1",
        "--width",
        "8",
        "--heads",
        "2",
        "--context",
        "8",
        "--batch",
        "2",
        "--vocab",
        "16",
    ]
    assert (
        main(
            [
                "bench",
                "step",
                "-n",
                "2",
                "--rounds",
                "1",
                "--steps",
                "2",
                *tiny,
                "--json",
                str(file),
            ]
        )
        == 0
    )
    rows = json.loads(file.read_text())["rows"]
    ours = next(row for row in rows if row["name"] == "minidist")
    assert ours["ranks"] == 2
    assert ours["tokens_per_second"] == pytest.approx(2 * 8 * 2 / ours["step_seconds"])
    assert ours["processor_seconds"] > 0


TINY_STEP = [
    "--rounds",
    "1",
    "--steps",
    "1",
    "--layers",
    "1",
    "--width",
    "8",
    "--heads",
    "2",
    "--context",
    "8",
    "--batch",
    "2",
    "--vocab",
    "16",
]


@pytest.mark.soak
def test_stages_are_measured_and_drawn(tmp_path, monkeypatch, capsys):
    """Ours alone, where PyTorch is not installed."""
    monkeypatch.setattr(ranks.importlib.util, "find_spec", lambda name: None)
    file = tmp_path / "step.json"
    picture = tmp_path / "step.png"
    assert (
        main(
            [
                "bench",
                "step",
                "--plan",
                "dp=2",
                "--zero",
                "1,3",
                *TINY_STEP,
                "--json",
                str(file),
                "--figure",
                str(picture),
            ]
        )
        == 0
    )
    rows = json.loads(file.read_text())["rows"]
    assert [(row["name"], row["zero"], row["ranks"]) for row in rows] == [
        ("minidist", 1, 2),
        ("minidist", 3, 2),
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "ZeRO-3" in printed and "PyTorch was left out" in printed


def test_a_peer_that_pytorch_lacks_is_named_with_its_reason(monkeypatch):
    started = []

    def start(contender, ranks, model, transport, zero=0):
        if contender != "minidist":
            raise LaunchError(
                f"bench: {contender} started 0 of 2 ranks: Traceback\nImportError: no fully_shard"
            )
        started.append(zero)

    monkeypatch.setattr(ranks.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(ranks, "start_job", start)
    monkeypatch.setattr(ranks, "measure_jobs", lambda *arguments: [])
    _, left_out = ranks.measure_stages(ranks.Model(), [2], [0, 2], 1, 1, "tcp", print)
    assert (
        started == [0, 2]
        and left_out[-1] == "PyTorch FSDP2 keep on 2 ranks: ImportError: no fully_shard"
    )


@pytest.mark.soak
def test_every_peer_takes_a_step(tmp_path):
    pytest.importorskip("torch", reason="needs PyTorch: the extra `bench`")
    file = tmp_path / "step.json"
    assert (
        main(["bench", "step", "--zero", "0,1,2,3", "-n", "2", *TINY_STEP, "--json", str(file)])
        == 0
    )
    result = json.loads(file.read_text())
    assert result["left_out"] == []
    assert [row["name"] for row in result["rows"] if row["name"] != "minidist"] == [
        peer for zero in range(4) for peer in ranks.PEERS[zero]
    ]
