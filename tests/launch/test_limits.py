"""The memory limit of a job is a control group; where none can be made, one line says why."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from minidist.launch import limits
from minidist.launch.elastic_job import spawn_elastic
from minidist.launch.generation import Elastic
from minidist.launch.limits import Limits, MemoryLimit, own_group
from minidist.launch.spawning import spawn

KILLED = """
import os, pathlib, signal, sys
[group] = pathlib.Path(sys.argv[1]).glob("minidist-*")
if os.environ.get("RANK", "1") == "1":
    (group / "memory.events").write_text("low 0\\noom 1\\noom_kill 1\\n")
    os.kill(os.getpid(), signal.SIGKILL)
"""
"""A rank that ends as one of a group over its limit does."""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The folder of this process's group, in a hierarchy of files that looks like the kernel's."""
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory pids\n")
    (tmp_path / "cgroup.procs").touch()
    (tmp_path / "session").mkdir()
    return tmp_path / "session"


@pytest.fixture(autouse=True)
def no_wait_for_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's groups have no files that keep them from being removed."""
    monkeypatch.setattr(limits, "EMPTY_LIMIT", 0.0)


def test_a_group_beside_ours_has_the_limit_and_the_ranks(own: Path) -> None:
    memory = MemoryLimit(2 << 30, "2 GiB", own)
    assert memory.record()["enforced"] is False
    memory.begin()
    group = memory.group
    assert group is not None and group.parent == own.parent
    memory.enter(4711)
    assert [
        (group / name).read_text() for name in ("memory.max", "memory.swap.max", "cgroup.procs")
    ] == [str(2 << 30), "0", "4711"]
    (group / "memory.events").write_text("oom 3\noom_kill 2\noom_group_kill 0\n")
    for file in group.iterdir():  # but one, which a process of the group stands for
        if file.name != "memory.events":
            file.unlink()
    memory.end()
    assert memory.record() == {
        "bytes": 2 << 30,
        "enforced": True,
        "problem": None,
        "killed_processes": 2,
    }


def test_groups_of_killed_launchers_go_and_those_of_living_ones_stay(own: Path) -> None:
    (own.parent / "minidist-1-old").mkdir()
    first = MemoryLimit(1, "1 B", own)
    first.begin()
    assert first.group is not None and not (own.parent / "minidist-1-old").exists()
    second = MemoryLimit(1, "1 B", own)
    for file in first.group.iterdir():
        file.unlink()  # as the kernel's: only its lock and its processes keep it
    second.begin()
    assert first.group.exists() and second.group not in (None, first.group)
    gone = first.group
    first.end()
    assert not gone.exists()
    second.end()


def test_where_no_group_can_be_made_one_line_says_why(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own.parent / "cgroup.subtree_control").write_text("cpu pids\n")
    memory = MemoryLimit(2 << 30, "2 GiB", own)
    memory.begin()
    memory.enter(4711)
    memory.end()
    assert memory.record()["enforced"] is False and memory.look() == 0
    assert capsys.readouterr().err == (
        "minidist: --memory-limit 2 GiB is not enforced: the memory controller of cgroup v2 is "
        f"not available at {own}\n"
    )


def test_a_user_who_may_make_no_group_is_told(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    MemoryLimit(1, "1 B", own).begin()
    assert f"this user cannot make a control group in {own.parent}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("group", "mounts", "expected"),
    [
        (
            "0::/user.slice/a.scope",
            "30 20 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw",
            "/sys/fs/cgroup/user.slice/a.scope",
        ),
        (
            "12:pids:/x\n0::/",
            "30 20 0:26 / /sys/fs/cgroup/uni\\040fied rw - cgroup2 none rw",
            "/sys/fs/cgroup/uni fied",
        ),
        ("0::/docker/a/b", "30 20 0:26 /docker/a /cg rw - cgroup2 none rw", "/cg/b"),
        ("0::/../other", "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 none rw", None),
        ("4:memory:/x", "30 20 0:26 / /sys/fs/cgroup/memory rw - cgroup none rw,memory", None),
    ],
)
def test_the_group_of_this_process(
    group: str, mounts: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        limits, "_lines", lambda file: (group if "cgroup" in file else mounts).splitlines()
    )
    if expected is None:
        with pytest.raises(OSError, match="no control groups of version 2"):
            own_group()
    else:
        assert own_group() == Path(expected)


@pytest.mark.parametrize(
    ("group", "mounts", "expected"),
    [
        ("4:memory:/", "35 31 0:32 / {} rw - cgroup cgroup rw,memory", "."),
        ("9:cpu,memory:/a/b\n0::/", "35 31 0:32 /a {} rw - cgroup cgroup rw,cpu,memory", "b"),
        ("4:memory:/", "35 31 0:32 / {} rw - cgroup2 cgroup2 rw,memory", None),
        ("4:cpu:/", "35 31 0:32 / {} rw - cgroup cgroup rw,cpu", None),
    ],
)
def test_a_group_of_version_1(
    group: str, mounts: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "b").mkdir()
    monkeypatch.setattr(
        limits,
        "_lines",
        lambda file: (group if "cgroup" in str(file) else mounts.format(tmp_path)).splitlines(),
    )
    memory = MemoryLimit(2 << 30, "2 GiB")
    if expected is None:
        assert limits.first_version() is None
        return
    assert limits.first_version() == tmp_path / expected
    memory.begin()
    assert memory.group is not None and memory.group.parent == tmp_path / expected
    assert {file.name: file.read_text() for file in memory.group.iterdir()} == dict.fromkeys(
        ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"), str(2 << 30)
    )
    (memory.group / "memory.oom_control").write_text(
        "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n"
    )
    assert (
        Limits(memory=memory).how_it_ended(-signal.SIGKILL)
        == "was killed by the memory limit of 2 GiB"
    )
    memory.end()


def test_a_rank_killed_for_the_limit_is_told_as_that(
    own: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    memory = MemoryLimit(2 << 30, "2 GiB", own)
    assert (
        spawn(
            [sys.executable, "-S", "-c", KILLED, str(own.parent)], 2, limits=Limits(memory=memory)
        )
        == 137
    )
    [line] = [line for line in capfd.readouterr().err.splitlines() if "ends" in line]
    assert (
        line.startswith("minidist: rank 1 (process ")
        and "was killed by the memory limit of 2 GiB; the job" in line
    )
    assert memory.kills == 1


def test_a_process_of_an_elastic_job_too(own: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spawn_elastic(
        [sys.executable, "-S", "-c", KILLED, str(own.parent)],
        Elastic((1,)),
        limits=Limits(memory=MemoryLimit(2 << 30, "2 GiB", own)),
    )
    assert "was killed by the memory limit of 2 GiB" in capfd.readouterr().err


def test_another_kill_is_told_as_what_it_is(own: Path) -> None:
    memory = MemoryLimit(1, "1 B", own)
    memory.begin()
    assert Limits(memory=memory).how_it_ended(-signal.SIGKILL) == "was killed by SIGKILL"
    assert Limits().how_it_ended(3) == "exited with status 3 without goodbye"
    memory.end()


@pytest.mark.soak
def test_the_kernel_kills_a_rank_that_needs_more() -> None:
    """Needs a system that lets this user make a control group."""
    memory = MemoryLimit(256 << 20, "256 MiB")
    memory.begin()
    memory.end()
    if memory.problem:
        pytest.skip(memory.problem)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "minidist",
            "launch",
            "-n",
            "2",
            "--memory-limit",
            "256MiB",
            sys.executable,
            "-S",
            "-c",
            "all = bytearray(200 << 20); import time; time.sleep(30)",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 137 and "was killed by the memory limit of 256 MiB" in done.stderr
