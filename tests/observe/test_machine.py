"""What a measurement says of its machine."""

from importlib import metadata

import pytest

import minidist
from minidist.observe.machine import machine


def test_the_version_is_that_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata of an old `pip install -e` name the version of that day."""
    monkeypatch.setattr(metadata, "version", lambda name: "0.0.1")
    assert machine()["versions"]["minidist"] == minidist.__version__ != "0.0.1"
    assert machine()["versions"]["numpy"] == "0.0.1"
