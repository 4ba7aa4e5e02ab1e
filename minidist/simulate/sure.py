"""Chapter 24 · How sure an answer is: the errors of measured steps that the constants were not
fitted to.

    spread    of ten such steps, nine were measured within this factor of the prediction
    apart     of ten pairs of them, nine differ as predicted within this factor: what both of a pair
              are wrong by does not count, so plans of one job can be told apart better than their
              seconds are known

    found.interval(0.178)            # (0.143, 0.221): what a step is known to, with spread 1.24
    found.tells(0.178, 0.190)        # False with apart 1.15: which one is faster is not known

A profile of `minidist calibrate` has its own (of its runs, each left out in turn); the default
constants have those of published steps.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

OF_TEN = 0.9  # of the errors lie inside


class Sureness(NamedTuple):
    """Factors; 1: exact. memory: of the bytes of the fullest device, as `spread` of seconds."""

    spread: float
    apart: float
    memory: float

    def interval(self, value: float) -> tuple[float, float]:
        """Return the least and the most of seconds, or of what grows or falls with them."""
        return value / self.spread, value * self.spread

    def memory_interval(self, nbytes: float) -> tuple[float, float]:
        """Return the least and the most of a device's bytes."""
        return nbytes / self.memory, nbytes * self.memory

    def tells(self, one: float, other: float) -> bool:
        """Return True if it is known which of two plans of a job is faster."""
        return max(one, other) > self.apart * min(one, other)


PUBLISHED = Sureness(spread=1.6, apart=1.12, memory=1.2)
"""Of the default constants, on published steps: at most 24 of each source and kind of device, up to
64 devices (tests/simulate/test_published.py -k sure, under soak). The constants were set by hand
with some of these steps in sight. memory: of one step, torchtitan's of 8 H100s, which holds its
logits in float32."""


def sureness(errors: Sequence[float], jobs: Sequence[Hashable] = ()) -> dict[str, float]:
    """Return `spread` and `apart` of runs that were left out of a fit.

    Args:    errors: log(predicted) - log(measured) of each. jobs: what each ran; pairs of one job
             count, or all pairs if no job has two.
    """
    of_job: dict[Hashable, list[float]] = defaultdict(list)
    for job, error in zip(jobs or [None] * len(errors), errors, strict=True):
        of_job[job].append(error)
    pairs = [one - other for mine in of_job.values() for one, other in combinations(mine, 2)]
    if not pairs:
        pairs = [one - other for one, other in combinations(errors, 2)]
    return {
        "spread": float(np.exp(np.quantile(np.abs(errors), OF_TEN))),
        "apart": float(np.exp(np.quantile(np.abs(pairs), OF_TEN))),
    }


def of_fit(fit: Mapping[str, Any]) -> Sureness:
    """Return the sureness of a profile's fit; what it does not say is that of the defaults."""
    known = {name: float(fit[name]) for name in ("spread", "apart") if name in fit}
    return PUBLISHED._replace(**known)
