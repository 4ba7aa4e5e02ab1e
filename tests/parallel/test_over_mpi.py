"""Every strategy on one start of mpirun: the same bits as among threads. The soak cases of
tests/parallel/test_parity.py have one strategy a start, and every transport.

A start of four ranks takes two seconds of processor time, a job of one strategy a tenth of that.
"""

import plans
import pytest
from every_strategy import JOBS, every_job

import minidist as md

FEW = ["DDP, three passes", "ZeRO-3", "tensor", "context, a ring"]
"""On three ranks, whose start is cheaper. The soak takes all, and holds two plans against one
process."""


@pytest.mark.parametrize(
    ("names", "size"),
    [(FEW, 3), pytest.param(list(JOBS), 4, marks=pytest.mark.soak)],
    ids=["few", "all"],
)
def test_same_bits_over_mpi(names: list[str], size: int) -> None:
    """Threads equal one process, too: checked here for plans that cut the model."""
    over_threads, over_mpi = (
        md.run(every_job, names, size=size, transport=transport) for transport in ("threads", "mpi")
    )
    for rank in over_mpi:
        assert rank == over_threads[0]
    for name in {"context × tensor", "pipeline × tensor"} & set(names):
        changes, options = JOBS[name][1]
        plans.check(changes, options["plan"], steps=options["steps"])
