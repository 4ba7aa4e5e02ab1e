"""What all tests of `minidist train` share."""

import pytest


@pytest.fixture(autouse=True)
def _short_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process; 130 symbols take longer to write than a tiny model to train."""
    monkeypatch.setattr("minidist.cli.train.sample.WRITTEN", 5)
