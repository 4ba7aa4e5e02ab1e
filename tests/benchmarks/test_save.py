"""minidist bench save: rates, standstill and throughput of checkpoints, of ours alone and beside
PyTorch's."""

import json
from pathlib import Path

import pytest

from minidist.bench import save
from minidist.cli import main


@pytest.mark.soak
def test_checkpoints_beside_pytorch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "save.json"
    picture = tmp_path / "save.png"
    folder = tmp_path / "disk"
    folder.mkdir()
    assert (
        main(
            [
                "bench",
                "save",
                "--layers",
                "2",
                "--width",
                "16",
                "--context",
                "8",
                "--rounds",
                "1",
                "--every",
                "2",
                "--saves",
                "20",
                "--folder",
                str(folder),
                "--json",
                str(file),
                "--figure",
                str(picture),
            ]
        )
        == 0
    )
    result = json.loads(file.read_text())
    assert [(row["name"], row["way"]) for row in result["rows"]] == [
        (name, way) for way in save.WAYS for name in save.contenders_here()
    ]
    for row in result["rows"]:
        assert 0 < row["stands"] <= row["seconds"]
        assert row["mib_per_second"] == pytest.approx(result["nbytes"] / 2**20 / row["seconds"])
    assert 0 < result["throughput"] < 3
    memory = result["memory"]
    assert (
        memory["saves"] == 20
        and 0 < memory["first_bytes"] <= memory["most_bytes"] >= memory["last_bytes"] > 0
    )
    assert not list(folder.iterdir())
    assert picture.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "steps with a save keep" in said and "resident memory of a rank: " in said
