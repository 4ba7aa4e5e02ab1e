"""What all tests of `minidist train` share, where they run it in this process."""

import pytest


@pytest.fixture(autouse=True)
def _short_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model trains sooner than it writes 130 symbols."""
    monkeypatch.setattr("minidist.cli.train.sample.WRITTEN", 5)


@pytest.fixture(autouse=True)
def _no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib, which takes a second; the runs that test_command.py makes for several tests have one."""
    monkeypatch.setattr("minidist.cli.train.run_folder.draw_loss",
                        lambda path, losses, **options: path.write_text(str(len(losses))))
