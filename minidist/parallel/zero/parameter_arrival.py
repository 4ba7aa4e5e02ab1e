"""Weights on their way from the ranks that updated them: whoever reads one waits for it, and nobody sooner.

    compute         … optimizer | forward: layer 1 | layer 2  | layer 3  | backward …
    communication               | gather 1 | gather 2 | gather 3 |

A step ends when its updates have set out. The next forward takes the weights in the order in which the model declares
them, so they set out in that order, and while a layer computes, those of the next arrive.
"""

from collections.abc import Sequence
from functools import partial

from minidist.comm.calls.async_call import Pending
from minidist.device.backend import Array
from minidist.parallel.step.flat import Flat
from minidist.parallel.step.recorder import Recorder


class Arrivals:
    """Gathers runs of parameters, of which each rank has its chunk, into whole vectors.

    Args:    flats: the runs, last used first; weights: their whole vectors, of which the parameters are views.
             algorithm: of the all-gather.
    """

    def __init__(self, flats: Sequence[Flat], weights: Sequence[Array], *, algorithm: str,
                 recorder: Recorder) -> None:
        self.flats, self.weights = flats, weights
        self.algorithm, self.recorder = algorithm, recorder
        self._pending: dict[int, Pending] = {}

    def start(self) -> None:
        """This rank's chunks are new: begin to gather everybody's.

        Cost:    one all-gather a flat; returns at once.
        """
        for index in reversed(range(len(self.flats))):
            flat, vector = self.flats[index], self.weights[index]
            self.recorder.announce(flat.group.axis, f"all_gather bucket {index}")
            self._pending[index] = flat.group.start_all_gather(vector[flat.own], out=vector, algorithm=self.algorithm)
            for parameter in flat.parameters:
                parameter.arrival = partial(self._arrive, index)

    def _arrive(self, index: int) -> None:
        with self.recorder.span("wait for weights"):
            self._pending[index].wait()
        del self._pending[index]
        for parameter in self.flats[index].parameters:
            parameter.arrival = None

    def settle(self) -> None:
        """Wait for all that is on its way: the vectors may change again."""
        for index in list(self._pending):
            self._arrive(index)
