"""Side by side with PyTorch's DDP and FSDP: the same weights, batches and optimizer give the same
losses."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training import global_batch, tiny

import minidist as md
from minidist.bench.step.ranks import PEERS
from minidist.nn import GPT
from minidist.parallel.hybrid.hybrid import Plan, Trainer

CONFIG = tiny(width=16, context=8)
SEQUENCES = 8


def theirs(peer: str, size: int, steps: int, folder: Path) -> np.ndarray:
    """The mean over PyTorch's ranks of each step's loss."""
    model = GPT(CONFIG)
    model.initialize(3)
    inputs, targets = zip(
        *(global_batch(step, SEQUENCES, CONFIG) for step in range(steps)), strict=True
    )
    sizes = (CONFIG.vocabulary, CONFIG.context, CONFIG.layers, CONFIG.width, CONFIG.heads)
    np.savez(
        folder / "job.npz",
        inputs=np.stack(inputs),
        targets=np.stack(targets),
        sizes=sizes,
        **model.state_dict(),
    )
    script = Path(__file__).parents[1] / "support" / "torch_job.py"
    ranks = [
        subprocess.Popen(
            [sys.executable, script, peer, str(rank), str(size), folder],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        for rank in ranks:
            _, said = rank.communicate(timeout=100)
            assert rank.returncode == 0, said[-2000:]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    return np.mean([np.load(folder / f"losses-{rank}.npy") for rank in range(size)], axis=0)


def ours(world: Any, zero: int, steps: int, accumulate: int, clip: float | None) -> list[float]:
    trainer = Trainer(
        Plan(dp=world.size, zero=zero, accumulate=accumulate),
        CONFIG,
        world,
        seed=3,
        clip=clip,
        optimizer_options={"weight_decay": 0.01, "decay": lambda weights: True},
    )
    losses = [trainer.step(global_batch(step, SEQUENCES, CONFIG)) for step in range(steps)]
    trainer.close()
    return losses


def check(peer: str, zero: int, size: int, steps: int, folder: Path) -> None:
    """Ours, in one pass and in two, beside theirs."""
    pytest.importorskip("torch", reason="needs PyTorch: the extra `bench`")
    expected = theirs(peer, size, steps, folder)
    assert len(set(expected)) == steps
    clip = None if peer.startswith("FSDP1") else 0.5
    for accumulate in (1, 2):
        for losses in md.run(
            lambda world, passes=accumulate: ours(world, zero, steps, passes, clip), size=size
        ):
            np.testing.assert_allclose(losses, expected, rtol=1e-10)


def test_ddp_beside_pytorchs(tmp_path: Path) -> None:
    check("DDP", 0, 2, 4, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("zero", "peer"), [(zero, peer) for zero, peers in PEERS.items() for peer in peers]
)
def test_every_stage_beside_its_peers(zero: int, peer: str, size: int, tmp_path: Path) -> None:
    check(peer, zero, size, 20, tmp_path)
