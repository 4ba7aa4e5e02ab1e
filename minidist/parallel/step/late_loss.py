"""A step's loss, on its way from the device: its reader waits for it, and the step does not.

On a GPU the host runs ahead: it launches the kernels of a step long before they run. To read a number in between would
stop the host until the GPU has come so far, and then the GPU until the next launch. So a pass's loss is copied to
pinned memory behind the pass, and read when it is asked for. On a CPU it is there at once. Not yet measured on a GPU.
"""

from typing import Any

from minidist.autograd.tensor import Tensor
from minidist.device.backend import Array, array_module, device_of


class LateLoss:
    """The sum of the losses of a step's passes. Its maker keeps it until it is done, because a copy is on its way."""

    def __init__(self) -> None:
        self._shares: list[tuple[Any, Any]] = []        # a pass's loss on the host, and the event behind its copy

    @classmethod
    def known(cls, loss: float) -> "LateLoss":
        """A loss that is there."""
        late = cls()
        late._shares.append((loss, None))
        return late

    def add(self, loss: Tensor) -> None:
        """Another pass's loss, one number."""
        if device_of(loss.data) == "cpu":
            self._shares.append((float(loss.item()), None))
        else:
            self._shares.append(_copied(loss.data))

    def done(self) -> bool:
        """Whether wait() would return at once."""
        return all(event is None or event.done for _, event in self._shares)

    def wait(self) -> float:
        """The loss, passes added in their order."""
        total = 0.0
        for share, event in self._shares:
            if event is not None:
                event.synchronize()
            total += float(share)
        return total


def _copied(number: Array) -> tuple[Any, Any]:
    """Where it will be on the host, and the event that says when."""
    import cupyx  # noqa: PLC0415 - a CuPy array came in, so CuPy is here

    host = cupyx.empty_pinned(number.shape, number.dtype)
    number.get(out=host, blocking=False)
    event = array_module(number).cuda.Event(disable_timing=True)
    event.record()
    return host, event
