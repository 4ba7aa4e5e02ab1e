"""launchers: each launcher's variables are understood, and what cannot be true is refused in one line."""

import pytest

from minidist.errors import LaunchError
from minidist.launch.launchers import LAUNCHERS, Launch, clean_environment, detect, expand_hosts, restarts

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
            "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "abc"}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4", "PMI_FD": "9"}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
           "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_NODE_RANK": "1"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
         "SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_JOB_ID": "77",
         "SLURM_STEP_ID": "3"}
OURS = {**TORCHRUN, "MINIDIST_LAUNCH": "1", "MINIDIST_TOKEN": "t" * 64, "NODE_RANK": "1"}


def test_alone():
    assert detect({"PATH": "/bin", "HOME": "/root"}) == Launch("alone", "threads", 0, 1, 0, 1, 0)


@pytest.mark.parametrize(("variables", "launch"), [
    (TORCHRUN, Launch("torchrun", "auto", 5, 8, 1, 4, 1, "10.0.0.1", 29500, "abc")),
    (OURS, Launch("minidist", "auto", 5, 8, 1, 4, 1, "10.0.0.1", 29500)),
    (MPICH, Launch("mpich", "mpi", 2, 4, 2, 4, 0)),
    (OPENMPI, Launch("openmpi", "mpi", 5, 8, 1, 4, 1)),
    (SLURM, Launch("slurm", "auto", 5, 8, 1, 4, 1, "gpu07", 20000 + 2 * (77 * 31 + 3), "77.3")),
    ({**SLURM, "MASTER_PORT": "29600"}, Launch("slurm", "auto", 5, 8, 1, 4, 1, "gpu07", 29600, "77.3")),
], ids=["torchrun", "minidist", "mpich", "openmpi", "slurm", "slurm with a port"])
def test_each_launcher_is_understood(variables, launch):
    assert detect(variables) == launch


def test_srun_with_pmi2_is_no_mpirun_and_mpirun_inside_an_allocation_is():
    """srun --mpi=pmi2 sets PMI_RANK, too; MPICH's mpirun, which starts its agents by srun, says a rank's local rank."""
    pmi2 = {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_FD": "9", "PMI_JOBID": "77.3"}
    assert detect({**SLURM, **pmi2}) == detect(SLURM)
    agents = {**SLURM, "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
    assert detect({**agents, **MPICH}) == detect(MPICH)


@pytest.mark.parametrize(("variables", "count"), [
    ({}, 0), (TORCHRUN, 0), ({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"}, 2), ({"SLURM_RESTART_COUNT": "1"}, 1),
    ({"SLURM_RESTART_COUNT": ""}, 0), ({**SLURM, "SLURM_RESTART_COUNT": "0"}, 0)])
def test_how_often_a_job_was_started_again(variables, count):
    assert restarts(variables) == count


def test_slurm_on_one_node_stays_on_loopback():
    one = {**SLURM, "SLURM_JOB_NODELIST": "gpu07", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "8",
           "SLURM_LOCALID": "5"}
    assert detect(one).master_addr == "127.0.0.1"
    assert detect(one).one_host
    assert not detect(SLURM).one_host


@pytest.mark.parametrize("variables", [TORCHRUN, MPICH, OPENMPI, SLURM, OURS],
                         ids=["torchrun", "mpich", "openmpi", "slurm", "minidist"])
def test_each_missing_variable_is_named(variables):
    launcher = next(launcher for launcher in LAUNCHERS if launcher.marker in variables)
    may_miss = {"GROUP_RANK", "NODE_RANK", "MINIDIST_LAUNCH", "RANK", launcher.marker, launcher.job,
                "SLURM_STEP_TASKS_PER_NODE"}
    for name in set(launcher.variables()) & set(variables) - may_miss:
        with pytest.raises(LaunchError, match=f"{name} is missing") as caught:
            detect({key: value for key, value in variables.items() if key != name})
        assert "\n" not in str(caught.value)


def test_a_rank_that_nobody_told_its_number():
    with pytest.raises(LaunchError, match="RANK is not"):
        detect({"WORLD_SIZE": "4"})


@pytest.mark.parametrize(("variables", "says"), [
    ({**MPICH, "PMI_RANK": "4"}, "PMI_RANK=4 but PMI_SIZE=4"),
    ({**MPICH, "MPI_LOCALNRANKS": "5"}, "MPI_LOCALNRANKS=5 but PMI_SIZE=4"),
    ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK=4 but LOCAL_WORLD_SIZE=4"),
    ({**TORCHRUN, "WORLD_SIZE": "many"}, "WORLD_SIZE='many' is not a whole number"),
    ({**TORCHRUN, "RANK": "-1"}, "RANK='-1' is not a whole number"),
    ({**OPENMPI, **MPICH}, "two launchers contradict each other"),
    ({**TORCHRUN, **MPICH}, "torchrun says rank 5 of 8, mpich says rank 2 of 4"),
])
def test_contradictions_are_refused_in_one_line(variables, says):
    with pytest.raises(LaunchError, match=says) as caught:
        detect(variables)
    assert "\n" not in str(caught.value)


def test_mpirun_inside_an_allocation_is_mpirun():
    assert detect({**SLURM, **MPICH}).launcher == "mpich"


def test_a_batch_script_itself_is_alone():
    script = {key: value for key, value in SLURM.items() if key != "SLURM_STEP_ID"} | {"ENVIRONMENT": "BATCH"}
    assert detect(script).launcher == "alone"
    assert detect({**script, "SLURM_STEP_ID": "0"}).launcher == "slurm"


@pytest.mark.parametrize(("nodes", "hosts"), [
    ("gpu7", ["gpu7"]),
    ("a,b.c-d", ["a", "b.c-d"]),
    ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
    ("rack[1-2]-ib,x", ["rack1-ib", "rack2-ib", "x"]),
])
def test_slurm_host_lists(nodes, hosts):
    assert expand_hosts(nodes) == hosts


@pytest.mark.parametrize("variables", [TORCHRUN, MPICH, OPENMPI, SLURM, OURS])
def test_a_cleaned_environment_is_alone(variables):
    left = clean_environment({**variables, "PATH": "/bin", "MPLCONFIGDIR": "/x"})
    assert detect(left) == Launch()
    assert left["PATH"] == "/bin"
    assert left["MPLCONFIGDIR"] == "/x"
