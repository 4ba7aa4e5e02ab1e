"""A step's loss that arrives later from the device: its reader waits for it, and the step does not.

On a GPU the host runs ahead: it launches the kernels of a step long before they run. If it read a
number in between, it would wait for the GPU to finish all earlier kernels, and then the GPU would
wait for the next launch. So a pass's loss is copied to pinned memory after the pass, and read when
the program asks for it. On a CPU it is there at once.
"""

from typing import Any

from minidist.autograd.tensor import Tensor
from minidist.device.backend import Array, array_module, device_of, pinned


class LateLoss:
    """The sum of the losses of a step's passes. Its maker keeps it until it is done, because a copy
    to it is in progress.

    Args:    known: losses that have arrived already.
    """

    def __init__(self, *known: float) -> None:
        # on the host; the event behind its copy
        self._shares: list[tuple[Any, Any]] = [(loss, None) for loss in known]

    def add(self, loss: Tensor | float | None) -> None:
        """Add another pass's loss, one number; None: a pass without a row."""
        if not isinstance(loss, Tensor):
            self._shares.append((loss or 0.0, None))
        elif device_of(loss.data) == "cpu":
            self._shares.append((loss.item(), None))
        else:
            self._shares.append(_copied(loss.data))

    def done(self) -> bool:
        """Return whether wait() would return at once."""
        return all(event is None or event.done for _, event in self._shares)

    def wait(self) -> float:
        """Return the loss, passes added in their order."""
        total = 0.0
        for share, event in self._shares:
            if event is not None:
                event.synchronize()
            total += float(share)
        return total


def _copied(number: Array) -> tuple[Any, Any]:
    """Return the host array that will hold the number, and the event after its copy."""
    host = pinned(number.shape, number.dtype)
    number.get(out=host, blocking=False)
    event = array_module(number).cuda.Event(disable_timing=True)
    event.record()
    return host, event
