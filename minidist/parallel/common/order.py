"""Which bucket may set out: the last gradient of each has come, and all before it have gone.

Ranks may use different parameters, and so complete their buckets in different orders; but the n-th collective of a
group must be the same one on every rank, or the sum of bucket 1 here would meet bucket 2 there. So a complete bucket
waits for those before it, although that costs overlap.
"""

from collections.abc import Callable, Sequence
from functools import partial

from minidist.errors import GradientError
from minidist.parallel.common.update import zero_unused
from minidist.tensor import Parameter


class InOrder:
    """Calls `start(index)` for each run of parameters once its gradients are final, strictly in order of the indices.

    Args:    runs: of parameters; their hooks tell when gradients are final.
             who: the strategy and rank; by: what to call instead; both for errors.
    """

    def __init__(self, runs: Sequence[Sequence[Parameter]], start: Callable[[int], None], *, who: str,
                 by: str) -> None:
        self.runs, self.start, self.who, self.by = runs, start, who, by
        self.started = len(runs)
        self._missing = [0] * len(runs)     # gradients each run still waits for
        self._idle, self._quiet = True, False
        for index, run in enumerate(runs):
            for parameter in run:
                parameter.hooks.append(partial(self._final, index))

    def begin(self, *, quiet: bool = False) -> None:
        """A backward begins; `quiet`: nothing is to set out in it, for more gradients will be added."""
        self._idle, self._quiet = False, quiet
        self._missing, self.started = [len(run) for run in self.runs], 0

    def finish(self) -> None:
        """Backward is over: what it did not reach here has gradient zero here, but perhaps not on other ranks."""
        self._idle = True
        if self._quiet:
            return
        for index in range(self.started, len(self.runs)):
            zero_unused(self.runs[index])
            self._missing[index] = 0
            self._start_complete()

    def _final(self, index: int, parameter: Parameter) -> None:
        """The hook on a parameter: its gradient is complete, so its run, and those behind it, may set out."""
        if self._idle or not self._missing[index]:
            raise GradientError(f"{self.who}: a gradient for {parameter.name!r} outside a step; go backward by "
                                f"{self.by}, with the sum of the losses")
        self._missing[index] -= 1
        if not self._quiet:
            self._start_complete()

    def _start_complete(self) -> None:
        while self.started < len(self.runs) and not self._missing[self.started]:
            self.started += 1
            self.start(self.started - 1)
