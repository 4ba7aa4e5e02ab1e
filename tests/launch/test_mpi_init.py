"""MPI_Init under mpirun when a rank does not come to it: one line names that rank, the job ends, no
memory stays."""

import os
import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import SOON
from jobs import finish, start
from leftovers import nothing_left

from minidist.errors import LaunchError
from minidist.launch import mpi_init
from minidist.launch.launchers import clean_environment
from minidist.launch.mpirun import find_mpirun

WAYS = {
    "raise": "raise ValueError('boom')",
    "missing": "import no_such_module",
    "exit 0": "sys.exit(0)",
    "exit 3": "sys.exit(3)",
    "_exit": "os._exit(0)",
    "kill": "os.kill(os.getpid(), 9)",
    "sleep": "time.sleep(60)",
    "compute": "while True: pass",
    "stop": "os.kill(os.getpid(), 19)",
    "no mpi4py": "sys.modules['mpi4py'] = None",
    "come": "",
}
PROGRAM = """
import os, sys, time
rank, victims = int(os.environ["PMI_RANK"]), {victims}
if rank in victims:
    time.sleep({after})
    {way}
import minidist as md
from minidist.launch import mpi_init
mapped = mpi_init.shared_memory
def noted(pid):
    names = mapped(pid)
    with open({notes!r}, "a") as file:
        file.writelines(name + "\\n" for name in names)
    return names
mpi_init.shared_memory = noted
world = md.init(limit={limit})
assert world.all_reduce(1.0) == world.size
"""


def job(folder, way, victims, size=3, *, limit=60.0, after=0.0, options=(), shell=False):
    """The finished job in which `victims` do as `way` says. MPICH's shared memory was seen, and no
    name of it stays."""
    notes = folder / "names"
    notes.unlink(missing_ok=True)
    program = PROGRAM.format(
        victims=victims, way=WAYS[way], after=after, notes=str(notes), limit=limit
    )
    (folder / "program.py").write_text(program)
    command = [sys.executable, str(folder / "program.py")]
    if shell:
        command = ["sh", "-c", f"{' '.join(command)}; exit $?"]
    with nothing_left() as environment:
        done = finish(start([*find_mpirun().command(size), *options, *command], environment))
    if way != "kill":  # mpirun may be quicker than they are
        assert notes.exists()
    for name in set(notes.read_text().split()) if notes.exists() else ():
        assert not os.path.exists(name)
    return done


def ours(done):
    """Return what minidist said: one line."""
    assert "Timeout (" not in done.stderr, done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("minidist: ")]
    return line


@pytest.mark.parametrize(
    ("way", "victim"), [("raise", 1), ("missing", 0), ("exit 0", 2), ("exit 3", 1)]
)
def test_a_rank_that_ends_before_mpi_init_is_named_at_once(way, victim, tmp_path):
    started = time.monotonic()
    done = job(tmp_path, way, [victim])
    assert time.monotonic() - started < SOON
    assert done.returncode > 0
    assert re.fullmatch(
        rf"minidist: rank {victim} of 3 ended on \S+ before md.init, .*; the job ends", ours(done)
    )
    assert ("boom" in done.stderr, "no_such_module" in done.stderr) == (
        way == "raise",
        way == "missing",
    )


def test_a_rank_that_sleeps_is_named_at_the_limit(tmp_path):
    done = job(tmp_path, "sleep", [1], limit=1.5)
    assert done.returncode > 0  # on a busy machine another rank may be late, too
    assert re.fullmatch(
        r"minidist: ranks? (0, )?1(, 2)? of 3 \((process \d+ .*, )?process \d+ sleeping.* on \S+\) did "
        r"not reach md.init within 1.5 s; the job ends",
        ours(done),
    )


# --- soak
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", ["raise", "missing", "exit 0", "exit 3", "_exit"])
def test_of_many_each_is_named(way, tmp_path):
    for number in range(20):
        size = (2, 3, 4)[number % 3]
        victim = number % size
        line = ours(
            job(tmp_path, way, [victim], size, after=0.3 * (number % 5), shell=number % 4 == 0)
        )
        assert line.startswith(f"minidist: rank {victim} of {size} ended on "), line


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("way", "state"), [("sleep", "sleeping"), ("compute", "running"), ("stop", "stopped")]
)
def test_of_many_that_do_not_come_each_is_named(way, state, tmp_path):
    for number in range(8):
        shell = number % 4 == 3
        line = ours(job(tmp_path, way, [number % 4], 4, limit=5, shell=shell))
        seen = "sleeping" if shell and way != "stop" else state
        assert re.match(rf"minidist: rank {number % 4} of 4 \(process \d+ {seen} on ", line)


@pytest.mark.parametrize("shell", [False, True])
def test_a_rank_that_is_stopped_is_named_long_before_the_limit(shell, tmp_path):
    line = ours(job(tmp_path, "stop", [1], limit=60, shell=shell))
    assert re.match(
        r"minidist: rank 1 of 3 \(process \d+ stopped on \S+\) did not reach md.init, where the others "
        "wait; the job ends",
        line,
    )


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_kill_leaves_no_memory(tmp_path):
    """mpirun ends the job, and says so; before and in MPI_Init."""
    for number in range(30):
        done = job(tmp_path, "kill", [number % 3], after=0.1 * (number % 15))
        assert done.returncode > 0
        assert "minidist: " not in done.stderr


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_late_but_in_time_is_no_failure(tmp_path):
    for number in range(10):
        done = job(tmp_path, "come", [number % 3], after=0.3 * number)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_several_ranks_of_many(tmp_path):
    line = ours(job(tmp_path, "exit 0", [3, 5, 11], 16))
    assert line.startswith("minidist: ranks 3, 5, 11 of 16 ended on ")
    line = ours(job(tmp_path, "sleep", [0, 15], 16, limit=20))
    assert re.match(
        r"minidist: ranks 0, 15 of 16 \(process \d+ sleeping, process \d+ sleeping on ", line
    )


@pytest.mark.soak
def test_without_mpi4py_on_one_rank(tmp_path):
    done = job(tmp_path, "no mpi4py", [1])
    assert re.search(r"^minidist: rank 1 stops: ModuleNotFoundError: .*mpi4py", done.stderr, re.M)
    assert re.search(r"^minidist: rank 1 of 3 ended on \S+ before md.init", done.stderr, re.M)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_ranks_of_several_hosts(tmp_path):
    """mpirun takes this host for two: each has an agent of its own."""
    hosts = ("-launcher", "fork", "-hosts", "one,two", "-ppn")
    for victim in range(4):
        line = ours(job(tmp_path, "raise", [victim], 4, options=(*hosts, "2")))
        assert line.startswith(f"minidist: rank {victim} of 4 ended on ")
    assert job(tmp_path, "come", [], 4, options=(*hosts, "2")).stderr == ""
    done = job(tmp_path, "sleep", [1], 4, limit=4, options=(*hosts, "2"))
    assert re.search(
        r"^minidist: rank 1 of 4 \(process \d+ sleeping on \S+\) did not reach", done.stderr, re.M
    )


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("shell", [False, True])
@pytest.mark.parametrize("way", ["raise", "exit 0", "exit 3"])
def test_a_rank_that_has_started_mpi_itself_and_ends_is_named_soon(
    way, shell, tmp_path, monkeypatch
):
    """Python then waits in MPI_Finalize; the limit ends the job."""
    monkeypatch.setitem(WAYS, way, f"import mpi4py.MPI; {WAYS[way]}")
    done = job(tmp_path, way, [1], limit=8, shell=shell)
    named, *rest = [line for line in done.stderr.splitlines() if line.startswith("minidist: ")]
    assert re.fullmatch(
        r"minidist: rank 1 of 3 on \S+ seems to end in MPI_Finalize without md.init, where the others "
        "wait: see its output",
        named,
    )
    assert any("rank 1 did not join" in line for line in rest)
    assert ("boom" in done.stderr) == (way == "raise")


@pytest.mark.soak
@pytest.mark.parametrize("after", ["", "import signal; signal.signal(2, signal.SIG_DFL); "])
def test_a_rank_that_has_started_mpi_itself_may_come_late(after, tmp_path, monkeypatch):
    """Also if its program leaves Ctrl-C to the system; then it is named, too."""
    monkeypatch.setitem(WAYS, "come", f"import mpi4py.MPI; {after}time.sleep(6)")
    done = job(tmp_path, "come", [1])
    assert (done.returncode, "seems to end" in done.stderr) == (0, bool(after))


@pytest.mark.soak
def test_a_rank_of_run_over_mpi(tmp_path):
    """The caller is told at once, too."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nif os.environ.get('PMI_RANK') == '1': os._exit(3)\n"
    )
    (tmp_path / "program.py").write_text(
        "import minidist as md\ndef f(world): return 1\nif __name__ == '__main__':\n"
        "    md.run(f, size=3, transport='mpi', limit=60)\n"
    )
    started = time.monotonic()
    with nothing_left() as environment:
        done = subprocess.run(
            [sys.executable, str(Path(tmp_path, "program.py"))],
            capture_output=True,
            text=True,
            timeout=50,
            env={**clean_environment(environment), "PYTHONPATH": str(tmp_path)},
        )
    assert time.monotonic() - started < 2 * SOON
    assert re.search(
        r"LaunchError: mpirun ended with 1, rank 0 without result: minidist: rank 1 of 3 ended on",
        done.stderr,
    )


@pytest.mark.soak
def test_where_nothing_is_known_of_the_others_the_limit_holds(tmp_path):
    """Under Open MPI, say: here a stand-in, whose MPI_Init does not end."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text(
        "from types import SimpleNamespace\nrc = SimpleNamespace(initialize=True)\n"
    )
    (tmp_path / "mpi4py" / "MPI.py").write_text(
        "import time\nGet_library_version = lambda: 'Open MPI v5'\nIs_initialized = lambda: False\n"
        "Is_finalized = lambda: False\nInit_thread = lambda: time.sleep(60)\n"
    )
    variables = {
        f"OMPI_COMM_WORLD_{name}": value
        for name, value in (("RANK", "1"), ("SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "2"))
    }
    with nothing_left() as environment:
        done = finish(
            start(
                [sys.executable, "-c", "import minidist as md; md.init(limit=0.2)"],
                environment,
                PYTHONPATH=str(tmp_path),
                **variables,
            )
        )
    assert (done.returncode, done.stderr) == (
        -9,
        "minidist: rank 1 of 2 waited 0.2 s in MPI_Init, which waits for "
        "every rank; which one is missing cannot be seen here; the job ends\n",
    )


# --- before MPI_Init
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["x", "", "-1", "²", "0x7", "99999", "9" * 30])
def test_a_number_that_is_no_socket_of_mpirun_is_refused(value, monkeypatch):
    with open(os.devnull) as nothing:
        monkeypatch.setenv("PMI_FD", value or str(nothing.fileno()))
        with pytest.raises(LaunchError, match="PMI_FD=.* is not the number of an open socket"):
            mpi_init.check_pmi()


def test_a_socket_of_mpirun_or_its_address_is_taken(monkeypatch):
    monkeypatch.delenv("PMI_FD", raising=False)
    monkeypatch.setenv("PMI_PORT", "node1:40000")
    mpi_init.check_pmi()
    for junk in ("x", "", "a b:1", "node1:"):
        monkeypatch.setenv("PMI_PORT", junk)
        with pytest.raises(LaunchError, match="PMI_PORT=.* needs the form host:port"):
            mpi_init.check_pmi()
    with socket.socket() as sock:
        monkeypatch.setenv("PMI_FD", str(sock.fileno()))
        mpi_init.check_pmi()


@pytest.mark.parametrize(
    ("ranks", "free", "told"),
    [
        (4, 1 << 20, "MPICH needs 4.0 MiB of /dev/shm for 4 ranks on "),
        (16, 16 << 20, "16.2 MiB of /dev/shm for 16 ranks"),
        (4, 8 << 20, "^posix"),
        (16, 64 << 20, "^posix"),
        (2, 16 << 20, "^posix"),
        (2, 64 << 20, None),
        (16, 100 << 20, None),
    ],
)
def test_where_dev_shm_is_small_ucx_keeps_off_it_or_mpich_is_not_begun(
    ranks, free, told, monkeypatch, tmp_path
):
    """MPICH 5.0.2 dies there: of SIGBUS without room for its own part; of SIGSEGV in UCX, if ranks
    race for theirs."""
    environ = {}
    monkeypatch.setattr(mpi_init, "SHM", str(tmp_path))
    monkeypatch.setattr(mpi_init.os, "environ", environ)
    monkeypatch.setattr(
        mpi_init.os, "statvfs", lambda folder: SimpleNamespace(f_bavail=free // 4096, f_frsize=4096)
    )
    if told and told != "^posix":
        with pytest.raises(LaunchError, match=told.replace("/dev/shm", str(tmp_path))):
            mpi_init.make_room(ranks)
        (tmp_path / "mpich_shm_1_0").touch()  # of another rank of this job, which has its room
        assert mpi_init.shortage(ranks) == ""
        return
    mpi_init.make_room(ranks)
    assert environ == ({"UCX_TLS": told} if told else {})
    environ["UCX_TLS"] = "tcp"
    mpi_init.make_room(ranks)
    assert environ == {"UCX_TLS": "tcp"}


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("kibibytes", "ranks", "ends"),
    [
        (1024, 4, "MPICH needs 4.0 MiB of /dev/shm for 4 ranks on "),
        (65536, 16, ""),
        (16384, 2, ""),
        (28672, 4, ""),
    ],
)
def test_jobs_in_a_small_dev_shm(kibibytes, ranks, ends, tmp_path):
    """In a namespace of mounts of its own, which needs root."""
    (tmp_path / "program.py").write_text(
        "import minidist as md\nworld = md.init()\nassert world.all_reduce(1.0) > 1\n"
    )
    mpirun = shlex.join(
        [*find_mpirun().command(ranks), sys.executable, str(tmp_path / "program.py")]
    )
    mount = f"mount -t tmpfs -o size={kibibytes}k tmpfs /dev/shm && exec {mpirun}"
    with nothing_left() as environment:
        done = finish(start(["unshare", "--mount", "sh", "-c", mount], environment), 100)
    assert (done.returncode, ends in done.stderr) == (2 if ends else 0, True), done.stderr
