"""The pictures open, whatever the run."""

from pathlib import Path

import pytest
from matplotlib.image import imread

from minidist.observe.plots import draw_loss


@pytest.mark.sampled
@pytest.mark.parametrize(
    "losses", [[], [2.0], [3.0, 2.5, 2.0], [4.0 / (step + 1) for step in range(100)]]
)
def test_loss_picture(tmp_path: Path, losses: list[float]) -> None:
    draw_loss(tmp_path / "loss.png", losses, validation=1.5 if losses else None, title="a run")
    picture = imread(tmp_path / "loss.png")
    assert picture.shape[0] > 300 and picture.shape[1] > 500 and float(picture.std()) > 0.01


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_equal_pictures_are_equal_files_on_any_day(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for day in ("0", "86400"):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", day)  # what matplotlib takes for the time of day
        monkeypatch.setattr("matplotlib.__version__", f"9.{day}", raising=False)
        draw_loss(tmp_path / f"{day}.{ending}", [3.0, 2.5, 2.0], validation=1.5, title="a run")
    assert (tmp_path / f"0.{ending}").read_bytes() == (tmp_path / f"86400.{ending}").read_bytes()
