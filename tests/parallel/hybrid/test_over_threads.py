"""md.Mesh, md.Plan and md.Trainer work the same where ranks are threads of one process, as
debuggers want them."""

from typing import Any

import pytest
from training import global_batch, tiny

import minidist as md

CONFIG = tiny()


def work(world: Any) -> list[Any]:
    """Three steps on a mesh of 2 × 2: this rank's place, its losses, and the digest of the
    weights."""
    mesh = md.Mesh(world, dp=2, tp=2)
    trainer = md.Trainer(md.Plan(dp=2, tp=2, zero=1), CONFIG, world, lr=1e-2, seed=3)
    losses = [float(trainer.step(global_batch(step, 4, CONFIG))) for step in range(3)]
    trainer.check_replicas()
    digest = trainer.weights_sha256()
    trainer.close()
    return [[mesh["dp"].rank, mesh["tp"].rank], losses, digest]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    "transport", ["threads-unbuffered", "auto", pytest.param("tcp", marks=pytest.mark.soak)]
)
def test_the_same_run_over_threads_and_over(transport: str) -> None:
    over_threads = md.run(work, size=4, transport="threads")
    assert [place for place, *_ in over_threads] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert md.run(work, size=4, transport=transport) == over_threads
