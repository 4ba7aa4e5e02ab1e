"""md.init under other launchers: mpirun, and the variables of torchrun and srun; nobody hangs,
nobody stays."""

import contextlib
import functools
import importlib.util
import os
import re
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import SOON
from jobs import JOB, by_hand, by_mpirun, finish, free_port, met, slurm, start, torchrun
from leftovers import nothing_left

import minidist as md
from minidist.comm.health.failure import Failure, within
from minidist.errors import LaunchError, PeerLostError
from minidist.launch import membership
from minidist.launch.mpirun import find_mpirun

WHO = r"rank 2 \(process \d+ on \S+\)"


# --- alone
# -----------------------------------------------------------------------------------------------------------


def python(environment, code, **variables):
    return finish(start([sys.executable, "-c", code], environment, **variables))


@pytest.fixture(scope="module")
def alone():
    """A process alone: its world, in a line; and what is loaded when it has begun, in another."""
    code = (
        "import sys, minidist as md; w = md.init(); assert md.init() is w\n"
        "loaded = sorted({'mpi4py.MPI', 'cupy', 'torch', 'matplotlib'} & set(sys.modules))\n"
        "print(w.rank, w.size, w.all_reduce(2.0), w.all_gather([1, 2])); print(*loaded)"
    )
    with nothing_left() as environment:
        return python(environment, code)


def test_alone_there_is_a_world_of_one(alone):
    assert (alone.stdout.splitlines()[0], alone.stderr) == ("0 1 2.0 [1 2]", "")


def test_importing_minidist_loads_neither_mpi_nor_cupy(alone):
    assert alone.stdout.splitlines()[1:] == [""]


def test_launcher_monitor_and_node_agent_start_without_numpy():
    """Also while they work: with plain messages, and a job that ends well."""
    code = (
        "import sys\nimport minidist.cli.launch, minidist.comm.health.node_agent, "
        "minidist.launch.joining\n"
        "from minidist.comm import wire\nsaid = {'kind': ('seen', {1}), 'how': None}\n"
        "assert wire.unpack(wire.pack(said)) == said\n"
        "from minidist.launch.spawning import spawn\nassert spawn(['true'], 1) == 0\n"
        "print(*sorted({'numpy', 'ml_dtypes', 'mpi4py', 'rich', 'threadpoolctl'} & "
        "set(sys.modules)))"
    )
    with nothing_left() as environment:
        done = python(environment, code)
    assert (done.stdout, done.stderr) == ("\n", "")


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize(
    ("code", "variables", "says"),
    [
        ("md.init(transport='tpc')", {}, "did you mean 'tcp'"),
        (
            "__import__('sys').modules['cupy'] = None; md.init(transport='nccl')",
            {},
            "CuPy, which is not installed",
        ),
        ("md.init()", {"RANK": "1", "WORLD_SIZE": "2"}, "LOCAL_RANK is missing"),
        (
            "md.init()",
            {"PMI_RANK": "3", "PMI_SIZE": "2"},
            "PMI_RANK is set, as mpich does, but MPI_LOCALRANKID is missing",
        ),
        ("md.init()", {**torchrun(1), "MINIDIST_TOKEN": "short"}, "fewer than 16 characters"),
        (
            "md.init(limit=0.3)",
            {**torchrun(1, port="1"), "MINIDIST_TOKEN": "x" * 20},
            "could not reach the job's",
        ),
    ],
)
def test_what_cannot_work_is_a_launch_error(code, variables, says):
    with nothing_left() as environment:
        code = f"import minidist as md\ntry: {code}\nexcept md.errors.MinidistError as e: print(e)"
        done = python(environment, code, **variables)
    assert says in done.stdout
    assert done.stdout.count("\n") == 1


def test_blas_threads_are_shared_among_the_ranks():
    import threadpoolctl

    def threads(world):
        return max(
            (
                library["num_threads"]
                for library in threadpoolctl.threadpool_info()
                if library["user_api"] == "blas"
            ),
            default=1,
        )

    before = threads(None)
    cores = len(os.sched_getaffinity(0))
    assert md.run(threads, size=2, transport="tcp") == [max(1, cores // 2)] * 2
    assert threads(None) == before
    with threadpoolctl.threadpool_limits(before):
        assert membership.limit_blas_threads(1, 2) == 1
        assert threads(None) == 1
    assert threads(None) == before


def test_four_variables_by_hand_make_a_job():
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT alone, as operators of clusters set them for
    torch's env://."""
    port = free_port()
    with nothing_left() as environment:
        ranks = by_hand(
            environment,
            "ok",
            size=2,
            variables=lambda rank: {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
        )
        done = [finish(rank) for rank in ranks]
    assert [(one.returncode, one.stderr) for one in done] == [(0, "")] * 2
    assert [one.stdout.splitlines()[0] for one in done] == [
        f"hello from {rank} of 2 over shm" for rank in range(2)
    ]


# --- mpirun
# ----------------------------------------------------------------------------------------------------------


# tests/cli/train/test_command.py runs under mpirun, and nothing is said that should not be
@pytest.mark.soak
@pytest.mark.parametrize("transport", ["mpi", "shm", "tcp"])
def test_mpirun_starts_a_job(transport):
    with nothing_left() as environment:
        done = finish(
            by_mpirun(environment, "ok", *([] if transport == "mpi" else [transport]), size=2)
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [
        *(f"goodbye from {rank}" for rank in range(2)),
        *(f"hello from {rank} of 2 over {transport}" for rank in range(2)),
    ]


@pytest.mark.parametrize("transport", ["mpi", pytest.param("tcp", marks=pytest.mark.soak)])
def test_an_exception_under_mpirun_ends_the_job_everywhere(transport):
    with nothing_left() as environment:
        process = by_mpirun(environment, "raise", transport)
        failed = met(process)
        done = finish(process)
    assert time.monotonic() - failed < 8
    assert done.returncode == 1
    assert re.search(
        r"^minidist: rank 2 of 3 \(process \d+ on \S+\) failed:\nTraceback", done.stderr, re.M
    )
    assert done.stderr.count("Traceback") == done.stderr.count("ValueError: boom\n") - 2 == 1
    for rank in (0, 1):
        assert re.search(
            f"^minidist: rank {rank} stops: PeerLostError: {WHO} failed with ValueError: boom$",
            done.stderr,
            re.M,
        )
    assert "MPI" not in done.stderr, "MPI's own message about its abort is noise"


@pytest.mark.soak
def test_a_busy_rank_does_not_hold_up_the_end_under_mpirun():
    """The rank that fails aborts MPI: in MPI_Finalize it would wait until the busy one is ended by
    force."""
    with nothing_left() as environment:
        done = finish(by_mpirun(environment, "busy"))
    assert done.returncode == 1
    assert "was still busy" not in done.stderr
    assert "ValueError: boom" in done.stderr


@pytest.mark.sampled(every=16)
@pytest.mark.parametrize("transport", ["mpi", pytest.param("shm", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("mode", "how"),
    [
        ("kill", "was killed"),
        ("exit", "exited with status 3"),
        pytest.param("raise exit", "exited with status 5", marks=pytest.mark.soak),
        pytest.param("raise exit 256", "exited with status 256", marks=pytest.mark.soak),
        pytest.param("imported exit", "exited with status 5", marks=pytest.mark.soak),
        pytest.param("module exit", "exited with status 5", marks=pytest.mark.soak),
        pytest.param("stop", "is frozen", marks=pytest.mark.soak),
        pytest.param("_exit", "exited|ended", marks=pytest.mark.soak),
    ],
)
def test_a_death_under_mpirun_ends_the_job_and_is_named(transport, mode, how):
    with nothing_left() as environment, no_segment_left():
        process = by_mpirun(environment, mode, transport)
        died = met(process)
        done = finish(process)
    assert time.monotonic() - died < 8
    status = {"exit": 3, "raise exit": 5, "imported exit": 5, "module exit": 5}
    assert done.returncode == status.get(mode, max(1, done.returncode))
    assert re.search(f"^minidist: {WHO} .*({how}).*; the job ends$", done.stderr, re.M)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_of_thirty_killed_under_mpirun_each_is_named_once():
    """mpirun mostly kills the survivors before they have said why; the monitor, which it does not
    know of, has."""
    survivors = 0
    for number in range(30):
        victim = number % 3
        with nothing_left() as environment:
            done = finish(by_mpirun(environment, "kill", ("mpi", "shm")[number % 2], str(victim)))
        line = rf"^minidist: rank {victim} \(process \d+ on \S+\) was killed.*; the job ends$"
        assert len(re.findall(line, done.stderr, re.M)) == 1, done
        survivors += len(re.findall(rf"stops: PeerLostError: rank {victim} ", done.stderr))
    print(f"{survivors} of 60 survivors said so, too")


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["mpi", "shm"])
def test_behind_a_shell_the_survivors_of_a_kill_speak_under_mpirun(transport):
    """Lesson 01 says so: without the option, or the shell, mpirun kills them first."""
    text = (
        Path(__file__)
        .parents[2]
        .joinpath("lessons/01_launching/README.md")
        .read_text(encoding="utf-8")
    )
    [behind] = re.findall(r"^mpirun -disable-auto-cleanup -n 4 sh -c '(.*)'$", text, re.M)
    program = behind.replace(
        "python lessons/01_launching/lesson.py", f"{sys.executable} {JOB} kill {transport}"
    )
    assert JOB in program
    with nothing_left() as environment:
        done = finish(
            start([*find_mpirun().command(4, patient=True), "sh", "-c", program], environment)
        )
    assert done.returncode == 1
    for rank in (0, 1, 3):
        assert re.search(
            f"^minidist: rank {rank} stops: PeerLostError: {WHO} (was killed|ended)",
            done.stderr,
            re.M,
        )


def test_what_a_stopping_rank_says_of_the_lost_one():
    """Who it was and how, and before it what the strategy calls it."""
    loss = Failure(3, 77, "host", "was killed by SIGKILL", "Traceback", 1)
    named = PeerLostError(f"parameter server 0 of 1 is lost: {loss}; rank 0 was in recv()\nmore", 3)
    for error, before in (
        (loss.error(), ""),
        (ArithmeticError("x"), ""),
        (named, "parameter server 0 of 1 is lost: "),
    ):
        assert within(loss, error) == f"{before}rank 3 (process 77 on host) was killed by SIGKILL"


@pytest.mark.parametrize("mode", ["all config"])
def test_bad_input_under_mpirun_is_one_line(mode):
    with nothing_left() as environment:
        done = finish(by_mpirun(environment, mode, size=2))
    assert (done.returncode, done.stderr) == (2, "minidist: no such text; try another\n")


LATE = """
import sys, time
if "minidist.comm.health.rendezvous" in sys.orig_argv:
    from minidist.comm.health.monitor import Monitor as where
    name, seconds = "_admit", 0.3
else:
    from minidist.comm.health.monitor_client import MonitorClient as where
    name, seconds = "_take", 0.1
at_once = getattr(where, name)
def late(self, *arguments):
    rank = arguments[1].get("world_rank") if name == "_admit" else self.world_rank
    time.sleep(seconds if rank == 0 else 0.0)
    at_once(self, *arguments)
setattr(where, name, late)
"""


@pytest.mark.soak
def test_bad_input_is_one_line_also_when_rank_0_comes_late_and_hears_late(tmp_path):
    """When it comes, the others have failed and ended; what the monitor says reaches it after its
    own report."""
    (tmp_path / "sitecustomize.py").write_text(LATE)
    train = [sys.executable, "-m", "minidist", "train", "--offload=all", "--offload-dir=/absent"]
    with nothing_left() as environment:
        done = finish(
            start([*find_mpirun().command(4), *train], {**environment, "PYTHONPATH": str(tmp_path)})
        )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr


@pytest.mark.parametrize("early", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_mpich_leaves_no_shared_memory_when_it_is_killed(early):
    """Also not when ranks end before they have met: bad input is found before md.init. Deaths above
    ask it, too."""
    with nothing_left() as environment, no_segment_left():
        if early:
            train = [
                sys.executable,
                "-m",
                "minidist",
                "train",
                "--offload=all",
                "--offload-dir=/absent",
            ]
            done = finish(start([*find_mpirun().command(2), *train], environment))
            assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        else:
            finish(by_mpirun(environment, "kill", "mpi", "1", size=2))


@contextlib.contextmanager
def no_segment_left():
    """MPICH has no shared memory after the block that it had not before."""
    before = set(os.listdir("/dev/shm"))
    yield
    deadline = time.monotonic() + SOON
    while (left := unused_segments() - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def unused_segments():
    """MPICH's that no process has mapped. Another job of this machine may just have made its own,
    or be about to unlink it."""
    names = {name for name in os.listdir("/dev/shm") if "mpich" in name}
    used = "".join(maps_of(folder) for folder in Path("/proc").glob("[0-9]*"))
    return {name for name in names if name not in used}


def maps_of(folder):
    with contextlib.suppress(OSError):
        return (folder / "maps").read_text(errors="replace")
    return ""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "minidist"


def openmpi(rank, size=2, job=None):
    """Return what Open MPI's mpirun sets; MPICH's library would end the process in MPI_Init on
    PMIX_RANK."""
    return {
        "OMPI_COMM_WORLD_RANK": f"{rank}",
        "OMPI_COMM_WORLD_SIZE": f"{size}",
        "PMIX_RANK": f"{rank}",
        "OMPI_COMM_WORLD_LOCAL_RANK": f"{rank}",
        "OMPI_COMM_WORLD_LOCAL_SIZE": f"{size}",
        "PMIX_NAMESPACE": job or f"test-{os.getpid()}",
    }


@pytest.mark.parametrize(
    ("transport", "is_given"),
    [
        ("shm", False),
        *(pytest.param(transport, True, marks=pytest.mark.soak) for transport in ("tcp", "shm")),
    ],
)
def test_ranks_of_another_mpis_mpirun_run_over_host_transports(transport, is_given, cache):
    """Open MPI's mpirun, and mpi4py with MPICH. A transport that was not chosen is told once."""
    with nothing_left() as environment:
        done = [
            finish(process)
            for process in by_hand(
                environment, "ok", *[transport] * is_given, size=2, variables=openmpi
            )
        ]
    assert [process.returncode for process in done] == [0, 0]
    for rank, process in enumerate(done):
        assert f"hello from {rank} of 2 over {transport}" in process.stdout
        assert bool(
            re.fullmatch(
                "minidist: Open MPI's mpirun started these 2 ranks, but mpi4py has MPICH .*; "
                "taking "
                r"transport auto .*\n",
                process.stderr,
            )
        ) == (rank == 0 and not is_given)
    assert list(cache.iterdir()) == []


def test_ranks_of_another_mpis_mpirun_do_not_touch_mpi(cache):
    with nothing_left() as environment:
        done = [
            finish(process)
            for process in by_hand(environment, "ok", "mpi", size=2, variables=openmpi)
        ]
    assert [process.returncode for process in done] == [2, 2]
    assert re.fullmatch(
        r"minidist: transport 'mpi': Open MPI's mpirun started these 2 ranks, but mpi4py has MPICH .*; "
        r"take auto, tcp or shm, .*\n",
        "".join(process.stderr for process in done),
    )


@pytest.mark.soak  # the test before has a refusal of all ranks in one line
def test_ranks_of_another_mpis_mpirun_that_does_not_name_its_job(cache):
    with nothing_left() as environment:
        done = [
            finish(process)
            for process in by_hand(
                environment,
                "ok",
                "tcp",
                size=2,
                variables=lambda rank: {**openmpi(rank), "PMIX_NAMESPACE": ""},
            )
        ]
    assert [process.returncode for process in done] == [2, 2]
    assert (
        "".join(process.stderr for process in done).count("does not name its job (PMIX_NAMESPACE)")
        == 1
    )


@pytest.mark.soak
@pytest.mark.skipif(
    shutil.which("mpirun.openmpi") is None, reason="needs Debian's package openmpi-bin"
)
@pytest.mark.parametrize(("mode", "transport"), [("ok", "tcp"), ("raise", "shm"), ("kill", "tcp")])
def test_open_mpis_own_mpirun(mode, transport, cache):
    with nothing_left() as environment:
        done = finish(
            start(
                [
                    "mpirun.openmpi",
                    "--oversubscribe",
                    "-n",
                    "3",
                    sys.executable,
                    JOB,
                    mode,
                    transport,
                ],
                environment,
                OMPI_ALLOW_RUN_AS_ROOT="1",
                OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
            )
        )
    assert (done.returncode == 0) == (
        mode == "ok"
    ) and f"hello from 2 of 3 over {transport}" in done.stdout
    # a killed rank's loss is told by us, unless mpirun ends the others sooner: then by its own
    # lines
    says = {
        "ok": "",
        "raise": "ValueError: boom",
        "kill": r"was killed by SIGKILL|exited on signal 9",
    }
    assert re.search(says[mode], done.stderr) and "PMI" not in done.stderr


@pytest.mark.soak
def test_a_foreign_mpirun_that_starts_worlds_of_one_is_refused():
    """MPICH's variables without its sockets, as another MPI's library sees them."""
    with nothing_left() as environment:
        done = [
            finish(process)
            for process in by_hand(
                environment,
                "ok",
                size=2,
                variables=lambda rank: {
                    "PMI_RANK": f"{rank}",
                    "PMI_SIZE": "2",
                    "MPI_LOCALRANKID": f"{rank}",
                    "MPI_LOCALNRANKS": "2",
                },
            )
        ]
    assert [process.returncode for process in done] == [2, 2]
    said = "".join(process.stderr for process in done)
    assert re.fullmatch(
        r"minidist: mpirun started 2 ranks, but mpi4py \(.*\) sees 1: that mpirun belongs to "
        r"another MPI.*\n",
        said,
    )


@pytest.mark.soak
@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            {},
            r"srun started 2 tasks, but mpi4py \(.*\) sees 1: give srun --mpi=pmi2 for MPICH, --mpi=pmix for Open MPI, "
            "or ",
        ),
        (
            {"PMIX_NAMESPACE": "slurm.pmix.1.0"},
            "srun --mpi=pmix started 2 tasks, but mpi4py has MPICH .*: give srun "
            "--mpi=pmi2 for MPICH, or ",
        ),
    ],
    ids=["none", "pmix"],
)
def test_srun_that_starts_worlds_of_one_is_refused_where_mpi_is_asked_for(more, says, cache):
    """srun does so with --mpi=none; with --mpi=pmix MPICH's library would end each task in
    MPI_Init."""
    with nothing_left() as environment:
        done = [
            finish(process)
            for process in by_hand(
                environment, "ok", "mpi", size=2, variables=lambda rank: {**slurm(rank, 2), **more}
            )
        ]
    assert [process.returncode for process in done] == [2, 2]
    assert re.fullmatch(
        f"minidist: {says}use transport auto\n", "".join(process.stderr for process in done)
    )


# --- torchrun and srun, by their variables
# ---------------------------------------------------------------------------


# another MPI's ranks, above, meet by a file; those of torchrun and srun, below, lose a rank
@pytest.mark.soak
@pytest.mark.parametrize("variables", [torchrun, slurm], ids=["torchrun", "srun"])
def test_ranks_meet_by_a_private_file(variables, cache):
    more = {"port": free_port()} if variables is torchrun else {}
    variables = functools.partial(variables, size=2, **more)
    with nothing_left() as environment:
        done = [
            finish(process) for process in by_hand(environment, "ok", size=2, variables=variables)
        ]
    assert [process.returncode for process in done] == [0, 0], done
    assert [process.stderr for process in done] == [""] * 2
    for rank, process in enumerate(done):
        assert process.stdout == f"hello from {rank} of 2 over shm\ngoodbye from {rank}\n"
    assert list(cache.iterdir()) == []


def test_a_death_under_srun_is_named(cache):
    with nothing_left() as environment:
        done = [
            finish(process)
            for process in by_hand(
                environment, "kill", "shm", "1", size=2, variables=functools.partial(slurm, size=2)
            )
        ]
    assert [process.returncode for process in done] == [1, -9]
    who = WHO.replace("rank 2", "rank 1")
    assert re.search(f"^minidist: {who} .*killed.*; the job ends$", done[0].stderr, re.M)
    assert re.search(f"^minidist: rank 0 stops: PeerLostError: {who}", done[0].stderr, re.M)


# test_spawning.py has it of our launcher, test_joining.py the monitor without rank 0
@pytest.mark.soak
@pytest.mark.parametrize("mode", ["stop", "sleep"])
@pytest.mark.parametrize(
    ("variables", "victim"), [(slurm, 2), (slurm, 0), (torchrun, 0), (torchrun, 2)]
)
def test_a_rank_that_hangs_after_its_goodbye_is_ended(variables, victim, mode, cache):
    """Rank 0 has ended when rank 2 is found; its monitor has not."""
    if variables is torchrun:
        variables = functools.partial(torchrun, port=free_port())
    with nothing_left() as environment:
        done = [
            finish(process, 20)
            for process in by_hand(
                environment, f"after {mode}", "shm", str(victim), size=3, variables=variables
            )
        ]
    assert [process.returncode for process in done] == [
        (-9 if mode == "stop" else -14) if rank == victim else 0 for rank in range(3)
    ]
    assert mode == "sleep" or re.fullmatch(
        rf"minidist: rank {victim} .* is frozen \(stopped\); the job ends\n", done[0].stderr
    )


def test_the_job_ends_when_rank_0_is_killed():
    code = (
        "import os, minidist as md; w = md.init(limit=20); w.barrier()\n"
        "if w.rank == 0: os.kill(os.getpid(), 9)\n"
        "w.recv(src=1 - w.rank if w.rank else 1)"
    )
    port = free_port()
    with nothing_left() as environment:
        processes = [
            start(
                [sys.executable, "-c", code],
                environment,
                MINIDIST_TOKEN="x" * 20,
                **torchrun(rank, 2, port),
            )
            for rank in range(2)
        ]
        done = [finish(process) for process in processes]
    assert [process.returncode for process in done] == [-9, 1]
    assert re.search(
        r"rank 1 stops: PeerLostError: rank 0 \(process \d+ on \S+\) .*killed", done[1].stderr
    )


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="torchrun itself comes with extra bench; its variables are tested above",
)
@pytest.mark.soak
def test_torchrun_itself(cache):
    from jobs import BIN, JOB

    with nothing_left() as environment:
        done = finish(
            start([str(BIN / "torchrun"), "--nproc-per-node", "3", JOB, "ok"], environment), 60
        )
    assert done.returncode == 0
    np.testing.assert_equal(done.stdout.count("hello from"), 3)


def test_init_in_a_process_that_could_not_join(monkeypatch):
    monkeypatch.setattr(membership, "_membership", membership.Membership(md.launch.detect({})))
    with pytest.raises(LaunchError, match="start the job again"):
        md.init()


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    "data", [["missing"] * 3, ["python", "python", "missing"]], ids=["everywhere", "on one rank"]
)
def test_bad_input_before_init_is_one_line_and_nobody_waits(data):
    """A rank that ends before MPI_Init would leave the others in it for ever; it joins to say why
    it ends."""
    code = (
        "import os, sys; from minidist.cli import main; rank = int(os.environ['PMI_RANK'])\n"
        f"data = {data!r}[rank]\n"
        "sys.exit(main(['train', '--steps', '1000', '--quiet', '--data', data]))"
    )
    with nothing_left() as environment:
        done = finish(start([*find_mpirun().command(3), sys.executable, "-c", code], environment))
    assert done.returncode == 2
    assert re.fullmatch("minidist train: .*missing.*\n", done.stderr)


@pytest.mark.soak  # tests/cli/train/test_command.py has another mistake under mpirun
def test_a_wrong_command_line_under_mpirun_is_one_line():
    with nothing_left() as environment:
        done = finish(
            start(
                [*find_mpirun().command(2), sys.executable, "-m", "minidist", "trian"], environment
            )
        )
    assert done.returncode == 2
    assert re.fullmatch("minidist: .* did you mean train.*\n", done.stderr)
