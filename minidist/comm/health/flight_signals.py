"""SIGUSR2 writes the flight recorders of this process as JSON, and prints their paths.

If a ring is in a file (00003.ring), its dump is next to it (00003.json); else the dump is a new
file in the temporary folder. A program that handles SIGUSR2 itself keeps its handler.
"""

import os
import signal
import tempfile
import threading
from types import FrameType

from minidist.comm.flight.recorder import FlightRecorder, recorders
from minidist.comm.health.failure import say_line


def hear_dump_signal() -> None:
    """Install the handler by which SIGUSR2 dumps. Only the main thread can; elsewhere nothing
    changes."""
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
    ):
        signal.signal(signal.SIGUSR2, _dump_all)


def _dump_all(number: int, frame: FrameType | None) -> None:
    for recorder in sorted(recorders, key=lambda recorder: recorder.world_rank):
        if recorder.pid == os.getpid():  # not the parent's, if this process was forked
            try:
                say_line(
                    f"minidist: rank {recorder.world_rank} wrote its flight recorder to "
                    f"{_dump(recorder)}"
                )
            except OSError as error:
                say_line(
                    f"minidist: rank {recorder.world_rank} cannot write its flight recorder: "
                    f"{error}"
                )


def _dump(recorder: FlightRecorder) -> str:
    if recorder.path is not None:
        target = str(recorder.path.with_suffix(".json"))
    else:
        file, target = tempfile.mkstemp(
            prefix=f"minidist-flight-{recorder.world_rank:05d}-", suffix=".json"
        )
        os.close(file)
    recorder.dump(target, member=True)
    return target
