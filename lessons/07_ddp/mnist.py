"""Run the notes' MNIST example (N1:58), corrected: DDP over the launched ranks. Each reads its own
part.

    mpirun -n 4 python lessons/07_ddp/mnist.py                     # scikit-learn's digits, extra
                                                                   `digits`
    mpirun -n 4 python lessons/07_ddp/mnist.py --data FOLDER       # MNIST's four IDX files
    python lessons/07_ddp/mnist.py                                 # one process: the same batches,
                                                                   the same weights

What was wrong, in the order of the notes' lines:
    rank=0, world_size=2    written into the program: it waits for ever for a rank 1, and the second
                            process also says that it is rank 0
    shuffle=False           is right for a loader with a sampler; but sampler.set_epoch was not
                            called, so every epoch had the same order
    num_replicas=2, rank=0  every process reads the same half of the data; no process reads the other
    nn.DataParallel(model)  one process with many threads; it never uses the process group opened
                            above
"""

import argparse

import numpy as np

import minidist as md
from minidist.autograd import ops
from minidist.autograd.tensor import Tensor, no_grad
from minidist.comm.group import Group
from minidist.data import DistributedSampler, ImageData, digits, mnist
from minidist.nn import Linear, Module
from minidist.optim import Adam
from minidist.parallel.data.ddp import DDP
from minidist.parallel.step.step import Part

BATCH = 64
EPOCHS = 4
SEED = 0


class Classifier(Module):
    """Pixels (b, n) -> one logit a class (b, classes), through a hidden layer."""

    def __init__(self, pixels: int, classes: int, hidden: int = 64) -> None:
        self.first = Linear(pixels, hidden)
        self.second = Linear(hidden, classes)

    def forward(self, x: np.ndarray) -> Tensor:
        return self.second(ops.gelu(self.first(x)))

    def loss(self, inputs: np.ndarray, targets: np.ndarray, divisor: float | None = None) -> Tensor:
        """Sum of the cross-entropies over `divisor`."""
        return ops.cross_entropy(self(inputs), targets, divisor=divisor)


def train(
    world: Group, data: ImageData, epochs: int = EPOCHS
) -> list[tuple[int, float, float, int]]:
    """Train; return (epoch, mean training loss, accuracy on the held-out images, samples that this
    rank read), one row per epoch."""
    model = Classifier(data.train.pixels[0].size, data.classes)
    model.initialize(seed=SEED)
    ddp = DDP(model, world)
    optimizer = Adam(list(model.parameters()), 3e-3)
    sampler = DistributedSampler(
        len(data.train), group_size=world.size, rank=world.rank, seed=SEED, batch=BATCH
    )
    rows = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)  # another order, the same on every rank
        total = 0.0
        read = 0
        for step, mine in enumerate(sampler):
            # of all ranks; the last batch is short
            together = min(BATCH, len(data.train) - step * BATCH)
            share = ddp.forward(Part(*data.train.batch(mine), first=0), divisor=together)
            ddp.backward(share)
            optimizer.step()
            optimizer.zero_grad()
            total = total + (share.item() * together if share is not None else 0.0)
            read = read + len(mine)
        mean = float(world.all_reduce(np.array([total]))[0]) / len(data.train)
        rows.append((epoch, mean, accuracy(model, data), read))
    return rows


def accuracy(model: Classifier, data: ImageData) -> float:
    """Share of the held-out images whose largest logit is the right one."""
    pixels, labels = data.test.batch(slice(None))
    with no_grad():
        return float(np.mean(model(pixels).data.argmax(axis=1) == labels))


def main() -> None:
    """Train on the ranks that were launched; rank 0 prints."""
    parser = argparse.ArgumentParser(description="The notes' MNIST example, corrected.")
    parser.add_argument(
        "--data", metavar="FOLDER", help="MNIST's IDX files (default: scikit-learn's digits)"
    )
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    options = parser.parse_args()
    world = md.init()
    data = mnist.load(options.data) if options.data else digits.load()
    for epoch, loss, right, read in train(world, data, options.epochs):
        if world.rank == 0:
            print(
                f"epoch {epoch}: loss {loss:.6f}, {100 * right:.1f} % right; rank 0 of "
                f"{world.size} read {read} of {len(data.train)} images"
            )


if __name__ == "__main__":
    main()
