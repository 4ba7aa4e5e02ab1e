"""minidist: distributed training from scratch, one readable module a chapter.

    import minidist as md

    world = md.init()                                  # a Group; size 1 when alone
    results = md.run(fn, size=4, transport="threads")  # fn(world) on every rank

Names are loaded when first used, so that `import minidist` stays under 0.3 s and pulls in neither MPI nor CuPy.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minidist import errors
    from minidist.launch import init, run
    from minidist.parallel.hybrid.hybrid import Mesh, Plan, Trainer

__version__ = "0.1.0"
__all__ = ["Mesh", "Plan", "Trainer", "errors", "init", "run"]

_HOMES = {
    "init": "minidist.launch",
    "run": "minidist.launch",
    "Mesh": "minidist.parallel.hybrid.hybrid",
    "Plan": "minidist.parallel.hybrid.hybrid",
    "Trainer": "minidist.parallel.hybrid.hybrid",
}


def __getattr__(name: str) -> Any:
    """Load a public name from its home on first use (PEP 562)."""
    if name == "errors":
        return importlib.import_module("minidist.errors")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'minidist' has no attribute {name!r}; it offers {', '.join(__all__)}")
