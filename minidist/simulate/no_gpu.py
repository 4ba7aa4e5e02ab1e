"""What modules ask of a GPU beside arithmetic, as CuPy has it: events and streams that are always
ready."""

from typing import Any


class NoGpu:
    """`xp.cuda`, an event, a stream and a device in one. attributes: of a device, as CuPy's, for
    kernels to choose."""

    id = 0
    done = True
    # bytes; sm_90 and sm_100: CUDA C++ guide, table 27
    attributes = {"MaxSharedMemoryPerBlockOptin": 227 << 10}

    def Event(self, **_: Any) -> "NoGpu":  # noqa: N802 - as CuPy's
        """An event that has happened."""
        return self

    Stream = Event

    def record(self) -> None:
        """Nothing is on its way."""

    def synchronize(self) -> None:
        """Nothing is waited for."""

    def wait_event(self, event: Any) -> None:
        """Nothing is waited for."""

    def __enter__(self) -> "NoGpu":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to end."""


NO_GPU = NoGpu()
