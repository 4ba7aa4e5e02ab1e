"""Buckets: gradients that are sent together.

A message costs a fixed time even if it is small, so gradients are not reduced one by one; and the
first must not wait for the last, so they are not all reduced at once. A bucket is one flat buffer
of the gradients of some parameters.

A bucket is reduced when the last of its gradients is final and all buckets before it have started.
Ranks may use different parameters, and so complete their buckets in different orders; but the n-th
collective of a group must be the same one on every rank, or bucket 1 of one rank would be added to
bucket 2 of another. So a complete bucket waits for the buckets before it, although that costs
overlap.

A parameter that a backward will not reach does not delay a bucket: before backward runs, it reports
which leaves it will reach (`Tensor.backward(surveyed=)`); the gradients of the others are final
then.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence

from minidist.autograd.backward import WeightGradient
from minidist.autograd.tensor import Parameter, Tensor
from minidist.device import account
from minidist.device.backend import Array, array_module
from minidist.errors import ConfigError, GradientError
from minidist.parallel.step.flat import views
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.step import zero_unused

BUCKET_BYTES = 2 << 20
"""The largest size of a bucket, in bytes, by default. Larger ones cost less processor time (13 MB
over shm: 15 ms in buckets of 0.5 MiB, 10 in 2, 8 in 4); but the last cannot hide behind
backward."""


class Bucket:
    """The gradients of `parameters`, one after another in one flat buffer; each parameter's
    gradient is a view of it.

    So nothing is packed or unpacked.
    Attributes: parameters  in reverse order of use
                data        (n,) their gradients' dtype and device
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.parameters = tuple(parameters)
        xp = array_module(parameters[0].data)
        first = parameters[0]
        self.data: Array = xp.zeros(sum(p.size for p in parameters), first.dtype)
        account.current().hold(self.data, "gradients")
        for parameter, view in views(parameters, self.data):
            parameter.bind_gradient(view)


def cut(parameters: Iterable[Parameter], bucket_bytes: int) -> list[list[Parameter]]:
    """Cut the parameters, last first, into runs of at most `bucket_bytes` of one dtype.

    Backward reaches parameters roughly in the reverse of the order in which the model declares
    them, so a run is complete early if it holds neighbours. A parameter larger than `bucket_bytes`
    is a run of its own. Parameters of different `layout` are in different runs, in the order of the
    layouts (chapter 17).
    Raises:  ConfigError if `bucket_bytes` is not positive.
    """
    if bucket_bytes <= 0:
        raise ConfigError(
            f"bucket_bytes={bucket_bytes}: a bucket has at least one byte; choose 1 MiB = {1 << 20}"
        )
    runs: list[list[Parameter]] = []
    room = -math.inf
    kind = None
    for parameter in sorted(reversed(list(parameters)), key=lambda parameter: parameter.layout):
        nbytes = parameter.data.nbytes
        if nbytes > room or kind != (parameter.dtype, parameter.layout):
            runs.append([])
            room = bucket_bytes
            kind = (parameter.dtype, parameter.layout)
        runs[-1].append(parameter)
        room -= nbytes
    return runs


def make_buckets(parameters: Iterable[Parameter], bucket_bytes: int) -> list[Bucket]:
    """Return buckets over the runs of `cut`, bound as their parameters' gradients, in the order of
    reduction."""
    return [Bucket(run) for run in cut(parameters, bucket_bytes)]


UNUSED = ("zero", "error")


class BucketOrder:
    """The order of reduction: it calls `start(index)` for each run of parameters once its gradients
    are final, strictly in order of the indices.

    It runs each backward itself, because it must know in advance which parameters the backward
    reaches.

    Args:    runs: of parameters; their hooks report when gradients are final.
             start: the strategy's: DDP._start_reduce, Zero1's or Zero2's.
             who: the strategy and rank; by: the method to call instead; both for errors.
             unused: as DDP's; a mistake is named before the rank's last backward of the step.
    Attributes: completed: parameters in the order in which the newest backward made their gradients
                final
    Raises:  ConfigError for another `unused`.
    """

    def __init__(
        self,
        runs: Sequence[Sequence[Parameter]],
        start: Callable[[int], None],
        *,
        who: str,
        by: str,
        unused: str = "zero",
    ) -> None:
        if unused not in UNUSED:
            raise ConfigError(f"{who}: unused={unused!r}; choose one of {', '.join(UNUSED)}")
        self.start = start
        self.who = who
        self.by = by
        self.unused = unused
        self.completed: list[Parameter] = []
        self._reduces = True  # the newest backward starts runs whose gradients are final
        # this rank has computed something since the last backward that started runs
        self._computed = False
        for run in runs:
            for parameter in run:
                parameter.hooks.append(self._final)
        self.arrange(runs)

    def arrange(self, runs: Sequence[Sequence[Parameter]]) -> None:
        """Use these runs from the next backward on; their parameters are those given first, or some
        of them."""
        self.runs = runs
        self.started = len(runs)
        # gradients each run still waits for in this backward; between two of them none
        self._missing = [0] * len(runs)
        self._run_of = {parameter: index for index, run in enumerate(runs) for parameter in run}

    def backward(
        self,
        precision: Precision,
        share: Tensor | None,
        dy: Array | None = None,
        *,
        defer: bool = False,
        reduces: bool = True,
    ) -> list[WeightGradient]:
        """Go backward from `share` (None: nothing was computed); the gradients that it does not
        reach on this rank are final too.

        Args:    dy, defer: as DataAxis.backward; reduces: False: no run starts, because later
                 backwards add gradients.
        Raises:  GradientError if gradients of the last step are still there, or as `unused` says.
        """
        self._begin(reduces)
        deferred = []
        if share is not None:
            deferred = precision.backward(share, dy, defer_weights=defer, surveyed=self._expect)
        if self.unused == "error" and reduces:
            self._refuse_unused(())
        self._missing = [0] * len(self.runs)
        if reduces:
            self._start_complete()
        return deferred

    def backward_weights(self, precision: Precision, deferred: list[WeightGradient]) -> None:
        """Compute the gradients that a backward has deferred; no run starts."""
        self._begin(reduces=False)
        precision.backward_weights(deferred)
        self._missing = [0] * len(self.runs)

    def _begin(self, reduces: bool) -> None:
        """Begin a backward: every run waits for all its gradients again."""
        # the backward before has started all runs: none of its gradients may be left
        if self._reduces:
            kept = next((p.name for run in self.runs for p in run if p.grad is not None), None)
            if kept is not None:
                raise GradientError(
                    f"{self.who}: the last step's gradient of {kept!r} is still there, and would "
                    "be added to this step's; call optimizer.zero_grad() after every step"
                )
            self._computed = False
        self._reduces = reduces
        self._missing = [len(run) for run in self.runs]
        self.started = 0

    def _expect(self, reached: Collection[int]) -> None:
        """Prepare for a backward that is about to run and will reach these leaves (ids)."""
        self._computed = True
        self.completed = []
        if not self._reduces:
            return
        if self.unused == "error":
            self._refuse_unused(reached)
        for index, run in enumerate(self.runs):
            self._missing[index] -= sum(id(parameter) not in reached for parameter in run)
        self._start_complete()

    def _refuse_unused(self, reached: Collection[int]) -> None:
        """Raise for parameters that no backward of the step reaches; not on a rank without a
        row."""
        if not self._computed:
            return
        names = [
            p.name
            for run in self.runs[self.started :]
            for p in run
            if p.requires_grad and id(p) not in reached and p.grad is None
        ]
        if names:
            some = ", ".join(map(repr, names[:3])) + (
                f" and {len(names) - 3} more" if len(names) > 3 else ""
            )
            raise GradientError(
                f"{self.who}: the loss does not depend on {some}; use every parameter on every "
                "rank, freeze it (requires_grad = False), or give it a zero gradient by "
                "unused='zero'"
            )

    def _final(self, parameter: Parameter) -> None:
        """Start the parameter's run, and those after it, if they are complete: the hook that a
        parameter calls when its gradient is."""
        index = self._run_of.get(parameter)
        if index is None:
            raise GradientError(
                f"{self.who}: {parameter.name!r} has a gradient now, but had none in the first "
                "step; static=True is for losses that use the same parameters in every step"
            )
        if not self._missing[index]:
            raise GradientError(
                f"{self.who}: a gradient for {parameter.name!r} outside a step; run backward by "
                f"{self.by}, with the sum of the losses"
            )
        self.completed.append(parameter)
        self._missing[index] -= 1
        if self._reduces:
            self._start_complete()

    def _start_complete(self) -> None:
        while self.started < len(self.runs) and not self._missing[self.started]:
            zero_unused(self.runs[self.started])
            self.started += 1
            self.start(self.started - 1)
