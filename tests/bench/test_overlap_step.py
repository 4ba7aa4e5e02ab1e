"""minidist bench overlap-step: shares, and the recorded step of the figure."""

import json

import pytest

from minidist.cli import main


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
