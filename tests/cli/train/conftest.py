"""What all tests of `minidist train` share, where they run it in this process."""

from functools import cache

import pytest

from minidist.data import text

READ = cache(text.load)


@pytest.fixture(autouse=True)
def _short_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model trains sooner than it writes 130 symbols."""
    monkeypatch.setattr("minidist.cli.train.sample.WRITTEN", 5)


@pytest.fixture(autouse=True)
def _no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib, which takes a second; tests/observe/test_plots.py draws it."""
    monkeypatch.setattr(
        "minidist.cli.train.run_folder.draw_loss",
        lambda path, losses, **options: path.write_text(str(len(losses))),
    )


@pytest.fixture(autouse=True)
def _text_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options are refused after the text is read: half a megabyte, which changes between no two
    tests."""
    load = text.load
    monkeypatch.setattr(
        text, "load", lambda source="python": (READ if source == "python" else load)(source)
    )
