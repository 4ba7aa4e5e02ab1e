"""The pictures open, whatever the run."""

from pathlib import Path

import pytest
from matplotlib.image import imread

from minidist.observe.plots import draw_loss


@pytest.mark.parametrize("losses", [[], [2.0], [3.0, 2.5, 2.0], [4.0 / (step + 1) for step in range(100)]])
def test_loss_picture(tmp_path: Path, losses: list[float]) -> None:
    draw_loss(tmp_path / "loss.png", losses, validation=1.5 if losses else None, title="a run")
    picture = imread(tmp_path / "loss.png")
    assert picture.shape[0] > 300 and picture.shape[1] > 500 and float(picture.std()) > 0.01
