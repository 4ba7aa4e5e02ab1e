"""Find out, before MPI_Init, whether mpi4py's MPI is the one whose mpirun started this process.

MPICH's library under Open MPI's mpirun ends the process inside MPI_Init, with lines of its own
("unsupported PMI version PMIx"). So under Open MPI, which OMPI_ variables show, we ask the library
for its name before MPI_Init.

    mpirun of    library of     the ranks are
    MPICH        any            those of an MPI_COMM_WORLD; worlds of one rank are refused
                                (mpi_init.py)
    Open MPI     Open MPI       those of an MPI_COMM_WORLD
    Open MPI     MPICH, none    no MPI's: they join at rank 0, over shared memory and TCP
                                (joining.py)

srun's --mpi chooses how MPI's ranks connect. With pmix, MPICH's library would end the process in
the same way.
"""

import atexit
import os
import sys
from dataclasses import replace

from minidist.errors import LaunchError
from minidist.launch.launchers import LAST_PORT, Launch, check_host, detect, number_of


def find_launch() -> Launch:
    """Return the Launch of this process, as `detect` does.

    `other_mpi` is set if its MPI is not mpi4py's.

    Raises: LaunchError, one line, if the launcher contradicts itself.
    """
    launch = detect()
    if launch.launcher != "openmpi" or "Open MPI" in library():
        return launch
    launch = replace(launch, other_mpi=True, transport="auto")
    host = os.environ.get("MASTER_ADDR", "")
    port = os.environ.get("MASTER_PORT", "")
    if not (host and port):
        return launch
    check_host("MASTER_ADDR", host)
    number = number_of("MASTER_PORT", port, "name a port, or unset it", least=1, most=LAST_PORT - 1)
    return replace(launch, master_addr=host, master_port=number)


def library() -> str:
    """Return the name and version of mpi4py's MPI, "" if there is none.

    MPI_Init is not called (mpi_init.py does that).
    """
    known = "mpi4py.MPI" in sys.modules
    try:
        import mpi4py

        before = mpi4py.rc.initialize
        mpi4py.rc.initialize = False
        try:
            from mpi4py import MPI
        finally:
            mpi4py.rc.initialize = before
        if not known:
            atexit.register(_finalize)  # before membership registers its end, so it runs after it
        return " ".join(MPI.Get_library_version().splitlines()[0].rstrip("\x00").split())
    except (ImportError, RuntimeError, OSError):  # not installed; no library that it could load
        return ""


def _finalize() -> None:
    """Call MPI_Finalize at exit, as mpi4py does if importing it has called MPI_Init."""
    mpi = sys.modules["mpi4py.MPI"]
    if mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()


def cannot_meet(launch: Launch) -> bool:
    """Return whether MPI_Init would end these ranks, which are to use MPI."""
    return launch.other_mpi or (
        launch.mpi_by_srun and "PMIX_NAMESPACE" in os.environ and "Open MPI" not in library()
    )


def refusal(launch: Launch) -> LaunchError:
    """Return the error for ranks that are to use MPI and for which `cannot_meet` is true."""
    if launch.mpi_by_srun:
        return LaunchError(
            f"srun --mpi=pmix started {launch.world_size} tasks, but mpi4py has "
            f"{library() or 'no MPI library'}: give srun --mpi=pmi2 for MPICH, or use transport "
            "auto"
        )
    return LaunchError(
        f"transport 'mpi': Open MPI's mpirun started these {launch.world_size} ranks, but mpi4py "
        f"has {library() or 'no MPI library'}; take auto, tcp or shm, or start with the mpirun "
        "that belongs to mpi4py (`minidist doctor` names it)"
    )


def remark(launch: Launch) -> str:
    """Return the line that is printed once if no transport was chosen: under mpirun a user expects
    MPI."""
    return (
        f"minidist: Open MPI's mpirun started these {launch.world_size} ranks, but mpi4py has "
        f"{library() or 'no MPI library'}; taking transport auto (shared memory, TCP) instead of "
        "mpi"
    )
