"""The manifest: histories in it, and manifests of the format before."""

import math
from pathlib import Path
from typing import Any

import pytest

from minidist.survive import manifest
from minidist.survive.manifest import packed, read_manifest, unpacked, write_manifest


@pytest.mark.parametrize(("dtype", "history"), [("<f8", [0.1, 2.0 ** -1074, -math.inf]), ("<i4", [0, 1, 2**31 - 1]),
                                                ("<f8", [])])
def test_a_history_has_the_same_bits_again(dtype: str, history: list[Any], tmp_path: Path) -> None:
    write_manifest(tmp_path, {"metrics": {"losses": packed(history, dtype)}}, [])
    again = unpacked(read_manifest(tmp_path)["about"]["metrics"]["losses"])
    assert again == history and [type(one) for one in again] == [type(one) for one in history]


def test_a_loss_of_nan_is_nan_again() -> None:
    assert math.isnan(unpacked(packed([math.nan], "<f8"))[0])


def test_a_manifest_of_the_format_before_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "FORMAT", 1)
    write_manifest(tmp_path, {"metrics": {"losses": [0.5, 0.25]}}, [])
    monkeypatch.undo()
    assert unpacked(read_manifest(tmp_path)["about"]["metrics"]["losses"]) == [0.5, 0.25]
