"""The manifest: histories in it, and manifests of the format before."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

from minidist.errors import CheckpointError
from minidist.parallel.state.manifest import (
    MANIFEST,
    packed,
    read_manifest,
    unpacked,
    write_manifest,
)


@pytest.mark.parametrize(
    ("dtype", "history"),
    [("<f8", [0.1, 2.0**-1074, -math.inf]), ("<i4", [0, 1, 2**31 - 1]), ("<f8", [])],
)
def test_a_history_has_the_same_bits_again(dtype: str, history: list[Any], tmp_path: Path) -> None:
    write_manifest(tmp_path, {"metrics": {"losses": packed(history, dtype)}}, [])
    again = unpacked(read_manifest(tmp_path)["about"]["metrics"]["losses"])
    assert again == history and [type(one) for one in again] == [type(one) for one in history]


def test_a_loss_of_nan_is_nan_again() -> None:
    assert math.isnan(unpacked(packed([math.nan], "<f8"))[0])


@pytest.mark.parametrize("kind", [1, 2])
def test_a_manifest_of_a_format_before_is_read(kind: int, tmp_path: Path) -> None:
    """And checked: its digest is of the content, and its text is that of json.dumps(indent=1)."""
    content = {"format": kind, "about": {"metrics": {"losses": [0.5, 1e-7]}}, "shards": []}
    digest = hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()
    text = json.dumps(content | {"digest": digest}, indent=1)
    (tmp_path / MANIFEST).write_text(text)
    assert unpacked(read_manifest(tmp_path)["about"]["metrics"]["losses"]) == [0.5, 1e-7]
    (tmp_path / MANIFEST).write_text(text.replace("1e-07", "1E-07"))
    with pytest.raises(CheckpointError, match="its digest differs"):
        read_manifest(tmp_path)


def test_a_changed_byte_is_seen(tmp_path: Path) -> None:
    write_manifest(tmp_path, {"text": "abc"}, [])
    path = tmp_path / MANIFEST
    path.write_bytes(path.read_bytes().replace(b"abc", b"abd"))
    with pytest.raises(CheckpointError, match="its digest differs"):
        read_manifest(tmp_path)


def test_reading_makes_no_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON took 19 of 22 ms, on each rank that continues from a checkpoint."""
    write_manifest(tmp_path, {"text": "é"}, [])
    monkeypatch.setattr(
        json, "dumps", lambda *_, **__: pytest.fail("it compares with a text of its own")
    )
    assert read_manifest(tmp_path)["about"] == {"text": "é"}
