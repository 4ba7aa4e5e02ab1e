"""Grades exercise 01: the numbers of each process of two jobs under each launcher, and what
follows."""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from minidist.grading import Mistake, Result, Signs, judge
from minidist.launch import detect

NODES = 2
PER_NODE = 4
JOBS = ((NODES, PER_NODE), (3, 2))  # machines, processes of each
# CUDA_VISIBLE_DEVICES: a card for each rank of a machine, one for all, three for four ranks
VISIBLE = ("13,5,12,4", "6", "13,5,12")
# The variable of each field of Identity.
NAMES = {"rank": "RANK", "size": "WORLD_SIZE", "local_rank": "LOCAL_RANK", "node_rank": "NODE_RANK"}


def environments(nodes: int = NODES, per_node: int = PER_NODE) -> dict[str, list[dict[str, str]]]:
    """Return the environments that each launcher gives to the processes of a job, in rank order.

    The job has `nodes` machines with `per_node` processes each.
    """
    jobs: dict[str, list[dict[str, str]]] = {
        "torchrun": [],
        "mpirun (Open MPI)": [],
        "mpirun (MPICH)": [],
        "srun": [],
    }
    size = nodes * per_node
    for rank in range(size):
        node, local = divmod(rank, per_node)
        jobs["torchrun"].append(
            _texts(
                RANK=rank,
                WORLD_SIZE=size,
                LOCAL_RANK=local,
                LOCAL_WORLD_SIZE=per_node,
                GROUP_RANK=node,
                GROUP_WORLD_SIZE=nodes,
                ROLE_RANK=rank,
                ROLE_WORLD_SIZE=size,
                MASTER_ADDR="10.0.0.1",
                MASTER_PORT=29500,
                TORCHELASTIC_RUN_ID="none",
            )
        )
        jobs["mpirun (Open MPI)"].append(
            _texts(
                OMPI_COMM_WORLD_RANK=rank,
                OMPI_COMM_WORLD_SIZE=size,
                OMPI_COMM_WORLD_LOCAL_RANK=local,
                OMPI_COMM_WORLD_LOCAL_SIZE=per_node,
                OMPI_COMM_WORLD_NODE_RANK=local,
            )
        )
        jobs["mpirun (MPICH)"].append(
            _texts(PMI_RANK=rank, PMI_SIZE=size, MPI_LOCALRANKID=local, MPI_LOCALNRANKS=per_node)
        )
        jobs["srun"].append(
            _texts(
                SLURM_PROCID=rank,
                SLURM_NTASKS=size,
                SLURM_LOCALID=local,
                SLURM_NODEID=node,
                SLURM_NNODES=nodes,
                SLURM_TASKS_PER_NODE=f"{per_node}(x{nodes})",
                SLURM_STEP_ID=0,
                SLURM_JOB_ID=7,
                SLURM_STEP_NODELIST="node[0-1]",
                SLURM_STEP_NUM_TASKS=size,
                SLURM_STEP_NUM_NODES=nodes,
            )
        )
    return jobs


def _texts(**variables: Any) -> dict[str, str]:
    """Return the variables with their values as texts: an environment holds only texts."""
    return {name: str(value) for name, value in variables.items()}


ANSWERS = {
    1: 'int(environ["RANK"])',
    2: 'int(environ["GROUP_RANK"])',
    3: "rank // local_size",
    4: 'int(environ["PMI_SIZE"])',
    5: 'int(environ["SLURM_LOCALID"])',
    6: "range(identity.rank, length, identity.size)",
    7: 'int(visible.split(",")[identity.local_rank % len(visible.split(","))])',
}
"""The right code of the holes beyond the plain version."""


def grade(exercise: ModuleType) -> Iterator[Result]:
    """Check every launcher, then the data and the devices."""
    for nodes, per_node in JOBS:
        for launcher, ranks in environments(nodes, per_node).items():
            mine = [exercise.identify(environ) for environ in ranks]
            yield _identities(launcher, nodes, ranks, mine)
    yield _alone(exercise.identify({"HOME": "/home/student"}))
    yield _samples(exercise)
    for visible in VISIBLE:
        yield _devices(exercise, visible)


def _identities(
    launcher: str, nodes: int, environs: list[dict[str, str]], mine: list[Any]
) -> Result:
    """Check all processes of one launcher against what `minidist.launch.detect` reads."""
    per_node = len(environs) // nodes
    job = f"{launcher}, {nodes} machines of {per_node}"
    for rank, (environ, identity) in enumerate(zip(environs, mine, strict=True)):
        for name, target in zip(NAMES, _library(environ), strict=True):
            measured = getattr(identity, name)
            if measured != target:
                return judge(
                    f"{job}, process {rank}",
                    False,
                    f"{NAMES[name]} {target}",
                    f"{NAMES[name]} {measured!r}",
                    "wrong variable",
                    f"the table in section 3 lists what {launcher} sets",
                    signs=_signs(launcher, name, measured, target, environ, nodes, per_node),
                )
    text = f"{len(mine)} identities as md.init reads them"
    return Result(job, True, text, text)


def _library(environ: dict[str, str]) -> tuple[int, int, int, int]:
    """Return (rank, size, local rank, node rank) as md.init reads them: the answer key."""
    launch = detect(environ)
    return launch.world_rank, launch.world_size, launch.local_rank, launch.node_rank


def _signs(
    launcher: str,
    name: str,
    measured: Any,
    target: int,
    environ: dict[str, str],
    nodes: int,
    per_node: int,
) -> Signs:
    """Return the mistakes that one wrong number of an identity can show."""
    local = {
        "torchrun": "LOCAL_RANK",
        "mpirun (Open MPI)": "OMPI_COMM_WORLD_LOCAL_RANK",
        "mpirun (MPICH)": "MPI_LOCALRANKID",
        "srun": "SLURM_LOCALID",
    }[launcher]
    rank_on_node = int(environ.get("OMPI_COMM_WORLD_NODE_RANK", -1))
    first = name == "node_rank" and measured == 0
    return {
        "text for a number": Mistake(
            isinstance(measured, str),
            "the environment holds texts; '4' + '1' is '41': make an integer of it",
        ),
        "local rank for rank": Mistake(
            name == "rank" and measured == int(environ[local]),
            f"{local} counts on one machine only: {nodes} processes now believe they are rank "
            f"{measured}, and none is rank {nodes * per_node - 1}: read section 2 again",
        ),
        "the machine for the rank": Mistake(
            name == "rank" and measured == int(environ.get("GROUP_RANK", -1)),
            "that is the machine, and its processes are not told apart: read section 2 again",
        ),
        "local size for size": Mistake(
            name == "size" and measured == per_node,
            f"that counts one machine's processes, the job has {nodes} machines: read section 2 "
            "again",
        ),
        "the size of another job": Mistake(
            name == "size" and measured == NODES * PER_NODE,
            "the size is not written into the program: read section 5 again",
        ),
        "NODE_RANK under torchrun": Mistake(
            launcher == "torchrun" and first,
            "torchrun takes --node_rank, but its workers find no NODE_RANK, so with a default of 0 "
            "every machine takes itself for the first: read section 3 again",
        ),
        "every machine is the first": Mistake(
            first, "how many whole machines lie before this rank? read section 2 again"
        ),
        "the place on the machine for the machine": Mistake(
            name == "node_rank" and measured == rank_on_node,
            "that is the place *on* the machine, as OMPI_COMM_WORLD_NODE_RANK and rank % local_size "
            "are; how many whole machines lie before this rank? read section 3 again",
        ),
        "one too many": Mistake(
            measured == target + 1, "all numbers are counted from 0: read section 1 again"
        ),
        "wrong local rank": Mistake(
            name == "local_rank",
            f"not the number on this machine, which {launcher} tells in a variable of its own: read "
            "section 3 again",
        ),
    }


def _alone(identity: Any) -> Result:
    """Check that a process without a launcher is rank 0 of 1."""
    target = _library({"HOME": "/home/student"})
    return Result(
        "alone",
        tuple(identity) == target,
        str(target),
        str(tuple(identity)),
        "not rank 0 of 1",
        "a process without a launcher must run by itself: read section 1 again",
    )


def _samples(exercise: ModuleType) -> Result:
    """Check that exactly one rank reads each sample.

    The number of ranks does not divide the number of samples.
    """
    length = 21
    size = NODES * PER_NODE
    identities = [
        exercise.Identity(rank, size, rank % PER_NODE, rank // PER_NODE) for rank in range(size)
    ]
    parts = [list(exercise.my_samples(identity, length)) for identity in identities]
    readers = [sum(sample in part for part in parts) for sample in range(length)]
    task = f"{length} samples on {size} ranks"
    target = "each read once"
    unread = [sample for sample, count in enumerate(readers) if count == 0]
    if all(part == parts[0] for part in parts):
        return Result(
            task,
            False,
            target,
            f"all ranks read {parts[0][:4]}…; no rank reads {len(unread)} samples",
            "the same samples on every rank",
            "rank and size must come from the identity, not from the program (N1:58): read "
            "section 5 again",
        )
    if unread or max(readers) > 1:
        return Result(
            task,
            False,
            target,
            f"{len(unread)} unread, {sum(count > 1 for count in readers)} read twice",
            "samples lost or doubled",
            "from its own rank on, in steps of the number of all ranks, whatever the machine: read "
            "section 5 again",
        )
    expected = [list(range(rank, length, size)) for rank in range(size)]
    return Result(
        task,
        parts == expected,
        "rank 1 reads 1, 9, 17",
        f"rank 1 reads {parts[1]}",
        "another split",
        "rank r takes r, r + size, r + 2 size, …",
    )


def _devices(exercise: ModuleType, visible: str) -> Result:
    """Check that LOCAL_RANK counts inside CUDA_VISIBLE_DEVICES, and starts again at its front."""
    cards = visible.split(",")
    task = f'CUDA_VISIBLE_DEVICES="{visible}"'
    size = NODES * PER_NODE
    for rank in range(size):
        local_rank = rank % PER_NODE
        target = _entry(cards, local_rank)
        measured = None
        told = "none: no such entry"
        try:
            measured = exercise.my_device(
                exercise.Identity(rank, size, local_rank, rank // PER_NODE), visible
            )
            told = repr(measured)
        except IndexError:
            pass
        if measured != target:
            return judge(
                task,
                False,
                f"rank {rank} on GPU {target}",
                f"rank {rank} on GPU {told}",
                "wrong device",
                "LOCAL_RANK is a place in the visible list: read section 4 again",
                signs=_device_signs(measured, cards, rank),
            )
    right = f"every rank on its card, of {len(cards)} in the list"
    return Result(task, True, right, right)


def _entry(cards: list[str], place: int) -> int:
    """Return the entry at a place that may lie past the end of the list."""
    return int(cards[place % len(cards)])


def _device_signs(measured: Any, cards: list[str], rank: int) -> Signs:
    """Return what names a wrong device of a rank; None: the list has no such entry."""
    local_rank = rank % PER_NODE
    enough = len(cards) == PER_NODE
    return {
        "text for a number": Mistake(
            isinstance(measured, str), "an entry of the list is a text: make an integer of it"
        ),
        "one too far": enough and measured == _entry(cards, local_rank + 1),
        "the list was sorted": enough
        and measured in (sorted(map(int, cards))[local_rank], int(sorted(cards)[local_rank])),
        "the rank in the whole job": Mistake(
            rank >= PER_NODE and (enough and measured is None or _entry(cards, rank) == measured),
            "each machine has a list of its own: count in it with the rank on this machine: read "
            "section 4 again",
        ),
        "past the end of the list": Mistake(
            measured is None and not enough,
            f"place {local_rank} of a list of {len(cards)}: start again at its front: read section "
            "4 again (hole 7)",
        ),
        "stays at the end of the list": Mistake(
            local_rank >= len(cards) and measured == int(cards[-1]),
            f"place {local_rank} of a list of {len(cards)}: start again at its front: read section "
            "4 again (hole 7)",
        ),
        "device 0 .. 3 although others are visible": measured == local_rank,
    }


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "01", *sys.argv[1:]]))
