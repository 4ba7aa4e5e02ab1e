"""Exercise 01: who am I? Read it from what the launcher left in the environment.

Copy this file (`minidist lesson 01 --copy DIR`), replace each `hole(...)` by your own code, and
grade it: `minidist check 01 DIR/exercise_01.py`. `environ` is a dict of texts, as os.environ is;
the tables of section 3 of the README say which launcher sets what.
"""

from typing import NamedTuple

from minidist.grading import hole


class Identity(NamedTuple):
    """The four numbers every rank must know; integers, counted from 0."""

    rank: int  # which process of the whole job (RANK)
    size: int  # how many processes in the whole job (WORLD_SIZE)
    local_rank: int  # which process on this machine (LOCAL_RANK)
    node_rank: int  # which machine (NODE_RANK)


def identify(environ):
    """Return the Identity of the process that has this environment; without a launcher it is rank 0
    of 1.

    The machines of a job run equally many processes each, with consecutive ranks (N0:41).
    """
    if "TORCHELASTIC_RUN_ID" in environ:  # torchrun
        return Identity(
            rank=hole(1, "torchrun: the rank in the whole job"),
            size=int(environ["WORLD_SIZE"]),
            local_rank=int(environ["LOCAL_RANK"]),
            node_rank=hole(
                2, "torchrun: which machine? its workers do not get it under the name NODE_RANK"
            ),
        )
    if "OMPI_COMM_WORLD_RANK" in environ:  # Open MPI's mpirun
        rank = int(environ["OMPI_COMM_WORLD_RANK"])
        local_size = int(environ["OMPI_COMM_WORLD_LOCAL_SIZE"])
        return Identity(
            rank=rank,
            size=int(environ["OMPI_COMM_WORLD_SIZE"]),
            local_rank=int(environ["OMPI_COMM_WORLD_LOCAL_RANK"]),
            node_rank=hole(
                3, "Open MPI sets no number of the machine: compute it from rank and local_size"
            ),
        )
    if "PMI_RANK" in environ:  # MPICH's mpirun
        rank = int(environ["PMI_RANK"])
        local_size = int(environ["MPI_LOCALNRANKS"])
        return Identity(
            rank=rank,
            size=hole(4, "MPICH: how many processes in the whole job?"),
            local_rank=int(environ["MPI_LOCALRANKID"]),
            node_rank=rank // local_size,
        )
    if "SLURM_PROCID" in environ:  # srun
        return Identity(
            rank=int(environ["SLURM_PROCID"]),
            size=int(environ["SLURM_NTASKS"]),
            local_rank=hole(5, "Slurm: which process on this machine?"),
            node_rank=int(environ["SLURM_NODEID"]),
        )
    return Identity(rank=0, size=1, local_rank=0, node_rank=0)


def my_samples(identity, length):
    """Return the indices that this rank reads of a data set of `length` samples: rank r takes r, r
    + size, r + 2 size, …"""
    return hole(6, "a range: where does this rank begin, and how far is it to its next sample?")


def my_device(identity, visible):
    """Return the number of the card that this rank uses, an integer.

    Args:    visible: CUDA_VISIBLE_DEVICES, a text such as "4,5,6,7"; it may have fewer entries than
             the machine has ranks.
    """
    return hole(7, "the card at this rank's place in the list (section 4)")
