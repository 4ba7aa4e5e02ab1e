"""A rank is killed in any phase of joining or leaving: every survivor names it, nobody else;
nothing stays."""

import random
import re
import signal
import sys
import time

import pytest
from ends import LEAVING, PHASES, die_at
from helpers import SOON
from jobs import JOB, by_launch, by_mpirun, finish, start
from leftovers import nothing_left

from minidist.errors import PeerLostError
from minidist.launch import failures, forked
from minidist.launch.mpirun import find_mpirun

FORKED = [("tcp", phase, 0) for phase in PHASES] + [("shm", phase, 1) for phase in PHASES]
ONLY_SHM = ("before it gives memory", "before all agree on memory")
NOT_FIRST = (
    "before it dials",
    "after it dialled",
    "in a peer's handshake",
    "after a peer's handshake",
)
"""Rank 0 dials nobody; plain-tcp neither by this function."""
UNKNOWN = ("before init", "in the monitor's handshake", "after goodbye", "closing")
"""Where mpirun alone knows of a rank's end."""


def reaches(transport, phase, victim, size):
    """Return whether that rank comes to that phase."""
    return not (
        phase in ONLY_SHM
        and transport != "shm"
        or phase in NOT_FIRST
        and victim == 0
        or phase in (*NOT_FIRST[:2], "closing")
        and transport == "plain-tcp"
        or transport == "mpi"
        and phase in (*NOT_FIRST, "before it admits")
        or phase == "before it admits"
        and victim == size - 1
    )


def arm(monkeypatch, folder, victim, begin):
    """The victim begins with `begin()`; every other forked rank notes what it raises."""
    run_rank = forked._run_rank
    encode = failures.encode
    ranks = []

    def run(rank, job, fn, args):
        ranks.append(rank)
        if rank == victim:
            begin()
        return run_rank(rank, job, fn, args)

    def note(error):
        (folder / str(ranks[0])).write_text(
            f"{type(error).__name__} {getattr(error, 'world_rank', None)} {error}"
        )
        return encode(error)

    monkeypatch.setattr(forked, "_run_rank", run)
    monkeypatch.setattr(failures, "encode", note)


def check_forked(folder, transport, size, victim, *, nodes=(), everybody=False, calls=3):
    """A job whose victim is killed. `everybody`: all others must have noticed."""
    with nothing_left(), pytest.raises(PeerLostError) as caught:
        start = time.monotonic()
        forked.run_forked(
            lambda world: [world.barrier() for _ in range(calls)] and None,
            (),
            size=size,
            transport=transport,
            limit=20,
            nodes=nodes,
        )
    assert time.monotonic() - start < SOON
    told = rf"rank {victim} \(process \d+ on \S+\) was killed by SIG(KILL|ALRM)"
    assert re.match(told, str(caught.value))
    survivors = {path.name: path.read_text() for path in folder.iterdir()}
    for text in survivors.values():
        assert re.match(f"PeerLostError {victim} {told}", text), text
    assert not everybody or survivors.keys() == {str(rank) for rank in range(size)} - {str(victim)}


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(
    ("transport", "phase", "victim"), [case for case in FORKED if reaches(*case, 3)]
)
def test_a_rank_killed_in_any_phase_is_named_by_all(
    transport, phase, victim, tmp_path, monkeypatch
):
    arm(monkeypatch, tmp_path, victim, lambda: die_at(phase))
    check_forked(tmp_path, transport, 3, victim, everybody=phase not in LEAVING)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("transport", "nodes"), [("tcp", ()), ("shm", ()), ("plain-tcp", ()), ("auto", (0, 0, 1, 1, 1))]
)
def test_any_rank_of_five_in_any_phase(transport, nodes, tmp_path, monkeypatch):
    for phase in PHASES:
        for victim in (0, 2, 4):
            if reaches(transport, phase, victim, 5) and not (nodes and phase in NOT_FIRST):
                folder = tmp_path / f"{phase} {victim}".replace("'", "")
                folder.mkdir()
                with monkeypatch.context() as patch:
                    arm(patch, folder, victim, lambda phase=phase: die_at(phase))
                    check_forked(
                        folder, transport, 5, victim, nodes=nodes, everybody=phase not in LEAVING
                    )


@pytest.mark.soak
def test_a_hundred_kills_while_ranks_join(tmp_path, monkeypatch):
    draw = random.Random(7)
    for number in range(100):
        folder = tmp_path / str(number)
        victim = draw.randrange(5)
        after = draw.uniform(0.002, 0.12)
        folder.mkdir()

        def begin(after=after):
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which kills
            signal.setitimer(signal.ITIMER_REAL, after)

        with monkeypatch.context() as patch:
            arm(patch, folder, victim, begin)
            check_forked(folder, draw.choice(("tcp", "shm", "plain-tcp")), 5, victim, calls=10**6)


@pytest.mark.parametrize(
    ("phase", "victim", "transport"),
    [
        ("before init", 2, "mpi"),
        *(
            pytest.param(phase, victim, transport, marks=pytest.mark.soak)
            for phase in PHASES
            if phase not in LEAVING
            for victim in (0, 2)
            for transport in ("mpi", "shm")
            if reaches(transport, phase, victim, 4)
        ),
    ],
)
def test_behind_a_shell_a_rank_killed_early_is_named_under_mpirun(phase, victim, transport):
    """Lesson 01 says so: mpirun then neither hears of it nor ends the others."""
    behind = f'trap "" USR1; {sys.executable} {JOB} "killed {phase}" {transport} {victim}; exit $?'
    with nothing_left() as environment:
        started = time.monotonic()
        done = finish(
            start([*find_mpirun().command(4, patient=True), "sh", "-c", behind], environment)
        )
    assert time.monotonic() - started < SOON
    assert done.returncode > 0
    named = rf"^minidist: (rank \d stops: PeerLostError: )?rank {victim} (of|\()"
    assert re.search(named, done.stderr, re.M), done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("by", [by_launch, by_mpirun])
@pytest.mark.parametrize("transport", ["tcp", "shm", "mpi"])
def test_under_launchers(by, transport):
    if by is by_launch and transport == "mpi":
        return
    for phase in [phase for phase in PHASES if by is by_launch or phase not in UNKNOWN]:
        for victim in (0, 2):
            if not reaches(transport, phase, victim, 4) or (
                transport == "mpi" and phase in NOT_FIRST
            ):
                continue
            with nothing_left() as environment:
                job = finish(by(environment, f"killed {phase}", transport, str(victim), size=4))
            assert job.returncode != 0
            named = re.findall(
                r"minidist: rank (\d) (\(process \d+ on|stops: PeerLostError: rank (\d))",
                job.stderr,
            )
            assert {lost or rank for rank, _, lost in named} <= {str(victim)}, job.stderr
            assert named, job.stderr
            assert not re.search(r"HandshakeError|CommError|Traceback|Timeout", job.stderr), (
                job.stderr
            )
