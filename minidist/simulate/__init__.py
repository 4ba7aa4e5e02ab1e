"""Chapter 24: the same modules on a thousand virtual ranks, one clock for all of them.

`minidist.simulate` is this package and, called, its function: `md.simulate(plan, config, "h100:128x8", batch=1024)`.
"""

import sys
from types import ModuleType
from typing import Any


class SimulatePackage(ModuleType):
    """A package that can be called as minidist.simulate.simulate.simulate."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """As `simulate` of simulate.py, whose docstring has the arguments."""
        from minidist.simulate.simulate import simulate

        return simulate(*args, **options)


sys.modules[__name__].__class__ = SimulatePackage
