"""Every error minidist raises, as one tree.

    MinidistError
    ├── ConfigError (ValueError)      a chosen value does not work; the command line prints one line
    │   │                             and exits with 2
    │   ├── DataError                 a text or file is missing, too short or malformed
    │   ├── DeviceError               the requested device is not on this machine
    │   ├── DiskError                 a folder for offloading is missing, cannot be written or is
    │   │                             full
    │   ├── LaunchError               the launcher's variables are absent, foreign or contradict
    │   │                             each other
    │   ├── MemoryLimitError (MemoryError)   arrays do not fit under the limit of a memory account,
    │   │                                    or into this machine
    │   ├── PlanError                 a parallel plan that cannot work
    │   ├── ScheduleError             a pipeline schedule that cannot run, or would compute
    │   │                             something else
    │   └── ShardError                a size that does not divide as the strategy needs
    ├── ShapeError (ValueError)       arrays whose shapes do not fit an operation
    ├── DtypeError (TypeError)        arrays whose dtypes do not fit an operation
    ├── GradientError (RuntimeError)  a backward that the tape cannot run: a second one, or of a
    │                                 loss that is no scalar
    ├── CheckpointError (RuntimeError)  a checkpoint that cannot be written, is damaged, incomplete
    │                                   or of another model
    ├── KernelError (RuntimeError)    a CUDA kernel that does not compile, or breaks a rule or limit
    │                                 of CUDA
    └── CommError (RuntimeError)      something between ranks
        ├── PeerLostError             a rank died
        │   └── LinkLostError         the connection between two ranks broke, or its data cannot be
        │                             used; both may live
        ├── MismatchError             calls that do not fit together: verb, shape, dtype, op, root,
        │                             algorithm or order; or arguments that must be equal on all
        │                             ranks, and are not
        ├── DeadlockError             ranks wait for each other in a circle, so that no wait can end
        ├── HandshakeError            a connection that does not prove it belongs to this job
        └── TimeoutError (TimeoutError)   a wait reached its limit

Every message names the rank and the call, the expected and the actual value, and a remedy.

MismatchError cannot detect two calls of one verb, op, root, dtype, shape and algorithm that some
rank makes in the other order. Their messages look the same, so the values of one go to the other.
If the calls are at two places of the program, a RuntimeWarning names both places. It is no error,
because ranks may take turns at two places on purpose.
"""

import builtins


class MinidistError(Exception): ...


class ConfigError(MinidistError, ValueError): ...


class DataError(ConfigError): ...


class DeviceError(ConfigError): ...


class DiskError(ConfigError): ...


class LaunchError(ConfigError): ...


class MemoryLimitError(ConfigError, MemoryError): ...


class PlanError(ConfigError): ...


class ScheduleError(ConfigError): ...


class ShardError(ConfigError): ...


class ShapeError(MinidistError, ValueError): ...


class DtypeError(MinidistError, TypeError): ...


class GradientError(MinidistError, RuntimeError): ...


class CheckpointError(MinidistError, RuntimeError): ...


class KernelError(MinidistError, RuntimeError): ...


class CommError(MinidistError, RuntimeError): ...


class MismatchError(CommError): ...


class DeadlockError(CommError): ...


class HandshakeError(CommError): ...


class TimeoutError(CommError, builtins.TimeoutError): ...  # noqa: A001 - DESIGN.md names it so


class PeerLostError(CommError):
    """A rank is lost, or the link to it. Args: world_rank: that rank, or None if it is not
    known."""

    def __init__(self, message: str, world_rank: int | None = None) -> None:
        super().__init__(message)
        self.world_rank = world_rank


class LinkLostError(PeerLostError): ...
