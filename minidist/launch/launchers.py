"""Which launcher started this process, and what it says: rank, size, node.        notes: 启动方式, 变量解释 (lesson 01)

Every launcher starts the same program several times and tells each copy its rank by environment variables. They differ
in the names only, so the table LAUNCHERS holds the names and one function reads them.

    variable of torchrun and ours     MPICH             Open MPI                      srun
    RANK           world rank         PMI_RANK          OMPI_COMM_WORLD_RANK          SLURM_PROCID
    WORLD_SIZE     processes          PMI_SIZE          OMPI_COMM_WORLD_SIZE          SLURM_NTASKS
    LOCAL_RANK     rank on this node  MPI_LOCALRANKID   OMPI_COMM_WORLD_LOCAL_RANK    SLURM_LOCALID
    LOCAL_WORLD_SIZE                  MPI_LOCALNRANKS   OMPI_COMM_WORLD_LOCAL_SIZE    from SLURM_STEP_TASKS_PER_NODE
    GROUP_RANK     node (NODE_RANK)   -                 -                             SLURM_NODEID
    MASTER_ADDR, MASTER_PORT          -                 -                             first of SLURM_JOB_NODELIST
"""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from minidist.comm.health.acceptor import plain_address
from minidist.errors import LaunchError


@dataclass(frozen=True)
class Launcher:
    """The names one launcher uses; an empty name: it has no such variable.

    Every field from `rank` on is the name of an environment variable; `marker` shows that this launcher is at work.
    """

    name: str
    command: str
    transport: str                      # the default of md.init
    marker: str
    rank: str
    size: str
    local_rank: str
    local_size: str = ""
    node_rank: str = ""
    master_addr: str = ""
    master_port: str = ""
    job: str = ""                       # tells two jobs of one user on one machine apart

    def variables(self) -> tuple[str, ...]:
        """Every variable this launcher sets that we read."""
        return tuple(filter(None, (getattr(self, field.name) for field in fields(self)[3:])))


LAUNCHERS = (
    Launcher("minidist", "minidist launch -n 8 script.py", "auto", "MINIDIST_LAUNCH", "RANK", "WORLD_SIZE",
             "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    Launcher("torchrun", "torchrun --nproc-per-node 8 script.py", "auto", "RANK", "RANK", "WORLD_SIZE",
             "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
    Launcher("openmpi", "mpirun -n 8 python script.py (Open MPI)", "mpi", "OMPI_COMM_WORLD_RANK",
             "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
             "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", job="PMIX_NAMESPACE"),
    Launcher("mpich", "mpirun -n 8 python script.py (MPICH)", "mpi", "PMI_RANK", "PMI_RANK", "PMI_SIZE",
             "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Launcher("slurm", "srun -N 2 -n 8 python script.py", "auto", "SLURM_PROCID", "SLURM_PROCID", "SLURM_NTASKS",
             "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID", "SLURM_JOB_NODELIST", "MASTER_PORT",
             "SLURM_JOB_ID"),
)
"""The order in which a process looks for its launcher: mpirun inside a Slurm allocation is mpirun."""


@dataclass(frozen=True)
class Launch:
    """The place of this process in its job, as the launcher says; alone, it is rank 0 of 1."""

    launcher: str = "alone"
    transport: str = "threads"
    world_rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    job: str = ""
    other_mpi: bool = False             # mpirun started it, of another MPI than mpi4py's (which_mpi.py)
    mpi_by_srun: bool = False           # srun started it, and transport mpi was asked for

    @property
    def alone(self) -> bool:
        """Whether no launcher started this process, or it is the only rank."""
        return self.world_size == 1

    @property
    def by_mpirun(self) -> bool:
        """Whether the ranks are those of an MPI_COMM_WORLD."""
        return (self.launcher in ("mpich", "openmpi") and not self.other_mpi) or self.mpi_by_srun

    @property
    def numbers_nodes(self) -> bool:
        """Whether the launcher says which node a rank is on; mpirun does not."""
        return self.launcher not in ("mpich", "openmpi")

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on one host, so that nothing need listen beyond loopback."""
        return self.local_size == self.world_size


def detect(environ: Mapping[str, str] | None = None) -> Launch:
    """Read the launcher's variables.

    Raises: LaunchError, one line, if a variable is missing, is no number, or contradicts another.
    """
    variables = os.environ if environ is None else environ
    found = [launcher for launcher in LAUNCHERS if launcher.marker in variables]
    if found and found[0].name == "minidist":           # its RANK is torchrun's too
        found = [launcher for launcher in found if launcher.name != "torchrun"]
    if found and found[0].name == "slurm" and variables.get("ENVIRONMENT") == "BATCH" and (
            "SLURM_STEP_ID" not in variables):          # sbatch's own script: only srun starts tasks
        found = []
    if found and found[-1].name == "slurm" and "MPI_LOCALRANKID" not in variables:      # srun --mpi=pmi2 is no mpirun
        found = [launcher for launcher in found if launcher.name != "mpich"]
    if not found:
        if "WORLD_SIZE" in variables:
            raise LaunchError("WORLD_SIZE is set but RANK is not: start with `minidist launch`, mpirun or torchrun")
        return Launch()
    launch = _slurm(found[0], variables) if found[0].name == "slurm" else _read(found[0], variables)
    for other in found[1:]:
        if other.name == "slurm":                       # an allocation's variables do not count the ranks inside it
            continue
        rank, size = _number(other, variables, other.rank), _number(other, variables, other.size)
        if (rank, size) != (launch.world_rank, launch.world_size):
            raise LaunchError(f"two launchers contradict each other: {launch.launcher} says rank {launch.world_rank} "
                              f"of {launch.world_size}, {other.name} says rank {rank} of {size}; use one of them")
    return launch


def nodes_of(told: Sequence[Mapping[str, Any]]) -> list[int]:
    """The node of each rank, as the number of its first rank.

    mpirun does not number nodes. But it says which place on its node a rank has, and of how many. So the k-th rank of a
    host that has such a place is on the host's k-th node, whether ranks are dealt node by node or in turn.

    Args: told: of each rank its "host", its "node" (None: the launcher did not say) and "local": (rank, ranks) on it.
    """
    nodes, seen = [], Counter[tuple[Any, ...]]()
    for host, node, (local_rank, local_size) in ((info["host"], info["node"], info["local"]) for info in told):
        seen[host, local_rank, local_size] += 1
        nodes.append((host, node) if node is not None else (host, local_size, seen[host, local_rank, local_size]))
    return [nodes.index(node) for node in nodes]


def restarts(environ: Mapping[str, str] | None = None) -> int:
    """How often this job was started again, as Slurm (--requeue) or torchrun (--max-restarts) says; 0 by default."""
    variables = os.environ if environ is None else environ
    told = [variables.get(name, "") for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")]
    return max(int(count) if count.isdigit() else 0 for count in told)


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without any launcher's variables: for processes that a new launcher starts."""
    ours = {name for launcher in LAUNCHERS for name in launcher.variables()} | {"GROUP_RANK", "PMI_FD", "PMI_PORT"}
    foreign = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "MINIDIST_", "TORCHELASTIC_", "HYDI_", "MPI_LOCAL")
    return {name: value for name, value in environ.items()
            if name not in ours and not name.startswith(foreign)}


def _read(launcher: Launcher, variables: Mapping[str, str]) -> Launch:
    rank, size = _number(launcher, variables, launcher.rank), _number(launcher, variables, launcher.size)
    local_rank = _number(launcher, variables, launcher.local_rank)
    local_size = _number(launcher, variables, launcher.local_size)
    for low, high, names in ((rank, size, (launcher.rank, launcher.size)),
                             (local_rank, local_size, (launcher.local_rank, launcher.local_size)),
                             (local_size - 1, size, (launcher.local_size, launcher.size))):
        if not 0 <= low < high:
            values = " but ".join(f"{name}={variables[name]}" for name in names)
            raise LaunchError(f"{launcher.name} contradicts itself: {values}; start the job afresh")
    node_rank = rank // local_size                      # ranks are placed node by node unless mpirun is told otherwise
    if launcher.node_rank in variables:
        node_rank = _number(launcher, variables, launcher.node_rank)
    where = (_text(launcher, variables, launcher.master_addr), _number(launcher, variables, launcher.master_port)) \
        if launcher.master_addr else ("127.0.0.1", 0)
    where = (plain_address(where[0]), where[1])
    return Launch(launcher.name, launcher.transport, rank, size, local_rank, local_size, node_rank, *where,
                  job=variables.get(launcher.job, ""))


def _slurm(launcher: Launcher, variables: Mapping[str, str]) -> Launch:
    """srun does not tell MASTER_ADDR, MASTER_PORT or the ranks a node: they follow from its other variables."""
    node_rank = _number(launcher, variables, launcher.node_rank)
    size = _number(launcher, variables, launcher.size)
    nodes = variables.get("SLURM_STEP_NODELIST") or _text(launcher, variables, launcher.master_addr)
    hosts = expand_hosts(nodes)
    tasks = variables.get(launcher.local_size) or variables.get("SLURM_TASKS_PER_NODE") or ""
    per_node = [int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks)
                for _ in range(int(times or 1))]
    job, step = variables.get(launcher.job, "0"), variables.get("SLURM_STEP_ID", "0")
    # two ports a step, below the ephemeral range: ours is the one above MASTER_PORT
    port = 20000 + 2 * ((int(job) * 31 + int(step)) % 6000) if (job + step).isdigit() else 20000
    completed = {
        **variables,
        launcher.local_size: str(per_node[node_rank] if node_rank < len(per_node) else -(-size // len(hosts))),
        launcher.master_addr: "127.0.0.1" if len(hosts) == 1 else variables.get("MASTER_ADDR", hosts[0]),
        launcher.master_port: variables.get("MASTER_PORT", str(port)),
        launcher.job: f"{job}.{step}",
    }
    return _read(launcher, completed)


def expand_hosts(nodes: str) -> list[str]:
    """Slurm's shorthand, one host each: 'gpu[01-03,7],login' -> gpu01 gpu02 gpu03 gpu7 login."""
    hosts = []
    for prefix, inside, suffix in re.findall(r"([^,\[]+)(?:\[([^\]]*)\])?([^,\[]*)", nodes):
        for part in inside.split(","):
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last) + 1) if last else ()
            hosts += [f"{prefix}{number:0{len(first)}d}{suffix}" for number in numbers] or [f"{prefix}{part}{suffix}"]
    if not hosts:
        raise LaunchError(f"SLURM_JOB_NODELIST={nodes!r} names no host")
    return hosts


def _text(launcher: Launcher, variables: Mapping[str, str], name: str) -> str:
    if not variables.get(name):
        raise LaunchError(f"{launcher.marker} is set, as {launcher.name} does, but {name} is missing; start the job "
                          f"with `{launcher.command}`, or unset {launcher.marker}")
    return variables[name]


def _number(launcher: Launcher, variables: Mapping[str, str], name: str) -> int:
    text = _text(launcher, variables, name)
    if not text.isdigit():
        raise LaunchError(f"{name}={text!r} is not a whole number; {launcher.name} sets it, so start the job afresh")
    return int(text)
