"""launchers: each launcher's variables are understood, and what cannot be true is refused in one
line."""

import os
import re

import pytest

from minidist.device.cores import of_all_ranks
from minidist.errors import LaunchError
from minidist.launch import which_mpi
from minidist.launch.joining import place_from_environment
from minidist.launch.launchers import (
    LAUNCHERS,
    MOST_HOSTS,
    Launch,
    clean_environment,
    detect,
    expand_hosts,
    nodes_of,
    restarts,
)
from minidist.launch.which_mpi import find_launch

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "abc",
}
MPICH = {
    "PMI_RANK": "2",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "2",
    "MPI_LOCALNRANKS": "4",
    "PMI_FD": "9",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "3",
}
OURS = {**TORCHRUN, "MINIDIST_LAUNCH": "1", "MINIDIST_TOKEN": "t" * 64, "NODE_RANK": "1"}


def test_alone():
    assert detect({"PATH": "/bin", "HOME": "/root"}) == Launch("alone", "threads", 0, 1, 0, 1, 0)


@pytest.mark.parametrize(
    ("variables", "launch"),
    [
        (TORCHRUN, Launch("torchrun", "auto", 5, 8, 1, 4, 1, "10.0.0.1", 29500, "abc")),
        (OURS, Launch("minidist", "auto", 5, 8, 1, 4, 1, "10.0.0.1", 29500)),
        (MPICH, Launch("mpich", "mpi", 2, 4, 2, 4, 0)),
        (OPENMPI, Launch("openmpi", "mpi", 5, 8, 1, 4, 1)),
        (SLURM, Launch("slurm", "auto", 5, 8, 1, 4, 1, "gpu07", 20000 + 2 * (77 * 31 + 3), "77.3")),
        (
            {**SLURM, "MASTER_PORT": "29600"},
            Launch("slurm", "auto", 5, 8, 1, 4, 1, "gpu07", 29600, "77.3"),
        ),
    ],
    ids=["torchrun", "minidist", "mpich", "openmpi", "slurm", "slurm with a port"],
)
def test_each_launcher_is_understood(variables, launch):
    assert detect(variables) == launch


def test_srun_with_pmi2_is_no_mpirun_and_mpirun_inside_an_allocation_is():
    """srun --mpi=pmi2 sets PMI_RANK, too; MPICH's mpirun, which starts its agents by srun, says a
    rank's local rank."""
    pmi2 = {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_FD": "9", "PMI_JOBID": "77.3"}
    assert detect({**SLURM, **pmi2}) == detect(SLURM)
    agents = {**SLURM, "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
    assert detect({**agents, **MPICH}) == detect(MPICH)


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({}, 0),
        (TORCHRUN, 0),
        ({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"}, 2),
        ({"SLURM_RESTART_COUNT": "1"}, 1),
        ({"SLURM_RESTART_COUNT": ""}, 0),
        ({**SLURM, "SLURM_RESTART_COUNT": "0"}, 0),
    ],
)
def test_how_often_a_job_was_started_again(variables, count):
    assert restarts(variables) == count


def test_slurm_on_one_node_stays_on_loopback():
    one = {
        **SLURM,
        "SLURM_JOB_NODELIST": "gpu07",
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "8",
        "SLURM_LOCALID": "5",
    }
    assert detect(one).master_addr == "127.0.0.1"
    assert detect(one).one_host
    assert not detect(SLURM).one_host


@pytest.mark.parametrize(
    "variables",
    [TORCHRUN, MPICH, OPENMPI, SLURM, OURS],
    ids=["torchrun", "mpich", "openmpi", "slurm", "minidist"],
)
def test_each_missing_variable_is_named(variables):
    launcher = next(launcher for launcher in LAUNCHERS if launcher.marker in variables)
    may_miss = {
        "GROUP_RANK",
        "NODE_RANK",
        "MINIDIST_LAUNCH",
        "RANK",
        launcher.marker,
        launcher.job,
        "SLURM_STEP_TASKS_PER_NODE",
    }
    for name in set(launcher.variables()) & set(variables) - may_miss:
        with pytest.raises(LaunchError, match=f"{name} is missing") as caught:
            detect({key: value for key, value in variables.items() if key != name})
        assert "\n" not in str(caught.value)


def test_a_rank_that_nobody_told_its_number():
    with pytest.raises(LaunchError, match="RANK is not"):
        detect({"WORLD_SIZE": "4"})


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({**MPICH, "PMI_RANK": "4"}, "PMI_RANK=4 but PMI_SIZE=4"),
        ({**MPICH, "MPI_LOCALNRANKS": "5"}, "MPI_LOCALNRANKS=5 but PMI_SIZE=4"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK=4 but LOCAL_WORLD_SIZE=4"),
        ({**TORCHRUN, "WORLD_SIZE": "many"}, "WORLD_SIZE='many' is not a whole number"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK='-1' is not a whole number"),
        (
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(x2"},
            r"TASKS_PER_NODE='4\(x2' is not what Slurm sets",
        ),
        ({**OPENMPI, **MPICH}, "two launchers contradict each other"),
        ({**TORCHRUN, **MPICH}, "torchrun says rank 5 of 8, mpich says rank 2 of 4"),
    ],
)
def test_contradictions_are_refused_in_one_line(variables, says):
    with pytest.raises(LaunchError, match=says) as caught:
        detect(variables)
    assert "\n" not in str(caught.value)


def test_mpirun_inside_an_allocation_is_mpirun():
    assert detect({**SLURM, **MPICH}).launcher == "mpich"


def test_a_batch_script_itself_is_alone():
    script = {key: value for key, value in SLURM.items() if key != "SLURM_STEP_ID"} | {
        "ENVIRONMENT": "BATCH"
    }
    assert detect(script).launcher == "alone"
    assert detect({**script, "SLURM_STEP_ID": "0"}).launcher == "slurm"


@pytest.mark.parametrize(
    ("nodes", "hosts"),
    [
        ("gpu7", ["gpu7"]),
        ("a,b.c-d", ["a", "b.c-d"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("rack[1-2]-ib,x", ["rack1-ib", "rack2-ib", "x"]),
        ("rack[0-1]_blade[0-1]", ["rack0_blade0", "rack0_blade1", "rack1_blade0", "rack1_blade1"]),
        (
            "r[0-1]b[08-10,3].ib,n[1]-x",
            [
                "r0b08.ib",
                "r0b09.ib",
                "r0b10.ib",
                "r0b3.ib",
                "r1b08.ib",
                "r1b09.ib",
                "r1b10.ib",
                "r1b3.ib",
                "n1-x",
            ],
        ),
        ("[1-2]", ["1", "2"]),
        ("a[1][2][3]", ["a123"]),
        ("user@g[1-2]:8,h:4", ["user@g1:8", "user@g2:8", "h:4"]),
        ("n[009-011]", ["n009", "n010", "n011"]),
    ],
)
def test_slurm_host_lists(nodes, hosts):
    assert expand_hosts(nodes) == hosts


def test_a_host_list_names_as_many_hosts_as_slurm_does():
    assert (
        len(expand_hosts(f"n[1-{MOST_HOSTS}]"))
        == len(expand_hosts("a[1-256]b[1-256]"))
        == MOST_HOSTS
    )


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ("a[x-y]", "'x-y' is neither a number nor a range"),
        ("a[1-]", "'1-' is neither"),
        ("a[3-1]", "'3-1' is neither"),
        ("a[]", "'' is neither"),
        ("a[1,]", "'' is neither"),
        ("a[²]", "'²' is neither"),
        ("a[-1]", "'-1' is neither"),
        (f"a[1-{'9' * 30}]", "is neither"),
        ("a[1", "a bracket is not closed"),
        ("a1]", "a bracket is not closed"),
        ("a[1[2]]", "a bracket is not closed"),
        ("", "names no host"),
        (",,", "names no host"),
        (f"a[1-{'9' * 18}]", "names 999999999999999999 hosts or more"),
        ("a[1-300][1-300]", "names 90000 hosts"),
        ("a[1-60000],b[1-60000]", "names 120000 hosts"),
        (f"a{'[0-9]' * 40}", "hosts or more"),
    ],
)
def test_what_is_no_host_list_is_one_line(nodes, says):
    with pytest.raises(LaunchError, match=re.escape(says)) as caught:
        expand_hosts(nodes, "SLURM_JOB_NODELIST")
    assert str(caught.value).startswith("SLURM_JOB_NODELIST=")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


HAND = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}


def test_four_variables_are_enough():
    """On one host if the address is loopback; else the meeting tells who shares a host."""
    here = detect({**HAND, "MASTER_ADDR": "127.0.0.1"})
    assert here == Launch("env://", "auto", 5, 8, 5, 8, 0, "127.0.0.1", 29500)
    assert here.one_host and here.monitor_port == 29500 and here.placed([0] * 8) == here
    apart = detect(HAND)
    assert apart == Launch("env://", "auto", 5, 8, 0, 1, 5, "10.0.0.1", 29500, knows_places=False)
    assert not (apart.one_host or apart.numbers_nodes)
    told = [{"host": f"pod{rank // 4}", "node": None, "local": None} for rank in range(8)]
    placed = apart.placed(nodes_of(told))
    assert (placed.local_rank, placed.local_size, placed.node_rank) == (1, 4, 1)
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"):
        with pytest.raises(
            LaunchError, match=f"RANK is set, as env:// does, but {name} is missing"
        ):
            detect({key: value for key, value in HAND.items() if key != name})


JUNK = (
    "",
    " ",
    "x",
    "-1",
    "+1",
    "1.5",
    "nan",
    "²",
    "٣",
    "1_0",
    "0",
    "65535",
    "65536",
    "9" * 30,
    "9" * 5000,
    "a b",
    os.fsdecode(b"12\xff"),
    "\x1b[31m",
    "..",
    "x" * 300,
    "a[x-y]",
    "a[1-9999999999999]",
    "a]",
    ",",
    "(x2)",
    "4(x9999999999)",
    "127.0.0.1:99999",
    "127.0.0.1:²",
    "127.0.0.1:0",
    "a\nb",
)
PLACES = {
    "torchrun": TORCHRUN,
    "minidist": {**OURS, "MINIDIST_MONITOR": "127.0.0.1:4000"},
    "mpich": MPICH,
    "by hand": HAND,
    "slurm": {
        **SLURM,
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "29500",
        "SLURM_STEP_NODELIST": "gpu[07-08]",
        "SLURM_TASKS_PER_NODE": "4(x2)",
        "SLURM_RESTART_COUNT": "1",
    },
    "another mpi": {
        **OPENMPI,
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "PMIX_NAMESPACE": "job",
    },
}


@pytest.mark.parametrize("place", PLACES)
def test_junk_in_a_variable_is_refused_in_a_line_that_names_it(place, monkeypatch):
    """Each variable with each value: it can be read, or the error has its name, what it holds and
    what was expected."""
    monkeypatch.setattr(which_mpi, "library", lambda: "")
    refused = 0
    for name in (*PLACES[place], "MINIDIST_CORES", "MINIDIST_TOKEN"):
        for value in JUNK:
            monkeypatch.setattr(os, "environ", {**PLACES[place], name: value})
            try:
                launch = find_launch()
                monitor = place_from_environment()
                assert monitor is None or 0 < monitor.port <= 65535
                assert (
                    restarts() >= 0 < of_all_ranks() and 0 <= launch.world_rank < launch.world_size
                )
                assert launch.master_port <= 65535 and launch.master_addr.encode("idna")
            except LaunchError as error:
                refused += 1
                assert name in str(error) and "\n" not in str(error) and len(str(error)) < 300, (
                    name,
                    value,
                )
    assert refused > 3 * len(PLACES[place])


@pytest.mark.parametrize("variables", [TORCHRUN, MPICH, OPENMPI, SLURM, OURS])
def test_a_cleaned_environment_is_alone(variables):
    left = clean_environment({**variables, "PATH": "/bin", "MPLCONFIGDIR": "/x"})
    assert detect(left) == Launch()
    assert left["PATH"] == "/bin"
    assert left["MPLCONFIGDIR"] == "/x"
