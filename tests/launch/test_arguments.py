"""Test what md.run and md.init are given: a value that cannot be meant is refused in one line,
before anything starts."""

import math
import os
import resource
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

import minidist as md
from minidist.errors import LaunchError, TimeoutError
from minidist.launch import arguments

SECONDS = (math.inf, math.nan, -1, 0, 0.0, "5", None, True, 1e300, 10**400, 10**5000, [1], b"5", 1j)
WORDS = (None, 3, b"tcp", ["tcp"], float, "", "x", "TCP", "tcp ")
COUNTS = (2.5, 2.0, True, False, -1, 0, "4", None, [2], math.nan, 10**9, 10**5000)


class Odd:
    """Its repr() fails."""

    def __repr__(self) -> str:
        raise ValueError("no")


def rank(world: Any) -> int:
    return int(world.rank)


def refused(**given: Any) -> str:
    """The message of md.run with these options."""
    with pytest.raises(LaunchError) as caught:
        md.run(rank, **{"size": 2, "transport": "threads", **given})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200
    return str(caught.value)


@pytest.mark.parametrize("transport", ["threads", "tcp", "mpi"])
def test_what_run_cannot_take_is_one_line(transport: str) -> None:
    for value in (*SECONDS, Odd()):
        for name in ("limit", "patience"):
            assert f"run({name}=" in refused(transport=transport, **{name: value})
    for value in (*COUNTS, Odd()):
        assert "run(size=" in refused(transport=transport, size=value)


def test_what_names_no_transport_or_is_no_function_is_one_line() -> None:
    for value in (*WORDS, Odd()):
        assert "transport" in refused(transport=value)
    with pytest.raises(LaunchError, match=r"run\('rank'\): a function is expected"):
        md.run("rank", size=2)  # type: ignore[arg-type]


def test_what_init_cannot_take_is_one_line() -> None:
    for value in (*SECONDS, Odd()):
        for name in ("limit", "patience"):
            with pytest.raises(LaunchError, match=rf"init\({name}="):
                md.init(**{name: value})
    for value in {*map(str, COUNTS[:6])} | {2.5, -1, 0, True}:
        with pytest.raises(LaunchError, match=r"init\(threads="):
            md.init(threads=value)  # type: ignore[arg-type]
    md.init()
    for value in WORDS[1:]:
        with pytest.raises(LaunchError, match="transport"):
            md.init(transport=value)  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers() -> None:
    assert md.run(rank, size=np.int64(2), limit=np.float32(20)) == [0, 1]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "transport", ["threads", "threads-unbuffered", "auto", "tcp", "shm", "plain-tcp", "mpi"]
)
def test_init_inside_of_run_returns_the_world_of_the_run(transport: str) -> None:
    assert md.run(rank_and_init, size=2, transport=transport) == [[True, 2, 0], [True, 2, 1]]


def rank_and_init(world: Any) -> list[Any]:
    return [md.init() is world, md.init(limit=5.0).size, md.init(transport=None).rank]


def test_init_inside_of_a_run_inside_of_a_run() -> None:
    def outer(world: Any) -> list[Any]:
        inner = md.run(lambda group: md.init().size, size=3)
        return [inner, md.init() is world]

    assert md.run(outer, size=2) == [[[3, 3, 3], True]] * 2
    assert md.run(outer, size=1, transport="tcp") == [[[3, 3, 3], True]]
    assert md.init().size == 1


def test_init_inside_of_run_over_another_transport_is_refused() -> None:
    with pytest.raises(LaunchError, match="this is a rank of md.run, which joined over 'threads'"):
        md.run(lambda world: md.init(transport="shm"), size=1)


def test_run_where_stdout_and_stderr_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        patch.setattr(sys, "stderr", None)
        found = [
            md.run(rank, size=2, transport=transport) for transport in ("threads", "tcp", "shm")
        ]
    assert found == [[0, 1]] * 3


@pytest.mark.parametrize(
    ("left", "size", "helpers", "told"),
    [
        (100, 4, 0, ""),
        (100, 32, 0, "run\\(size=32\\) needs about 260 MiB of address space .* leaves 100 MiB"),
        (60, 4, 3, ""),
        (59, 4, 3, "needs about 60 MiB"),
        (-5, 1, 0, "leaves 0 MiB"),
    ],
)
def test_a_limit_of_address_space_is_told_before_a_thread_finds_no_room(
    left: int, size: int, helpers: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {resource.RLIMIT_AS: 1000 << 20, resource.RLIMIT_STACK: 8 << 20}
    monkeypatch.setattr(arguments.resource, "getrlimit", lambda what: (limits[what], -1))
    monkeypatch.setattr(arguments, "_address_space", lambda: (1000 - left) << 20)
    if told:
        with pytest.raises(LaunchError, match=told):
            arguments.check_room(size, helpers=helpers)
    else:
        arguments.check_room(size, helpers=helpers)


@pytest.mark.parametrize("transport", ["threads", "tcp"])
def test_run_under_a_limit_of_address_space(transport: str) -> None:
    code = (
        "import resource, minidist as md, minidist.launch.forked, minidist.comm.transports.auto\n"
        "now = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (now + (20 << 20), -1))\n"
        f"md.run(lambda world: 1, size=4, transport={transport!r}, limit=20)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "LaunchError: run(size=4) needs about" in done.stderr.splitlines()[-1]


def test_a_system_that_refuses_a_thread_or_a_copy_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`ulimit -u` has this effect, except on root. Ranks that have begun are ended."""
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "rank 2":
            raise RuntimeError("can't start new thread")
        begin(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(
            LaunchError, match="rank 2 of 4 cannot be started as a thread .can't start new thread."
        ):
            md.run(lambda world: world.barrier(), size=4)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]

    def fork() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fork)
    with pytest.raises(
        LaunchError,
        match="this process cannot be copied for a rank .Resource temporarily unavailable",
    ):
        md.run(rank, size=2, transport="tcp")


def test_the_limit_of_run_counts_from_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are still to be forked when the limit arrives are named, and never started."""
    monkeypatch.setattr("minidist.launch.forked.Forked", None)
    with pytest.raises(TimeoutError, match="2 of 2 ranks"):
        md.run(rank, size=2, transport="tcp", limit=1e-9)
