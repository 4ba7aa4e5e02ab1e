"""What compilers built, kept: built once, found again, and no wait for another's build without an end."""

import fcntl
from pathlib import Path

import pytest
from minidist.kernels import cache

from minidist.errors import KernelError


def test_what_was_built_is_found_again(tmp_path: Path) -> None:
    with cache.missing(tmp_path / "a" / "built.o") as new:
        assert new is not None
        new.write_text("once")
    with cache.missing(tmp_path / "a" / "built.o") as again:
        assert again is None
    assert (tmp_path / "a" / "built.o").read_text() == "once"


def test_a_build_that_does_not_end_is_not_waited_for_without_a_limit(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "LIMIT", 0.05)
    with open(tmp_path / "built.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with (pytest.raises(KernelError, match=r"building a kernel for 0\.05 s and holds .*built\.lock; end that"),
              cache.missing(tmp_path / "built.o")):
            pass
