"""Sums on their way, and the state that schemes keep of what they did not send."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from minidist.comm.calls.async_call import Pending
from minidist.device import account
from minidist.device.backend import Array, array_module, widen
from minidist.parallel.step.scheme import GradientRun

# which error of a bucket: what this rank did not send of its own gradient, or, as the owner of a
# chunk, of the sum
WORKER = "worker"
SERVER = "server"


class Alone(Pending):
    """The sum of a group of one rank: it has it already."""

    def __init__(self, bucket: Array, out: Array | None) -> None:
        self.bucket = bucket
        self.out = out

    def wait(self) -> Array:
        if self.out is None:
            return self.bucket
        self.out[...] = self.bucket
        return self.out

    def done(self) -> bool:
        return True


class Then(Pending):
    """A call under way, and what follows it once: `finish(its result)` returns the result of
    wait()."""

    def __init__(self, call: Pending, finish: Callable[[Any], Array]) -> None:
        self.call = call
        self.finish = finish
        self._result: Array | None = None

    def wait(self) -> Array:
        if self._result is None:
            self._result = self.finish(self.call.wait())
        return self._result

    def done(self) -> bool:
        return self.call.done()


class Phased(Pending):
    """A sum on its way in two phases."""

    @abstractmethod
    def advance(self) -> None:
        """Wait for phase 1, and begin phase 2; nothing, if that is done."""


def widened(kind: np.dtype) -> np.dtype:
    """Return the dtype in which a bucket of dtype `kind` is added up."""
    found: np.dtype = widen(np.empty(0, kind)).dtype
    return found


def zeros_for(run: GradientRun, size: int) -> Array:
    """Return new zeros of a scheme's state, in the dtype in which the bucket is added up."""
    xp = array_module(run.spans[0][0].data)
    return account.current().hold(xp.zeros(size, widened(run.dtype)), "residuals")
