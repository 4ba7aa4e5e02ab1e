"""Chapter 24: the same modules on a thousand virtual ranks, one clock for all of them.

`minidist.simulate` is this package. Called, it is its function:

    found = minidist.simulate(plan, config, cluster, batch=1024)

    plan        as minidist.Plan, or as its text, "dp=16,tp=8"
    config      the model, a minidist.nn.GPTConfig
    cluster     as its text, "h100:128x8", or a minidist.simulate.cluster.Cluster
    batch       sequences per step of the whole job
    found       a minidist.simulate.results.Simulation: seconds, memory, bytes, events of ranks

`help(minidist.simulate.simulate.simulate)` has the other options, and what it raises.
"""

import sys
from types import ModuleType
from typing import Any


class SimulatePackage(ModuleType):
    """A package that can be called as minidist.simulate.simulate.simulate."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Run `simulate` of simulate.py, whose docstring has the arguments."""
        from minidist.simulate.simulate import simulate

        return simulate(*args, **options)


sys.modules[__name__].__class__ = SimulatePackage
