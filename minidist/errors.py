"""Every error minidist raises, as one tree.

    MinidistError
    ├── ConfigError (ValueError)      a value somebody chose does not work; the command line exits with status 2
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
    ├── GradientError (RuntimeError)  the tape cannot do what backward asks
    ├── KernelError (RuntimeError)    a CUDA kernel that does not compile, or breaks a rule of CUDA
    └── CommError (RuntimeError)      something between ranks
        ├── PeerLostError             a rank died, or its connection did
        ├── MismatchError             ranks called different things
        ├── DeadlockError             everybody waits for somebody
        ├── HandshakeError            a connection that does not prove it belongs to this job
        └── TimeoutError (TimeoutError)   a wait reached its limit

Every message says who (rank and call), what was expected, what came, and what to do.
"""

import builtins


class MinidistError(Exception):
    """Base of every error below."""


class ConfigError(MinidistError, ValueError):
    """A value somebody chose does not work; the command line prints it as one line and exits with status 2."""


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
    """The tape cannot do what backward asks: a second backward, a loss that is not a scalar."""


class KernelError(MinidistError, RuntimeError):
    """A CUDA kernel that does not compile, a launch beyond CUDA's limits, or a rule of CUDA that a kernel breaks."""


class CommError(MinidistError, RuntimeError):
    """Something went wrong between ranks."""


class PeerLostError(CommError):
    """A rank died, or its connection did; `world_rank` is that rank, or None where it is not known."""

    def __init__(self, message: str, world_rank: int | None = None) -> None:
        super().__init__(message)
        self.world_rank = world_rank


class MismatchError(CommError):
    """Ranks called different things: verb, shape, dtype, op, root, algorithm or order."""


class DeadlockError(CommError):
    """Everybody waits for somebody."""


class HandshakeError(CommError):
    """A connection that does not prove it belongs to this job."""


class TimeoutError(CommError, builtins.TimeoutError):  # noqa: A001 - DESIGN.md names it so
    """A wait reached its limit."""
