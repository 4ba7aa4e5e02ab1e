"""Whatever keeps ranks waiting ends with an error that names it: on every transport, within a
second."""

import ctypes
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from conformance import recv, send
from hanging import WAYS, disagree, drawn, hang, patient
from helpers import MIXED, SOON, lateness, run
from leftovers import nothing_left
from linked import swallow

import minidist as md
from minidist import errors
from minidist.comm.health import acceptor, process_state
from minidist.errors import CommError, DeadlockError, LinkLostError, MismatchError, PeerLostError
from minidist.launch.launchers import clean_environment

RING = "a ring of receives"
SENDS = "a ring of sends"
MESSAGE = "one rank in a message"
MISSING = "one rank not calling"
QUICK = {
    "threads": (
        "group",
        "order",
        MISSING,
        "one rank in a message, the others in started calls",
        "a receive from oneself",
    ),
    "threads-unbuffered": (RING, SENDS),
    "tcp": ("group", MESSAGE, RING, SENDS),
    "shm": (MESSAGE, MISSING),
    "mpi": ("group",),
}
"""What the default run tries: mostly what no message shows."""


def ways():
    return [
        pytest.param(transport, way, marks=() if way in quick else pytest.mark.soak)
        for transport, quick in QUICK.items()
        for way in WAYS
    ]


@pytest.mark.sampled(every=14)
@pytest.mark.parametrize(("transport", "way"), ways())
def test_ranks_that_wait_in_vain_learn_why(transport, way):
    if way == "a ring of sends" and transport == "threads":
        run(hang, way, size=3, transport=transport)  # its sends are buffered, and complete at once
        return
    started = time.monotonic()
    with pytest.raises(getattr(errors, WAYS[way].error)) as caught:
        run(hang, way, size=3, transport=transport)
    assert re.search(WAYS[way].says, str(caught.value)), str(caught.value)
    # mpirun's ranks start Python first
    assert transport == "mpi" or time.monotonic() - started < SOON


# --- ranks that disagree at random
# -----------------------------------------------------------------------------------


def check_disagreements(count, seed, transports):
    """Every one ends in MismatchError that shows both calls."""
    draw = random.Random(seed)
    for number in range(count):
        case = drawn(draw)
        transport = draw.choice(transports)
        with pytest.raises(MismatchError) as caught:
            run(disagree, case, size=case["size"], transport=transport)
            pytest.fail(f"{number}: not caught on {transport}: {case}")
        text = str(caught.value)
        calls = re.findall(
            r"^  rank (\d) calls \w+\(.*\), its call \d+, at \S*hanging\.py:\d+", text, re.M
        )
        assert len(calls) == 2, f"{transport}: {case}: {text}"
        assert str(case["odd"]) in calls or case["size"] > 2, f"{transport}: {case}: {text}"


def test_random_disagreements():
    check_disagreements(6, 5, ("threads", "threads-unbuffered", "tcp", "shm"))


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_two_hundred_random_disagreements():
    check_disagreements(
        200, 6, ("threads", "threads-unbuffered", "tcp", "shm", "tcp", "shm", "mpi")
    )


# --- waits that are long, and not in vain
# ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "rounds"),
    [
        ("tcp", 0),
        *(
            pytest.param(name, 60, marks=(pytest.mark.soak, pytest.mark.timeout(300)))
            for name in ("threads", "threads-unbuffered", "tcp", "shm", "mpi")
        ),
    ],
)
def test_long_waits_are_not_taken_for_vain(transport, rounds):
    """Messages of 0.3 s, so that in nearly every round all ranks wait for what is in flight."""
    assert len(run(patient, 0.3, rounds, 7, size=4, transport=transport, limit=200.0)) == 4


def exchange_slowly(world):
    """Each sends the other more than a link holds and waits for that first; its receive takes 0.6
    s, piece by piece."""
    other = 1 - world.rank
    n = 3 << 20
    total = np.zeros(n)
    until = time.monotonic() + 0.6

    def add(target, start, piece):
        if time.monotonic() < until:
            time.sleep(0.03)
        target[start : start + len(piece)] += piece

    arriving = recv(world, other, 1, total, add)
    send(world, other, 1, np.full(n, world.rank + 1.0)).wait()
    arriving.wait()
    assert (total == other + 1).all()


@pytest.mark.sampled
@pytest.mark.parametrize(
    "transport",
    [
        "tcp",
        "shm",
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("threads-unbuffered", "mpi")),
    ],
)
def test_a_send_that_is_being_taken_is_not_in_vain(transport):
    """However slowly: no message is taken whole, and none begun, while both wait for the other to
    take one."""
    run(exchange_slowly, size=2, transport=transport)


# --- frozen ranks
# ----------------------------------------------------------------------------------------------------


def freezes(world, folder):
    """Rank 1 stops; the others write down what they learn, and after how many seconds."""
    world.barrier()
    started = time.monotonic()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        world.all_reduce(np.ones(3), algorithm="ring")
    except PeerLostError as error:
        with open(f"{folder}/{world.rank}", "w") as file:
            file.write(f"{time.monotonic() - started:.3f} {os.getpid()} {error}")
        raise


@pytest.mark.parametrize(
    "transport",
    [
        "tcp",
        pytest.param("shm", marks=pytest.mark.soak),
        pytest.param("mpi", marks=pytest.mark.soak),
    ],
)
def test_a_frozen_rank_is_lost_within_three_seconds_and_nothing_stays(transport, tmp_path):
    with (
        nothing_left(),
        lateness() as late,
        pytest.raises(PeerLostError, match=r"rank 1 \(process \d+ on \S+\) is frozen \(stopped\)"),
    ):
        run(freezes, str(tmp_path), size=4, transport=transport)
    for rank in (0, 2, 3):
        seconds, _, text = (tmp_path / str(rank)).read_text().split(" ", 2)
        assert float(seconds) < 3 + 4 * max(late), text
        assert re.search(
            rf"^rank 1 \(process \d+ on \S+\) is frozen \(stopped\); rank {rank} was in all_reduce\(.*\), "
            r"its call 2, at \S*test_never_hangs.py:\d+",
            text,
        ), text


def pauses(world, seconds):
    """Rank 1 is stopped now and then, and goes on, while all work."""
    if world.rank == 1 and (pid := os.getpid()) and os.fork() == 0:
        for pause in seconds:
            time.sleep(0.1)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(pause)
            os.kill(pid, signal.SIGCONT)
        os._exit(0)
    until = time.monotonic() + sum(seconds) + 0.2 * len(seconds)
    while world.all_reduce(float(world.rank == 1 and time.monotonic() < until)):
        pass
    return "done"


@pytest.mark.parametrize(
    ("transport", "seconds"),
    [
        ("shm", [0.9]),
        *(
            pytest.param(transport, [0.5, 0.6, 0.7, 1.0, 1.3] + [1.5] * 15, marks=pytest.mark.soak)
            for transport in ("tcp", "shm", "mpi")
        ),
    ],
)
def test_a_rank_that_is_stopped_for_a_moment_goes_on(transport, seconds):
    assert run(pauses, seconds, size=3, transport=transport, limit=60) == ["done"] * 3


@pytest.mark.parametrize("patience", [0.4, pytest.param(4.0, marks=pytest.mark.soak)])
def test_the_patience_is_an_option(patience, tmp_path):
    with nothing_left(), pytest.raises(PeerLostError, match=r"rank 1 .* is frozen"):
        md.run(freezes, str(tmp_path), size=2, transport="tcp", patience=patience)
    seconds = float((tmp_path / "0").read_text().split()[0])
    assert patience - 0.4 < seconds < (1.7 if patience < 1 else SOON)


DEBUGGERS = {
    # the rank stands still until gdb has gone
    "gdb": ["gdb", "-q", "-nx", "-batch", "-ex", "shell sleep 4", "-p"],
    # it runs, and stops at each system call
    "strace": ["timeout", "4", "strace", "-f", "-o", "/dev/null", "-p"],
}


def is_debugged(world, command):
    """A debugger holds rank 1 for 4 s while all work; rank 0 returns the kernel's letters for it
    meanwhile."""
    # PR_SET_PTRACER, any: where Yama forbids
    ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)
    pids = world.all_gather([os.getpid()]).tolist()
    letters = []
    over = []

    def debug():
        with subprocess.Popen(
            [*command, str(pids[1])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as debugger:
            while debugger.poll() is None:
                if "TracerPid:\t0\n" not in Path(f"/proc/{pids[1]}/status").read_text():
                    letters.append(process_state.state_of(pids[1]))
                time.sleep(0.1)
        over.append(True)

    if world.rank == 0:
        threading.Thread(target=debug, daemon=True).start()
    while not world.all_reduce(float(bool(over)), op="max"):
        time.sleep(0.01)
    return "".join(letters)


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["tcp", "shm", "mpi"])
@pytest.mark.parametrize("debugger", sorted(DEBUGGERS))
def test_a_rank_that_a_debugger_holds_goes_on(debugger, transport):
    """For longer than a rank may be stopped."""
    if shutil.which(debugger) is None:
        pytest.skip(f"{debugger} is not installed")
    letters, *_ = run(is_debugged, DEBUGGERS[debugger], size=2, transport=transport, limit=60)
    assert len(letters) > 20, "it was held"
    assert debugger != "gdb" or set(letters[1:-1]) == {"t"}


@pytest.mark.soak
@pytest.mark.parametrize("launcher", ["mpirun", "minidist launch"])
@pytest.mark.parametrize("debugger", ["gdb -q -nx -batch -ex run --args", "strace -f -o /dev/null"])
def test_ranks_that_debuggers_start(debugger, launcher, tmp_path):
    """From before md.init to the end of the process."""
    if shutil.which(debugger.split()[0]) is None:
        pytest.skip(f"{debugger.split()[0]} is not installed")
    script = tmp_path / "job.py"
    script.write_text(
        "import minidist as md; print(f'sum {md.init(limit=60).all_reduce(1.0)}\\n', end='')"
    )
    command = [
        *shlex.split(launcher),
        "-n",
        "2",
        *shlex.split(debugger),
        sys.executable,
        str(script),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=110,
        env=clean_environment(os.environ),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 2.0") == 2
    assert "minidist: " not in done.stderr


def holds_the_interpreter(world):
    """One long call during which no other thread of rank 1 runs."""
    if world.rank == 1:
        ctypes.PyDLL(None).usleep(1_300_000)
    return float(world.all_reduce(1.0))


def test_a_rank_that_computes_in_one_long_call_is_not_frozen():
    assert run(holds_the_interpreter, size=2, transport="tcp") == [2.0, 2.0]


# --- links that break between ranks that live
# ------------------------------------------------------------------------


def loses_a_link(world, folder, verb, how):
    """In the midst of calls, rank 1's connection to rank 2 is reset, or shut; every rank writes
    down what it learns."""
    world.barrier()
    transport = world.transport
    if world.rank == 1:
        sock = (
            transport._connections[2]
            if transport.name == "plain-tcp"
            else transport._peers[2].link._sock
        )
        # to AF_UNSPEC: RST leaves
        end = {
            "reset": lambda: ctypes.CDLL(None).connect(sock.fileno(), bytes(16), 16),
            "shut": lambda: sock.shutdown(socket.SHUT_RDWR),
            "swallow": lambda: swallow(sock),
        }[how]
        threading.Timer(0.02, end).start()
    try:
        while True:
            getattr(world, verb)(np.ones(1000), algorithm="ring")
            world.start_all_reduce(np.ones(1000), algorithm="ring").wait()
    except CommError as error:
        (Path(folder) / str(world.rank)).write_text(f"{type(error).__name__} {error}")
        raise


@pytest.mark.parametrize(
    ("transport", "verb", "how"),
    [
        ("tcp", "all_reduce", "reset"),
        ("tcp", "all_reduce", "swallow"),
        ("plain-tcp", "all_reduce", "swallow"),
        ("tcp", "all_reduce", "swallow unasked"),
        ("plain-tcp", "all_reduce", "swallow unasked"),
        *(
            pytest.param(transport, verb, how, marks=pytest.mark.soak)
            for transport in ("tcp", "plain-tcp", "shm")
            for how in ("reset", "shut")
            for verb in ("all_reduce", "all_gather")
            if (transport, how) != ("shm", "reset")
        ),
    ],
)
def test_a_link_that_breaks_is_no_deadlock_and_both_ends_are_named(
    transport, verb, how, tmp_path, monkeypatch
):
    # a deadlock is seen within 0.2
    monkeypatch.setattr("minidist.comm.transports.progress.engine._HEARSAY", 0.5)
    monkeypatch.setattr(acceptor, "SILENCE", 2.0)
    if how.endswith("unasked"):
        let_no_kernel_ask(monkeypatch)
    with nothing_left(), pytest.raises(LinkLostError):
        run(loses_a_link, str(tmp_path), verb, how.partition(" ")[0], size=4, transport=transport)
    for rank in range(4):
        kind, text = (tmp_path / str(rank)).read_text().split(" ", 1)
        assert re.search(r"the link between rank (1 and rank 2|2 and rank 1) is lost", text), text
        assert kind in (
            ("LinkLostError", "PeerLostError") if rank in (1, 2) else ("PeerLostError",)
        ), text


def let_no_kernel_ask(monkeypatch):
    """Begin keep-alive after hours, as is usual: only the ranks themselves can find a link that is
    silent."""
    usual = acceptor._set_tcp
    monkeypatch.setattr(
        acceptor,
        "_set_tcp",
        lambda sock, name, value: usual(sock, name, 7200 if name == "TCP_KEEPIDLE" else value),
    )


def one_way(world, folder):
    """Rank 1 sends and rank 2 receives; then the link between them swallows what rank 2 sends, or
    all."""
    for number in range(1_000_000):
        if number == 3 and world.rank == 1:
            swallow(world.transport._peers[2].link._sock)
        try:
            if world.rank == 1:
                world.send(np.ones(1 << 18), dst=2)
            elif world.rank == 2:
                world.recv(src=1)
            else:
                world.recv(src=2)
        except CommError as error:
            (Path(folder) / str(world.rank)).write_text(f"{type(error).__name__} {error}")
            raise


def test_a_link_that_acknowledges_nothing_is_named_by_the_sender(tmp_path, monkeypatch):
    """The receiver hears all that is sent, but for what is no longer sent."""
    monkeypatch.setattr(acceptor, "SILENCE", 2.0)
    let_no_kernel_ask(monkeypatch)
    with nothing_left(), pytest.raises(LinkLostError):
        run(one_way, str(tmp_path), size=3, transport="tcp")
    for rank in (1, 2):
        text = (tmp_path / str(rank)).read_text()
        assert re.search(r"the link between rank (1 and rank 2|2 and rank 1) is lost", text), text


def options(world):
    """Of every TCP connection of this rank: whether the kernel asks if the other side is there, and
    its patience in ms with what it does not acknowledge."""
    world.barrier()
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(name))
            with socket.socket(fileno=copy) as sock:
                if (
                    sock.family == socket.AF_INET
                    and sock.type == socket.SOCK_STREAM
                    and sock.getpeername()
                ):
                    found.append(
                        (
                            sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                            sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
                        )
                    )
        except OSError:
            continue
    return found


@pytest.mark.parametrize("transport", ["tcp", "plain-tcp", MIXED])
def test_the_kernel_watches_every_connection(transport):
    for found in run(options, size=4, transport=transport):
        assert len(found) == {"tcp": 4, "plain-tcp": 4, MIXED: 3}[transport]
        assert all(asks for asks, _ in found)
        of_data = [0] * (len(found) - 1)  # their other side may read nothing while it computes
        assert sorted(patience for _, patience in found) == [*of_data, 1000 * acceptor.SILENCE]


# --- ranks that leave while others still need them
# -------------------------------------------------------------------

LEFT = "waits for 1 at .*rank 1 has ended|lost rank 1: it has left the job"
"""What a rank is told: of its wait, or of a link that ended in the midst of a send."""


def goes_on_sending(world):
    """Rank 1 returns; the others send to it until their links break, as they do once its transport
    is closed."""
    world.barrier()
    while world.rank != 1:
        world.send(np.ones(100_000), dst=1)


@pytest.mark.parametrize("transport", ["tcp", "plain-tcp", "shm"])
def test_a_rank_that_left_is_no_broken_network(transport):
    with nothing_left(), pytest.raises((DeadlockError, PeerLostError), match=LEFT):
        run(goes_on_sending, size=3, transport=transport)


def in_the_midst(world, verb, numbers, delay):
    """Rank 1 returns after a moment, while the others are in calls that need it, until one cannot
    end."""
    world.barrier()
    if world.rank == 1:
        time.sleep(delay)
        return
    array = np.ones(numbers)
    while True:
        if verb == "send":
            world.send(array, dst=1)
        elif verb == "recv":
            world.recv(src=1)
        elif verb == "all_to_all":
            world.all_to_all([array] * world.size)
        else:
            world.all_reduce(array, algorithm=verb)


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["tcp", "plain-tcp", "shm", "mpi"])
def test_two_hundred_ranks_that_leave(transport):
    draw = random.Random(transport)
    # MPI takes short messages that nobody will receive
    sends = [] if transport == "mpi" else ["send"]
    for number in range(200):
        verb = draw.choice(
            [*sends, "recv", "all_to_all", "auto", "ring", "direct", "tree", "pairwise"]
        )
        case = (
            verb,
            draw.choice([10, 3000, 100_000, 1_000_000]),
            draw.choice([0, 0.001, 0.01, 0.1]),
        )
        with pytest.raises((DeadlockError, PeerLostError), match=LEFT):
            run(in_the_midst, *case, size=draw.choice([2, 3, 4]), transport=transport)
            pytest.fail(f"{number}: {case} went well")
