"""Which line of whose program called: the part of an error message that sends the reader to the right place.

A place is "file:line" of the first frame outside minidist/comm, walking outwards. Cost: about 1 µs.
"""

import gc
import sys
import threading
from pathlib import Path
from types import FrameType, TracebackType

_HERE = str(Path(__file__).parent)
_LONGEST = 200
_one_at_a_time = threading.Lock()


def place(filename: str, line: int) -> str:
    """ "file:line"; of a very long path the end."""
    return f"{filename[-_LONGEST:]}:{line}"


def caller(frame: FrameType | None = None) -> str:
    """The place outside minidist/comm that led to this call (or to `frame`)."""
    if frame is None:
        frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_HERE) and frame.f_back is not None:
        frame = frame.f_back
    return place(frame.f_code.co_filename, frame.f_lineno)


def raised_at(error: BaseException) -> str:
    """The innermost place outside minidist/comm that `error` passed through, else where it was raised."""
    found, trace = "an unknown place", error.__traceback__
    outside = False
    while trace is not None:
        here = _is_ours(trace)
        if not here or not outside:
            found = place(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        outside = outside or not here
        trace = trace.tb_next
    return found


def _is_ours(trace: TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename.startswith(_HERE)


def frames() -> dict[int, FrameType]:
    """The innermost frame of every thread.

    The garbage collector rests meanwhile: what it does inside sys._current_frames() can need a lock that Python holds
    there, and then every thread stops for good (CPython's issue 106883; seen on 3.11.7).
    """
    with _one_at_a_time:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


def doing(thread: int | None) -> str:
    """What a rank's thread is in the middle of: "all_reduce at train.py:40", or "train.py:40" outside minidist/comm."""
    return "its last line" if thread is None else _told(frames().get(thread))   # no name for a frame that may be ours


def _told(innermost: FrameType | None) -> str:
    if innermost is None:
        return "its last line"
    frame, verb = _within(innermost), ""
    if frame is None:
        return place(innermost.f_code.co_filename, innermost.f_lineno)
    inside: FrameType | None = frame
    while inside is not None and inside.f_code.co_filename.startswith(_HERE):
        if Path(inside.f_code.co_filename).name in ("group.py", "async_call.py") and inside.f_code.co_name[0] != "_":
            verb = f"{inside.f_code.co_name} at "
        inside = inside.f_back
    return verb + caller(frame)


def _within(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of minidist/comm, the one that runs the rank aside."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_HERE) and not name.endswith("threads.py"):
            return frame
        frame = frame.f_back
    return None
