"""The samples of each rank: one shuffled order of the data set is cut into global batches, and each
batch is cut among the ranks."""

from collections.abc import Iterator
from typing import Literal

import numpy as np

from minidist.device.backend import random_bits
from minidist.errors import ConfigError


class DistributedSampler:
    """An iterator over this rank's sample numbers: one integer array for each step of an epoch.

        sampler = DistributedSampler(1797, group_size=world.size, rank=world.rank, seed=0, batch=64)
        for epoch in range(3):
            sampler.set_epoch(epoch)                 # otherwise every epoch has the same order
            for mine in sampler:
                images[mine]

    The order of an epoch depends only on seed and epoch. Step s takes its places s·batch to
    (s+1)·batch, cut among the ranks as by `numpy.array_split`. So the shares of all ranks, joined,
    are the same for any number of ranks.

    Args:    length: samples in the data set; batch: samples per step, of all ranks together.
             shuffle: False keeps the order 0, 1, 2, …
             last: for a last batch that is not full: "keep" it short, "drop" it, or "repeat" the
             first samples.
    Raises:  ConfigError for sizes that cannot work.
    """

    def __init__(
        self,
        length: int,
        *,
        group_size: int,
        rank: int,
        batch: int,
        seed: int = 0,
        epoch: int = 0,
        shuffle: bool = True,
        last: Literal["keep", "drop", "repeat"] = "keep",
    ) -> None:
        length = int(length)  # -length of an unsigned integer would be wrong
        batch = int(batch)
        if length < 0 or batch < 1 or group_size < 1:
            raise ConfigError(
                f"DistributedSampler: {length} samples in batches of {batch} for {group_size} "
                "ranks; length must be 0 or more, batch and group_size 1 or more"
            )
        if not 0 <= rank < group_size:
            raise ConfigError(f"DistributedSampler: rank {rank} is not in a group of {group_size}")
        if last not in ("keep", "drop", "repeat"):
            raise ConfigError(f"DistributedSampler: last is {last!r}; choose keep, drop or repeat")
        self.length = length
        self.batch = batch
        self.group_size = group_size
        self.rank = rank
        self.seed = seed
        self.epoch = epoch
        self.shuffle = shuffle
        self.last = last

    def __len__(self) -> int:
        """Return the number of steps of an epoch: the same on every rank."""
        return self.length // self.batch if self.last == "drop" else -(-self.length // self.batch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch

    def order(self) -> np.ndarray:
        """Return the order of the epoch, for all ranks: int64, `length` numbers; fewer or more if
        `last` says so."""
        samples = np.arange(self.length)
        if self.shuffle:
            samples = np.argsort(
                random_bits(f"sampler/epoch {self.epoch}", self.seed, samples), kind="stable"
            )
        if self.last == "keep":
            return samples
        return np.resize(samples, len(self) * self.batch)  # cut, or begun again

    def __iter__(self) -> Iterator[np.ndarray]:
        order = self.order()
        for step in range(len(self)):
            yield np.array_split(
                order[step * self.batch : (step + 1) * self.batch], self.group_size
            )[self.rank]
