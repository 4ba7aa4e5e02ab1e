"""Every error minidist raises, as one tree.

    MinidistError
    ├── ConfigError (ValueError)      a chosen value does not work; the command line exits with status 2
    │   ├── DataError                 a text or file is missing, too short or malformed
    │   ├── DeviceError               the device asked for is not on this machine
    │   ├── DiskError                 a folder for offloading is missing, cannot be written or is full
    │   ├── LaunchError               the launcher's variables are absent, foreign or contradict each other
    │   ├── MemoryLimitError (MemoryError)   an array that does not fit under the limit of a memory account
    │   ├── PlanError                 a parallel plan that cannot work
    │   ├── ScheduleError             a pipeline schedule that cannot run, or would compute something else
    │   └── ShardError                a size that does not divide as the strategy needs
    ├── ShapeError (ValueError)       arrays whose shapes do not fit an operation
    ├── DtypeError (TypeError)        arrays whose dtypes do not fit an operation
    ├── GradientError (RuntimeError)  a backward that the tape cannot run
    ├── KernelError (RuntimeError)    a CUDA kernel that does not compile, or breaks a rule of CUDA
    └── CommError (RuntimeError)      something between ranks
        ├── PeerLostError             a rank died, or its connection did
        ├── MismatchError             ranks made calls that do not fit together
        ├── DeadlockError             ranks wait for each other in a circle
        ├── HandshakeError            a connection that does not prove it belongs to this job
        └── TimeoutError (TimeoutError)   a wait reached its limit

Every message names the rank and the call, the expected and the actual value, and a remedy.
"""

import builtins


class MinidistError(Exception):
    """Base of every error below."""


class ConfigError(MinidistError, ValueError):
    """A chosen value does not work; the command line prints the message as one line and exits with status 2."""


class DataError(ConfigError):
    """A text or file is missing, too short or malformed."""


class DeviceError(ConfigError):
    """The device asked for is not on this machine."""


class DiskError(ConfigError):
    """A folder for offloading is missing, cannot be written or is full."""


class LaunchError(ConfigError):
    """The launcher's variables are absent, foreign or contradict each other."""


class MemoryLimitError(ConfigError, MemoryError):
    """An array that does not fit under the limit of a memory account."""


class PlanError(ConfigError):
    """A parallel plan that cannot work."""


class ScheduleError(ConfigError):
    """A pipeline schedule that cannot run, or would compute something else."""


class ShardError(ConfigError):
    """A size that does not divide as the strategy needs."""


class ShapeError(MinidistError, ValueError):
    """Arrays whose shapes do not fit an operation."""


class DtypeError(MinidistError, TypeError):
    """Arrays whose dtypes do not fit an operation."""


class GradientError(MinidistError, RuntimeError):
    """A backward that the tape cannot run: a second one, or one of a loss that is not a scalar."""


class KernelError(MinidistError, RuntimeError):
    """A CUDA kernel that does not compile, a launch beyond CUDA's limits, or a rule of CUDA that a kernel breaks."""


class CommError(MinidistError, RuntimeError):
    """Something went wrong between ranks."""


class PeerLostError(CommError):
    """A rank died, or its connection did. Args: world_rank: that rank, or None if it is not known."""

    def __init__(self, message: str, world_rank: int | None = None) -> None:
        super().__init__(message)
        self.world_rank = world_rank


class MismatchError(CommError):
    """Ranks made calls that do not fit together: verb, shape, dtype, op, root, algorithm or order."""


class DeadlockError(CommError):
    """Ranks wait for each other in a circle, so that no wait can end."""


class HandshakeError(CommError):
    """A connection that does not prove it belongs to this job."""


class TimeoutError(CommError, builtins.TimeoutError):  # noqa: A001 - DESIGN.md names it so
    """A wait reached its limit."""
