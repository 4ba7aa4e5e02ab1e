"""Buckets: gradients that travel together.

A message costs a fixed time however small it is, so gradients are not reduced one by one; and the first must not wait
for the last, so they are not all reduced at once. A bucket is the compromise: one flat buffer that holds the gradients
of a run of parameters, and one collective.
"""

import math
from collections.abc import Iterable, Sequence

from minidist.autograd.tensor import Parameter
from minidist.device import account
from minidist.device.backend import Array, array_module
from minidist.errors import ConfigError

BUCKET_BYTES = 2 << 20
"""A bucket's most bytes, unless told otherwise. For 13 MB of gradients on two ranks over shm, reducing took each rank
15 ms of processor time in buckets of 0.5 MiB, 13 in 1 MiB, 10 in 2 MiB, 8 in 4 MiB and 6 in one; but the last
bucket cannot hide behind backward, and the larger it is the longer all wait for it."""


class Bucket:
    """The gradients of `parameters`, one after another in one flat buffer; each parameter's gradient is a view of it.

    Nothing is ever packed or unpacked: backward writes into the views, the collective works on `data`, and the
    optimizer reads the views.

    Attributes: index       its place among the buckets, in the order in which they are reduced
                parameters  in reverse order of use
                data        (n,) their gradients' dtype and device
    """

    def __init__(self, index: int, parameters: Sequence[Parameter]) -> None:
        self.index = index
        self.parameters = tuple(parameters)
        xp, first = array_module(parameters[0].data), parameters[0]
        self.data: Array = xp.zeros(sum(p.size for p in parameters), first.dtype)
        account.current().hold(self.data, "gradients")
        start = 0
        for parameter in parameters:
            parameter.bind_gradient(self.data[start:start + parameter.size].reshape(parameter.shape))
            start += parameter.size

    def __repr__(self) -> str:
        return f"<bucket {self.index}: {len(self.parameters)} gradients, {self.data.nbytes} bytes>"


def cut(parameters: Iterable[Parameter], bucket_bytes: int,
        apart: Sequence[Sequence[Parameter]] = ()) -> list[list[Parameter]]:
    """Cut the parameters, last first, into runs of at most `bucket_bytes` of one dtype.

    Backward meets parameters roughly in the reverse of the order in which the model declares them, so a run is complete
    early if it holds neighbours. A parameter larger than `bucket_bytes` makes a run by itself.
    Args:    apart: of the parameters those that get runs of their own, behind the others: what other groups of ranks
             hold too, and must sum in the same order to have the same bits, whatever else they hold (chapter 17).
    Raises:  ConfigError if `bucket_bytes` is not positive.
    """
    if bucket_bytes <= 0:
        raise ConfigError(f"bucket_bytes={bucket_bytes}: a bucket holds at least one byte; take 1 MiB = {1 << 20}")
    if apart:
        several = {id(parameter) for some in apart for parameter in some}
        rest = [parameter for parameter in parameters if id(parameter) not in several]
        return [run for some in (rest, *apart) for run in cut(some, bucket_bytes)]
    runs: list[list[Parameter]] = []
    room, dtype = -math.inf, None
    for parameter in reversed(list(parameters)):
        nbytes = parameter.data.nbytes
        if nbytes > room or parameter.dtype != dtype:
            runs.append([])
            room, dtype = bucket_bytes, parameter.dtype
        runs[-1].append(parameter)
        room -= nbytes
    return runs


def make_buckets(parameters: Iterable[Parameter], bucket_bytes: int,
                 apart: Sequence[Sequence[Parameter]] = ()) -> list[Bucket]:
    """Buckets over the runs of `cut`, bound as their parameters' gradients, in the order of reduction."""
    return [Bucket(index, run) for index, run in enumerate(cut(parameters, bucket_bytes, apart))]
