"""Test what compilers built, kept: built once, found again, half of nothing, no wait for another's
build without an end."""

import contextlib
import fcntl
import os
from pathlib import Path

import pytest

from minidist.errors import KernelError
from minidist.kernels import cache


def test_what_was_built_is_found_again(tmp_path: Path) -> None:
    with cache.missing(tmp_path / "a" / "built.o") as new:
        assert new is not None
        new.write_text("once")
    with cache.missing(tmp_path / "a" / "built.o") as again:
        assert again is None
    assert (tmp_path / "a" / "built.o").read_text() == "once"


def test_a_build_that_fails_leaves_nothing_and_keeps_nobody_waiting(tmp_path: Path) -> None:
    """Not even where a child, forked meanwhile, has the lock's file open."""
    with pytest.raises(ValueError, match="wrong"), cache.missing(tmp_path / "built.o") as new:
        assert new is not None
        new.write_text("half")
        (lock,) = [
            int(fd) for fd in os.listdir("/proc/self/fd") if _leads(fd, tmp_path / "built.lock")
        ]
        copy = os.dup(lock)
        raise ValueError("wrong")
    assert [path.name for path in tmp_path.iterdir()] == ["built.lock"]
    with cache.missing(tmp_path / "built.o") as again:
        assert again is not None
        again.write_text("whole")
    os.close(copy)
    assert (tmp_path / "built.o").read_text() == "whole"


def _leads(fd: str, path: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}") == str(path)
    return False


def test_where_nothing_can_be_written_it_says_what_to_do() -> None:
    with (
        pytest.raises(
            KernelError, match=r"kept in /dev/null/kernels, and .*: Not a directory; set XDG_CACHE_"
        ),
        cache.missing(Path("/dev/null/kernels/built.o")),
    ):
        pass


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """This happens in a container whose user's number has no name."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 9)
    with pytest.raises(KernelError, match="this user has none; set XDG_CACHE_HOME"):
        cache.place("softmax", ".so")


def test_a_build_that_does_not_end_is_not_waited_for_without_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "LIMIT", 0.05)
    with open(tmp_path / "built.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with (
            pytest.raises(
                KernelError,
                match=r"building a kernel for 0\.05 s and holds .*built\.lock; end that",
            ),
            cache.missing(tmp_path / "built.o"),
        ):
            pass
