"""What offloading costs (chapter 20): which home a plan asks for, what must be there before training, what will move.

The formulas stand in offload.py; here they are numbers, for a rank's own shards to the byte.
"""

from collections.abc import Sequence
from pathlib import Path

from minidist.errors import MemoryLimitError
from minidist.parallel.common.home import Home
from minidist.parallel.common.recorder import Recorder
from minidist.parallel.common.units import Unit
from minidist.parallel.offload import OnDisk, OnHost


def make_home(offload: str, folder: str | Path | None = None, *, device: str = "cpu",
              recorder: Recorder | None = None) -> Home:
    """The home that a plan's `offload` names: "none", "optimizer" or "all"; `folder` for the last.

    Raises:  DiskError, as OnDisk.
    """
    if offload == "all":
        return OnDisk(folder, device=device, recorder=recorder)
    return OnHost(recorder=recorder) if offload == "optimizer" else Home()


def require_memory(limit: int | None, units: Sequence[Unit], root: Unit) -> None:
    """Raise MemoryLimitError, before training, if units cannot fit: two whole ones, a unit's gradients, and the root.

    Activations, which nobody knows beforehand, come on top.
    """
    if limit is None or not units:
        return
    pairs = [(one, other) for one, other in zip(units, [*units[1:], units[-1]], strict=True)]
    one, other = max(pairs, key=lambda pair: pair[0].nbytes + pair[1].nbytes)
    weights = one.nbytes + other.nbytes * (one is not other)
    gradients = max(unit.nbytes for unit in units)
    need = weights + gradients + 2 * root.nbytes
    if need > limit:
        raise MemoryLimitError(f"device memory: two units at work ({one.name}, {other.name}: {weights:,} bytes), the "
                               f"gradients of one ({gradients:,}) and the root with its own ({2 * root.nbytes:,}) need "
                               f"{need:,} bytes and the limit is {limit:,}; raise it, or make the model narrower")
