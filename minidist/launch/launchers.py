"""Find out which launcher started this process: its rank, size, node.        notes: 启动方式, 变量解释 (lesson 01)

Every launcher starts the same program several times and gives each copy its rank in environment
variables. Only the names of the variables differ, so the table LAUNCHERS holds the names and one
function reads them.

    variable of torchrun and ours     MPICH             Open MPI                      srun
    RANK           world rank         PMI_RANK          OMPI_COMM_WORLD_RANK          SLURM_PROCID
    WORLD_SIZE     processes          PMI_SIZE          OMPI_COMM_WORLD_SIZE          SLURM_NTASKS
    LOCAL_RANK     rank on this node  MPI_LOCALRANKID   OMPI_COMM_WORLD_LOCAL_RANK    SLURM_LOCALID
    LOCAL_WORLD_SIZE                  MPI_LOCALNRANKS   OMPI_COMM_WORLD_LOCAL_SIZE    from SLURM_STEP_TASKS_PER_NODE
    GROUP_RANK     node (NODE_RANK)   -                 -                             SLURM_NODEID
    MASTER_ADDR, MASTER_PORT          -                 -                             first of SLURM_JOB_NODELIST

Operators of clusters, and users who start ranks by hand, set only RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT, as torch's env:// expects. Then all ranks are on this host if MASTER_ADDR is loopback;
otherwise the ranks find out which of them share a host when they join.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from minidist.comm.health.acceptor import is_loopback, plain_address
from minidist.errors import LaunchError

MOST_RANKS = 1 << 20  # of a job
MOST_HOSTS = 1 << 16  # of a list of nodes: as many as Slurm itself expands
MOST_ID = 1 << 63  # of a job or a step
LAST_PORT = 65535


@dataclass(frozen=True)
class Launcher:
    """The environment variables of one launcher; an empty name: it has no such variable.

    Every field from `rank` on is the name of an environment variable; if the variable `marker` is
    set, this launcher is at work.
    """

    name: str
    command: str
    transport: str  # the default of md.init
    marker: str
    rank: str
    size: str
    local_rank: str
    local_size: str = ""
    node_rank: str = ""
    master_addr: str = ""
    master_port: str = ""
    job: str = ""  # distinguishes two jobs of one user on one machine

    def variables(self) -> tuple[str, ...]:
        """Return the names of all variables of this launcher that we read."""
        return tuple(filter(None, (getattr(self, field.name) for field in fields(self)[3:])))


LAUNCHERS = (
    Launcher(
        "minidist",
        "minidist launch -n 8 script.py",
        "auto",
        "MINIDIST_LAUNCH",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    ),
    Launcher(
        "torchrun",
        "torchrun --nproc-per-node 8 script.py",
        "auto",
        "RANK",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
    ),
    Launcher(
        "openmpi",
        "mpirun -n 8 python script.py (Open MPI)",
        "mpi",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        job="PMIX_NAMESPACE",
    ),
    Launcher(
        "mpich",
        "mpirun -n 8 python script.py (MPICH)",
        "mpi",
        "PMI_RANK",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
    ),
    Launcher(
        "slurm",
        "srun -N 2 -n 8 python script.py",
        "auto",
        "SLURM_PROCID",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_NODEID",
        "SLURM_JOB_NODELIST",
        "MASTER_PORT",
        "SLURM_JOB_ID",
    ),
)
"""The order in which a process looks for its launcher: mpirun inside a Slurm allocation is
mpirun."""

BY_HAND = replace(
    LAUNCHERS[1],
    name="env://",
    local_rank="",
    local_size="",
    node_rank="",
    job="",
    command="RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 python script.py",
)
"""A job with only the four variables: torchrun sets more, and has a store at MASTER_PORT."""


@dataclass(frozen=True)
class Launch:
    """The place of this process in its job, as the launcher gives it.

    Without a launcher it is rank 0 of 1.
    """

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
    other_mpi: bool = False  # started by the mpirun of another MPI than mpi4py's (which_mpi.py)
    mpi_by_srun: bool = False  # srun started it, and transport mpi was asked for
    knows_places: bool = True  # the launcher says which ranks share a host

    @property
    def alone(self) -> bool:
        """Return whether the job has only this rank, as without a launcher."""
        return self.world_size == 1

    @property
    def by_mpirun(self) -> bool:
        """Return whether the ranks are those of an MPI_COMM_WORLD."""
        return (self.launcher in ("mpich", "openmpi") and not self.other_mpi) or self.mpi_by_srun

    @property
    def numbers_nodes(self) -> bool:
        """Return whether the launcher gives the node of a rank; mpirun does not."""
        return self.launcher not in ("mpich", "openmpi") and self.knows_places

    @property
    def monitor_port(self) -> int:
        """Return the port of rank 0's monitor: MASTER_PORT + 1, since torchrun's store has
        MASTER_PORT; by hand, MASTER_PORT."""
        return self.master_port if self.launcher == BY_HAND.name else self.master_port + 1

    def placed(self, nodes: Sequence[int]) -> "Launch":
        """Return this launch with its place on its node, computed from each rank's node, if the
        launcher did not give it."""
        if self.knows_places:
            return self
        here = [rank for rank, node in enumerate(nodes) if node == nodes[self.world_rank]]
        return replace(
            self,
            local_rank=here.index(self.world_rank),
            local_size=len(here),
            node_rank=sorted({*nodes}).index(nodes[self.world_rank]),
        )

    @property
    def one_host(self) -> bool:
        """Return whether all ranks are on one host, so that listening on loopback is enough."""
        return self.local_size == self.world_size


def detect(environ: Mapping[str, str] | None = None) -> Launch:
    """Return this process's Launch, read from its launcher's variables.

    Raises: LaunchError, one line, if a variable is missing, is not what its launcher sets, or
            contradicts another.
    """
    variables = os.environ if environ is None else environ
    found = [launcher for launcher in LAUNCHERS if launcher.marker in variables]
    if found and found[0].name == "minidist":  # its RANK is torchrun's too
        found = [launcher for launcher in found if launcher.name != "torchrun"]
    if (
        found
        and found[0].name == "slurm"
        and variables.get("ENVIRONMENT") == "BATCH"
        and ("SLURM_STEP_ID" not in variables)
    ):  # sbatch's own script: only srun starts tasks
        found = []
    # srun --mpi=pmi2 is no mpirun
    if found and found[-1].name == "slurm" and "MPI_LOCALRANKID" not in variables:
        found = [launcher for launcher in found if launcher.name != "mpich"]
    if not found:
        if "WORLD_SIZE" in variables:
            raise LaunchError(
                "WORLD_SIZE is set but RANK is not: start with `minidist launch`, mpirun or "
                "torchrun"
            )
        return Launch()
    first = found[0]
    by_hand = {first.master_addr, first.master_port} & {*variables}
    if (
        first.name == "torchrun"
        and by_hand
        and not {first.local_rank, first.local_size} & {*variables}
    ):
        launch = _by_hand(variables)
    else:
        launch = (_slurm if first.name == "slurm" else _read)(first, variables)
    for other in found[1:]:
        if other.name == "slurm":  # an allocation's variables do not count the ranks inside it
            continue
        rank = _number(other, variables, other.rank)
        size = _number(other, variables, other.size)
        if (rank, size) != (launch.world_rank, launch.world_size):
            raise LaunchError(
                f"two launchers contradict each other: {launch.launcher} says rank "
                f"{launch.world_rank} of {launch.world_size}, {other.name} says rank {rank} of "
                f"{size}; use one of them"
            )
    return launch


def nodes_of(told: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the node of each rank, as the number of its first rank.

    mpirun does not number nodes, but it gives each rank its local rank and the number of ranks on
    its node. So the k-th rank of a host with a given pair of these is on the host's k-th node,
    whether ranks are placed node by node or in turn.

    Args: told: for each rank its "host", its "node" (None: the launcher did not give it) and
          "local": (rank, ranks) on the node (None: not given either; then a host is one node).
    """
    nodes: list[tuple[Any, ...]] = []
    seen = Counter[tuple[Any, ...]]()
    for host, node, local in ((info["host"], info["node"], info["local"]) for info in told):
        if node is not None or local is None:
            nodes.append((host, node))
            continue
        local_rank, local_size = local
        seen[host, local_rank, local_size] += 1
        nodes.append((host, local_size, seen[host, local_rank, local_size]))
    return [nodes.index(node) for node in nodes]


def restarts(environ: Mapping[str, str] | None = None) -> int:
    """Return how often Slurm (--requeue) or torchrun (--max-restarts) has restarted this job.

    0 by default.
    """
    variables = os.environ if environ is None else environ
    told = [
        variables.get(name, "") for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
    ]
    return max(int(count) if re.fullmatch("[0-9]{1,9}", count) else 0 for count in told)


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without any launcher's variables, for processes of a new launcher."""
    ours = {name for launcher in LAUNCHERS for name in launcher.variables()} | {
        "GROUP_RANK",
        "PMI_FD",
        "PMI_PORT",
    }
    foreign = (
        "PMI_",
        "PMIX_",
        "OMPI_",
        "PRTE_",
        "MINIDIST_",
        "TORCHELASTIC_",
        "HYDI_",
        "MPI_LOCAL",
    )
    return {
        name: value
        for name, value in environ.items()
        if name not in ours and not name.startswith(foreign)
    }


def _read(launcher: Launcher, variables: Mapping[str, str]) -> Launch:
    rank = _number(launcher, variables, launcher.rank)
    size = _number(launcher, variables, launcher.size)
    local_rank = _number(launcher, variables, launcher.local_rank)
    local_size = _number(launcher, variables, launcher.local_size)
    for low, high, names in (
        (rank, size, (launcher.rank, launcher.size)),
        (local_rank, local_size, (launcher.local_rank, launcher.local_size)),
        (local_size - 1, size, (launcher.local_size, launcher.size)),
    ):
        _check_below(launcher, variables, low, high, names)
    node_rank = rank // local_size  # by default mpirun places ranks node by node
    if launcher.node_rank in variables:
        node_rank = _number(launcher, variables, launcher.node_rank)
        _check_below(launcher, variables, node_rank, size, (launcher.node_rank, launcher.size))
    host, port = (
        _meeting(launcher, variables, LAST_PORT - (launcher.name != "minidist"))
        if launcher.master_addr
        else ("127.0.0.1", 0)
    )
    return Launch(
        launcher.name,
        launcher.transport,
        rank,
        size,
        local_rank,
        local_size,
        node_rank,
        host,
        port,
        job=variables.get(launcher.job, ""),
    )


def _by_hand(variables: Mapping[str, str]) -> Launch:
    """Return the Launch of a rank with only RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Unless MASTER_ADDR is loopback, each rank assumes that its host has no other rank, until the
    ranks have joined.
    """
    rank = _number(BY_HAND, variables, BY_HAND.rank)
    size = _number(BY_HAND, variables, BY_HAND.size)
    _check_below(BY_HAND, variables, rank, size, (BY_HAND.rank, BY_HAND.size))
    host, port = _meeting(BY_HAND, variables, LAST_PORT)
    here = is_loopback(host) or host == "localhost"
    return Launch(
        BY_HAND.name,
        BY_HAND.transport,
        rank,
        size,
        rank if here else 0,
        size if here else 1,
        0 if here else rank,
        host,
        port,
        knows_places=here,
    )


def _slurm(launcher: Launcher, variables: Mapping[str, str]) -> Launch:
    """Return the Launch of a task of srun.

    MASTER_ADDR, MASTER_PORT and the ranks per node follow from its other variables.
    """
    node_rank = _number(launcher, variables, launcher.node_rank)
    size = _number(launcher, variables, launcher.size)
    listed = "SLURM_STEP_NODELIST" if variables.get("SLURM_STEP_NODELIST") else launcher.master_addr
    hosts = expand_hosts(_text(launcher, variables, listed), listed)
    tasks = launcher.local_size if variables.get(launcher.local_size) else "SLURM_TASKS_PER_NODE"
    local_size = _tasks_on(node_rank, variables.get(tasks, ""), tasks) or -(-size // len(hosts))
    job = _number(launcher, {launcher.job: "0", **variables}, launcher.job, most=MOST_ID)
    step = _number(launcher, {"SLURM_STEP_ID": "0", **variables}, "SLURM_STEP_ID", most=MOST_ID)
    # two ports per step, below the ephemeral range; our monitor takes the second
    port = 20000 + 2 * ((job * 31 + step) % 6000)
    if address := variables.get("MASTER_ADDR", ""):
        check_host("MASTER_ADDR", address)
    completed = {
        **variables,
        launcher.local_size: str(local_size),
        launcher.master_addr: "127.0.0.1" if len(hosts) == 1 else address or hosts[0],
        launcher.master_port: variables.get("MASTER_PORT", str(port)),
        launcher.job: f"{job}.{step}",
    }
    return _read(launcher, completed)


def _tasks_on(node: int, tasks: str, name: str) -> int:
    """Return the number of tasks on a node from Slurm's shorthand "4(x2),3"; 0 if it is not given.

    Raises: LaunchError.
    """
    if not tasks:
        return 0
    first = 0
    found = 0
    for part in tasks.split(","):
        match = re.fullmatch(r"([0-9]{1,7})(?:\(x([0-9]{1,7})\))?", part)
        if match is None:
            raise LaunchError(
                f"{name}={tasks!r:.60} is not what Slurm sets, such as 4(x2),3: tasks of each node"
            )
        found = int(match[1]) if first <= node < first + int(match[2] or 1) else found
        first += int(match[2] or 1)
    return found


def expand_hosts(nodes: str, name: str = "--hosts") -> list[str]:
    """Return the hosts of a list in Slurm's shorthand: 'gpu[01-03,7],login' -> gpu01 gpu02 gpu03
    gpu7 login.

    A host may have several brackets, and text after each: 'rack[0-1]_blade[0-1]-ib'. The last
    bracket varies fastest.

    Args:   name: of the variable or option that holds the list, for messages.
    Raises: LaunchError, one line, for what is no such list, or names no host or more than
            MOST_HOSTS.
    """
    hosts: list[str] = []
    for word in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+|[\[\]]", nodes):
        pieces = re.split(r"\[([^\[\]]*)\]", word)  # text, inside of a bracket, text, …
        if word in "[]":
            raise LaunchError(
                f"{name}={nodes!r:.60}: a bracket is not closed; write gpu[01-03,7],login"
            )
        numbers = [_Numbers(inside, f"{name}={nodes!r:.60}") for inside in pieces[1::2]]
        count = len(hosts) + math.prod(choices.count for choices in numbers)
        if count > MOST_HOSTS:
            raise LaunchError(
                f"{name}={nodes!r:.60} names {count} hosts or more; at most {MOST_HOSTS} can be "
                "named"
            )
        for chosen in product(*numbers):
            hosts.append(pieces[0] + "".join(map("".join, zip(chosen, pieces[2::2], strict=True))))
    if not hosts:
        raise LaunchError(f"{name}={nodes!r:.60} names no host; write gpu[01-03,7],login")
    return hosts


class _Numbers:
    """The numbers inside a bracket: '01-03,7' holds 01 02 03 7.

    Raises: LaunchError, which begins with `where`.
    """

    def __init__(self, inside: str, where: str) -> None:
        self._ranges: list[tuple[range, int]] = []
        for part in inside.split(","):
            match = re.fullmatch("([0-9]{1,18})(?:-([0-9]{1,18}))?", part)
            if match is None or int(match[2] or match[1]) < int(match[1]):
                raise LaunchError(
                    f"{where}: {part!r:.40} is neither a number nor a range of numbers, such as "
                    "01-03"
                )
            self._ranges.append(
                (range(int(match[1]), int(match[2] or match[1]) + 1), len(match[1]))
            )

    @property
    def count(self) -> int:
        """Return how many numbers there are."""
        return sum(numbers.stop - numbers.start for numbers, _ in self._ranges)

    def __iter__(self) -> Iterator[str]:
        return (f"{number:0{width}d}" for numbers, width in self._ranges for number in numbers)


def _check_below(
    launcher: Launcher, variables: Mapping[str, str], low: int, high: int, names: tuple[str, str]
) -> None:
    if not 0 <= low < high:
        values = " but ".join(f"{name}={variables[name]}" for name in names)
        raise LaunchError(f"{launcher.name} contradicts itself: {values}; start the job again")


def _meeting(launcher: Launcher, variables: Mapping[str, str], last: int) -> tuple[str, int]:
    """Return the address and the port of MASTER_ADDR and MASTER_PORT, where the ranks join.

    Raises: LaunchError.
    """
    host = plain_address(_text(launcher, variables, launcher.master_addr))
    check_host(launcher.master_addr, host)
    return host, _number(launcher, variables, launcher.master_port, least=1, most=last)


def check_host(name: str, host: str) -> None:
    """Raise LaunchError, which names the variable, unless its value can be a host's name or
    address."""
    try:
        known = re.fullmatch(r"[\w.:%-]{1,253}", host) is not None and bool(host.encode("idna"))
    except UnicodeError:
        known = False
    if not known:
        raise LaunchError(
            f"{name}={host!r:.60} is neither a host's name nor its address, such as 10.0.0.1"
        )


def _text(launcher: Launcher, variables: Mapping[str, str], name: str) -> str:
    if not variables.get(name):
        raise LaunchError(
            f"{launcher.marker} is set, as {launcher.name} does, but {name} is missing; start "
            f"the job with `{launcher.command}`, or unset {launcher.marker}"
        )
    return variables[name]


def _number(
    launcher: Launcher,
    variables: Mapping[str, str],
    name: str,
    *,
    least: int = 0,
    most: int = MOST_RANKS,
) -> int:
    text = _text(launcher, variables, name)
    return number_of(
        name, text, f"{launcher.name} sets it, so start the job again", least=least, most=most
    )


def number_of(name: str, text: str, remedy: str, *, least: int = 0, most: int = MOST_RANKS) -> int:
    """Return the number that a variable holds.

    Raises: LaunchError, which names the variable, its value and the bounds.
    """
    if not re.fullmatch("[0-9]{1,20}", text) or not least <= int(text) <= most:
        raise LaunchError(
            f"{name}={text!r:.60} is not a whole number from {least} to {most}; {remedy}"
        )
    return int(text)
