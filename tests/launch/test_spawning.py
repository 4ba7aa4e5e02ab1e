"""minidist launch and its ranks: whatever one rank does, the job ends soon, says who it was, and
leaves nothing."""

import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest
from jobs import JOB, by_launch, by_mpirun, finish, free_port, met, start
from leftovers import nothing_left

from minidist.errors import LaunchError
from minidist.launch.mpirun import find_mpirun
from minidist.launch.spawning import Nodes, spawn

WHO = r"rank 2 \(process \d+ on \S+\)"


def test_every_rank_finds_its_variables():
    names = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "GROUP_RANK",
        "MASTER_ADDR",
    )
    script = (
        f"import os; values = [os.environ[name] for name in {names!r}]\n"
        "os.write(1, f'{values} {int(os.environ[\"MASTER_PORT\"]) > 0}\\n'.encode())"
    )
    with nothing_left() as environment:
        done = finish(
            start(
                [
                    sys.executable,
                    "-m",
                    "minidist",
                    "launch",
                    "-n",
                    "3",
                    sys.executable,
                    "-c",
                    script,
                ],
                environment,
                PMI_RANK="7",
                OMPI_COMM_WORLD_SIZE="9",
            )
        )
    assert sorted(done.stdout.splitlines()) == [
        f"{[str(rank), '3', str(rank), '3', '0', '0', '127.0.0.1']} True" for rank in range(3)
    ]
    assert done.returncode == 0


@pytest.mark.soak  # tests/cli/test_launch.py runs one, and nothing else is said
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_job_runs_and_says_nothing_else(transport):
    with nothing_left() as environment:
        done = finish(by_launch(environment, "ok", transport, size=2))
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [
        *(f"goodbye from {rank}" for rank in range(2)),
        *(f"hello from {rank} of 2 over {transport}" for rank in range(2)),
    ]


@pytest.mark.soak  # tests/comm/transports/test_auto.py has it of forked ranks
def test_the_name_of_before_is_told_once_a_job():
    with nothing_left() as environment:
        done = finish(by_launch(environment, "ok", "sockets", size=2))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("FutureWarning: transport 'sockets' is called 'tcp' now") == 1
    assert done.stdout.count("of 2 over tcp") == 2


@pytest.mark.soak
@pytest.mark.parametrize("by", [by_launch, by_mpirun])
def test_a_child_that_a_rank_forks_ends_without_a_word(by):
    """It has the rank's connections, and runs its hooks and its atexit: they are not the
    child's."""
    with nothing_left() as environment:
        done = finish(by(environment, "forks", size=2))
    assert (done.returncode, done.stdout.count("goodbye from")) == (0, 2), done.stderr
    assert done.stderr.count("ValueError: boom") == done.stderr.count("Traceback") == 2
    assert "minidist:" not in done.stderr


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(
    ("mode", "status", "how"),
    [
        ("kill", 137, "was killed by SIGKILL"),
        ("exit", 3, "exited with status 3"),
        ("exit 256", 1, "exited with status 256"),
        ("raise exit 256", 1, "exited with status 256"),
        pytest.param("raise exit", 5, "exited with status 5", marks=pytest.mark.soak),
        pytest.param("imported exit", 5, "exited with status 5", marks=pytest.mark.soak),
        pytest.param("module exit", 5, "exited with status 5", marks=pytest.mark.soak),
        pytest.param("_exit", 3, "exited with status 3 without goodbye", marks=pytest.mark.soak),
        pytest.param("stop", 137, r"is frozen \(stopped\)", marks=pytest.mark.soak),
        pytest.param("term", 143, "was killed by SIGTERM", marks=pytest.mark.soak),
    ],
)
def test_a_rank_that_dies_is_named_once_and_by_each_survivor(mode, status, how):
    with nothing_left() as environment:
        process = by_launch(environment, mode)
        died = met(process)
        done = finish(process)
    assert time.monotonic() - died < 8
    assert done.returncode == status
    assert len(re.findall(f"^minidist: {WHO} {how}; the job ends$", done.stderr, re.M)) == 1
    for rank in (0, 1):
        prefix = "" if rank == 0 else rf"\[rank {rank}\] "
        line = f"^{prefix}minidist: rank {rank} stops: PeerLostError: {WHO} {how}$"
        assert len(re.findall(line, done.stderr, re.M)) == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("by", [by_launch, pytest.param(by_mpirun, marks=pytest.mark.soak)])
def test_a_started_call_that_nobody_waits_for_fails_the_job_all_the_same(by):
    with nothing_left() as environment:
        done = finish(by(environment, "unwaited", size=2))
    assert done.returncode == 1
    assert "ignored" not in done.stderr
    assert (
        len(
            re.findall(r"minidist: rank \d of 2 \(process \d+ on \S+\) failed:$", done.stderr, re.M)
        )
        == 1
    )
    assert "MismatchError: ranks disagree in shape" in done.stderr


# test_membership.py has it under mpirun; a started call that fails, above, shows its error
@pytest.mark.soak
def test_an_exception_is_shown_once_with_its_traceback():
    with nothing_left() as environment:
        done = finish(by_launch(environment, "raise"))
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert re.search(
        r"^\[rank 2\] minidist: rank 2 of 3 \(process \d+ on \S+\) failed:$", done.stderr, re.M
    )
    assert re.search(r"^\[rank 2\] ValueError: boom$", done.stderr, re.M)
    assert len(re.findall("stops: PeerLostError", done.stderr)) == 2


# test_ranks_that_chose_different_transports: an error of all ranks is one line, too
@pytest.mark.soak
@pytest.mark.parametrize("mode", ["config", "all config"])
def test_bad_input_is_one_line_and_status_2(mode):
    with nothing_left() as environment:
        # rank 2 has "config"
        done = finish(by_launch(environment, mode, size=3 if mode == "config" else 2))
    assert done.returncode == 2
    assert re.fullmatch(r"(\[rank \d\] )?minidist: no such text; try another\n", done.stderr)


def test_ranks_that_chose_different_transports():
    with nothing_left() as environment:
        done = finish(by_launch(environment, "mixed", size=2))
    assert done.returncode == 2
    assert re.fullmatch(
        r"(\[rank \d\] )?minidist: the ranks chose different transports: shm, tcp.*\n", done.stderr
    )


def test_a_rank_that_neither_waits_nor_ends_is_ended():
    with nothing_left() as environment:
        process = by_launch(environment, "stubborn")
        died = met(process)
        done = finish(process)
    assert time.monotonic() - died < 8
    assert done.returncode == 137
    assert "rank 1 was still busy 0.5 s after rank 2" in done.stderr


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("mode", "status", "how"),
    [
        ("stop", 137, r"is frozen \(stopped\)"),
        ("sleep", 142, "was killed by SIGALRM: its end took more than 30 s"),
        pytest.param("kill", 137, "was killed by SIGKILL", marks=pytest.mark.soak),
    ],
)
def test_a_rank_that_hangs_after_its_goodbye_ends_the_job(mode, status, how):
    with nothing_left() as environment:
        done = finish(by_launch(environment, f"after {mode}", "shm", "1", size=2), 20)
    assert done.returncode == status
    assert re.fullmatch(
        rf"minidist: rank 1 \(process \d+ on \S+\) {how}; the job ends\n", done.stderr
    )


@pytest.mark.soak
@pytest.mark.parametrize("patient", [False, True])
@pytest.mark.parametrize("mode", ["stop", "sleep", "kill"])
def test_a_rank_that_hangs_after_its_goodbye_ends_the_job_under_mpirun(mode, patient):
    """`patient`: as lesson 01 has it, mpirun kills nobody; those in MPI_Finalize have a limit of
    their own."""
    with nothing_left() as environment:
        done = finish(
            start(
                [*find_mpirun().command(3, patient=patient), sys.executable, JOB, f"after {mode}"],
                environment,
            ),
            20,
        )
    assert done.returncode > 0
    assert ("minidist: rank 2 " in done.stderr) == (mode == "stop"), done.stderr


TOLD = r"minidist: the launcher \(process {pid} on \S+\) was told to stop by {name}; its {ranks} ended\n"


def ranks_of(process):
    """The ranks that the launcher has started, when they are there."""
    deadline = time.monotonic() + 20
    while not (ranks := psutil.Process(process.pid).children()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return ranks


# the next two tests have the line: SIGINT as programs load, SIGTERM to ranks of another program
@pytest.mark.soak
@pytest.mark.parametrize(
    ("number", "everybody"),
    [
        (signal.SIGINT, False),
        (signal.SIGTERM, False),
        pytest.param(signal.SIGINT, True, id="ctrl-c"),
    ],
)
def test_a_launcher_that_is_told_to_stop_stops_its_ranks_and_says_one_line(number, everybody):
    """One rank waits for the other, which is busy. Ctrl-C reaches all processes of a terminal."""
    with nothing_left() as environment:
        process = by_launch(environment, "busy", size=2, apart=True)
        for _ in range(2):
            process.stdout.readline()  # both have met
        if everybody:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        done = finish(process)
    assert done.returncode == 128 + number
    assert re.fullmatch(
        TOLD.format(pid=process.pid, name=number.name, ranks="2 ranks were"), done.stderr
    )


@pytest.mark.parametrize("comes", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_an_interrupt_while_a_program_loads_is_one_line(comes):
    """Rank 1 is in its imports; it comes to md.init within the second that the launcher gives it,
    or not."""
    code = (
        f"import os, time; print('up', flush=True); time.sleep({0.3 if comes else 60} * "
        "int(os.environ['RANK']))\n"
        "import minidist as md; md.init()\nassert os.environ['RANK'] == '0'"
    )
    with nothing_left() as environment:
        process = start(
            [sys.executable, "-m", "minidist", "launch", "-n", "2", sys.executable, "-c", code],
            environment,
            apart=True,
        )
        for _ in range(2):
            process.stdout.readline()
        os.killpg(process.pid, signal.SIGINT)
        done = finish(process)
    assert done.returncode == 130
    assert re.fullmatch(
        TOLD.format(pid=process.pid, name="SIGINT", ranks="2 ranks were"), done.stderr
    )


def test_a_launcher_stops_ranks_that_know_nothing_of_it():
    with nothing_left() as environment:
        process = start([sys.executable, "-m", "minidist", "launch", "sleep", "60"], environment)
        assert ranks_of(process)
        process.send_signal(signal.SIGTERM)
        done = finish(process)
    assert done.returncode == 143
    assert re.fullmatch(
        TOLD.format(pid=process.pid, name="SIGTERM", ranks="1 rank was"), done.stderr
    )


def test_a_launcher_that_is_told_twice_waits_for_nobody():
    stubborn = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', "
        "flush=True); time.sleep(60)"
    )
    launch = (
        "import sys; from minidist.launch import spawning; spawning.STOP = 30.0; "
        f"sys.exit(spawning.spawn([sys.executable, '-c', {stubborn!r}], 1))"
    )
    with nothing_left() as environment:
        process = start([sys.executable, "-c", launch], environment)
        process.stdout.readline()
        # two that wait are taken in the order of their numbers
        for number in (signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
            time.sleep(0.1)
        done = finish(process)
    assert done.returncode == 130
    assert re.fullmatch(
        TOLD.format(pid=process.pid, name="SIGINT", ranks="1 rank was"), done.stderr
    )


@pytest.mark.soak  # other deaths, and an interrupt of the launcher, are above
def test_a_rank_that_is_interrupted_alone_is_named_by_the_launcher():
    with nothing_left() as environment:
        process = by_launch(environment, "busy", size=2)
        for _ in range(2):
            process.stdout.readline()
        [rank] = [rank for rank in ranks_of(process) if rank.environ()["RANK"] == "1"]
        rank.send_signal(signal.SIGINT)
        done = finish(process)
    assert done.returncode == 130
    assert re.search(
        r"^minidist: rank 1 \(process \d+ on \S+\) was interrupted; the job ends$",
        done.stderr,
        re.M,
    )


def test_ranks_end_when_their_launcher_is_killed():
    with nothing_left() as environment:
        process = by_launch(environment, "sleep", size=2)
        for _ in range(2):
            process.stdout.readline()
        process.kill()
        finish(process)


@pytest.mark.soak  # tests/clusters/test_awkward_hosts.py has it on hosts, test_hosts.py by --hosts
def test_two_nodes_meet_over_address_port_and_secret():
    # another loopback address: what node 0 binds is what it is told
    port = free_port()
    address = "127.0.0.2"
    with nothing_left() as environment:
        nodes = [
            start(
                [
                    sys.executable,
                    "-c",
                    "import sys; from minidist.launch.spawning import *; "
                    f"sys.exit(spawn([sys.executable, {JOB!r}, 'ok'], 2, nodes=Nodes(2, {rank}, "
                    f"{address!r}, {port})))",
                ],
                environment,
                MINIDIST_TOKEN="s" * 32,
            )
            for rank in (1, 0)
        ]
        done = [finish(node) for node in nodes]
    assert [node.returncode for node in done] == [0, 0], done
    assert "hello from 3 of 4 over shm+tcp" in done[0].stdout
    assert "hello from 0 of 4 over shm+tcp" in done[1].stdout


@pytest.mark.soak
def test_a_launcher_that_is_told_to_stop_ends_the_job_on_all_nodes():
    port = free_port()
    address = "127.0.0.2"
    with nothing_left() as environment:
        nodes = [
            start(
                [
                    sys.executable,
                    "-c",
                    "import sys; from minidist.launch.spawning import *; sys.exit(spawn("
                    f"[sys.executable, {JOB!r}, 'busy', 'tcp', '9'], 2, "
                    f"nodes=Nodes(2, {rank}, {address!r}, {port})))",
                ],
                environment,
                MINIDIST_TOKEN="s" * 32,
            )
            for rank in (0, 1)
        ]
        for node in nodes:
            for _ in range(2):
                node.stdout.readline()  # all four have met
        nodes[1].send_signal(signal.SIGTERM)
        done = [finish(node) for node in nodes]
    assert [node.returncode for node in done] == [143, 143], done
    who = rf"minidist: the launcher \(process {nodes[1].pid} on \S+\) was told to stop by SIGTERM; "
    for node, end in zip(done, ("the job ends", "its 2 ranks were ended"), strict=True):
        assert re.fullmatch(f"{who}{end}\n", node.stderr), node.stderr


def test_a_second_node_without_the_secret_is_refused():
    with pytest.raises(LaunchError, match="one secret for all nodes"):
        spawn(["true"], 1, nodes=Nodes(2, 0, "127.0.0.2", 29999))


def test_a_taken_port_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as server, nothing_left() as environment:
        port = str(server.getsockname()[1])
        done = finish(by_launch(environment, "ok", options=["--master-port", port]))
    assert done.returncode == 2
    assert re.fullmatch(rf"minidist launch: cannot listen on 127\.0\.0\.1:{port} .*\n", done.stderr)


def test_the_token_is_on_no_command_line():
    with nothing_left() as environment:
        process = start(
            [
                sys.executable,
                "-m",
                "minidist",
                "launch",
                "-n",
                "2",
                "sh",
                "-c",
                'echo "$#"; exec sleep 60',
            ],
            environment,
            MINIDIST_TOKEN="do not show me to anyone",
        )
        for _ in range(2):
            process.stdout.readline()
        lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
        assert not any(b"do not show" in line for line in lines)
        process.send_signal(signal.SIGINT)
        done = finish(process)
    assert "do not show" not in done.stdout + done.stderr


NEVER = """
import os, signal, sys
if os.environ["RANK"] == sys.argv[1]:
    {way}
import minidist as md
md.init(limit=30)
"""
WAYS = {
    "exit": "sys.exit(0)",
    "_exit": "os._exit(0)",
    "stop": "os.kill(os.getpid(), signal.SIGSTOP)",
}


@pytest.mark.parametrize(
    ("way", "nodes"),
    [
        ("exit", 1),
        ("stop", 1),
        ("exit", 2),
        ("stop", 2),
        pytest.param("_exit", 1, marks=pytest.mark.soak),
    ],
)
def test_a_rank_that_never_comes_to_init_is_named_at_once(way, nodes, tmp_path):
    """Not at the limit of 30 s, and no other rank is blamed; `nodes`: it is on the second of
    two."""
    script = tmp_path / "never.py"
    script.write_text(NEVER.format(way=WAYS[way]))
    job = [sys.executable, str(script), str(2 * nodes - 1)]
    port = free_port()
    launcher = (
        "import sys; from minidist.launch.spawning import Nodes, spawn; "
        "sys.exit(spawn({}, 2, nodes={}))"
    )
    with nothing_left() as environment:
        jobs = [
            start(
                [
                    sys.executable,
                    "-c",
                    launcher.format(job, Nodes(nodes, node, "127.0.0.1", int(port))),
                ],
                environment,
                MINIDIST_TOKEN="a token for this test",
            )
            for node in range(nodes)
        ]
        done = [finish(job) for job in jobs]
    how = {"stop": r"is frozen \(stopped\)"}.get(way, "exited with status 0")
    for one in done:
        assert one.returncode
        assert re.search(
            rf"minidist: rank {2 * nodes - 1} \(process \d+ on \S+\) {how} before md.init",
            one.stderr,
        ), one.stderr
        assert not re.search("did not (join|reach)|TimeoutError|failed with", one.stderr)


@pytest.mark.parametrize("way", ["exit", "stop"])
def test_a_rank_inside_a_shell_that_never_comes_to_init_is_named_at_once(way, tmp_path):
    """The launcher's child is the shell, and its program a child of that: the shell's end is the
    rank's."""
    script = tmp_path / "never.py"
    script.write_text(NEVER.format(way=WAYS[way]))
    how = {"stop": r"is frozen \(stopped\)"}.get(way, "exited with status 0")
    inside = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, str(script), "1"]
    with nothing_left() as environment:
        done = finish(
            start([sys.executable, "-m", "minidist", "launch", "-n", "2", *inside], environment)
        )
    assert done.returncode
    assert re.search(
        rf"minidist: rank 1 \(process \d+ on \S+\) {how} before md.init", done.stderr
    ), done.stderr
    assert not re.search("did not (join|reach)|TimeoutError|failed with", done.stderr), done.stderr


def test_ranks_that_need_no_other_may_end_before_the_others_have_come():
    """A program that never joins its job: nobody waits for the rank that has ended."""
    script = "import os, time; time.sleep(0.3 * int(os.environ['RANK']))"
    with nothing_left() as environment:
        done = finish(
            start(
                [
                    sys.executable,
                    "-m",
                    "minidist",
                    "launch",
                    "-n",
                    "2",
                    sys.executable,
                    "-c",
                    script,
                ],
                environment,
            )
        )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "files", [14, *(pytest.param(files, marks=pytest.mark.soak) for files in range(6, 24))]
)
def test_too_few_open_files_are_told_at_once(files):
    """Whatever runs short of them, the launcher of six ranks or a rank; no rank is waited for."""
    launch = f"ulimit -n {files}; exec {sys.executable} -m minidist launch -n 6 {JOB} ok shm"
    with nothing_left() as environment:
        done = finish(start(["sh", "-c", launch], environment))
    assert done.returncode
    assert re.search(r"Too many open files", done.stderr), done.stderr
    assert not re.search("did not (join|reach)|TimeoutError", done.stderr), done.stderr
