"""The line of the program that made a call: the part of an error message that sends the reader to
the right place.

A program enters this package by an entry: a public method of Group, or of the handle of a call
under way. Entries register their code objects here (`@entries`), so nothing depends on the names of
files. A place is "file:line" of the frame that called the outermost entry. Cost: about 1 µs. A
thread that has called no entry is told by its frames' modules (`in_program`).
"""

import gc
import inspect
import sys
import threading
from types import CodeType, FrameType
from typing import TypeVar

_LONGEST = 200
_ENTRIES: dict[int, CodeType] = {}  # by id: the hash of a code object is computed anew each time
# by id and instruction; the code is kept, so its id is, too
_PLACES: dict[tuple[int, int], tuple[str, CodeType]] = {}
_MOST_PLACES = 1000
_one_at_a_time = threading.Lock()

C = TypeVar("C", bound=type)


def entries(cls: C) -> C:
    """Class decorator: the public methods are entries."""
    for name, method in vars(cls).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            _ENTRIES[id(method.__code__)] = method.__code__
    return cls


def place(filename: str, line: int) -> str:
    """ "file:line"; of a very long path the end."""
    return f"{filename[-_LONGEST:]}:{line}"


def caller(frame: FrameType | None = None) -> str:
    """The place that entered this package, as seen from `frame` (default: the caller's); without an
    entry, `frame`."""
    frame = frame or sys._getframe(1)
    return _place_of(_entered_from(frame)[0] or frame)


def caller_at(depth: int) -> str:
    """caller(), of a function whose entry is mostly `depth` frames further out: Python makes an
    object of each frame that is looked at, and of those between none."""
    try:
        entry = sys._getframe(depth + 1)
    except ValueError:  # fewer frames
        return caller(sys._getframe(1))
    program = entry.f_back
    if program is not None and id(entry.f_code) in _ENTRIES and id(program.f_code) not in _ENTRIES:
        return _place_of(program)
    return caller(sys._getframe(1))


def raised_at(error: BaseException) -> str:
    """The place that entered this package, in the traceback of `error`; without an entry, where it
    was raised."""
    found = "an unknown place"
    trace = error.__traceback__
    while trace is not None and id(trace.tb_frame.f_code) not in _ENTRIES:
        found = place(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return found


def in_program(frame: FrameType) -> bool:
    """Whether the frame's module is the program's own: neither of this package, but for its
    lessons, nor of Python."""
    # knows the module's name where `python -m` calls it __main__
    spec = frame.f_globals.get("__spec__")
    name = str(getattr(spec, "name", None) or frame.f_globals.get("__name__"))
    top = name.partition(".")[0]
    own = top == "minidist" and not name.startswith("minidist.lessons.")
    return not own and top not in sys.stdlib_module_names


def frames() -> dict[int, FrameType]:
    """The innermost frame of every thread.

    The garbage collector rests meanwhile: what it does inside sys._current_frames() can need a lock
    that Python holds there, and then every thread stops for good (CPython's issue 106883; seen on
    3.11.7).
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
    """What a rank's thread is in the middle of: "all_reduce at train.py:40", or "train.py:40"
    outside an entry."""
    # no name for a frame that may be ours
    return "its last line" if thread is None else _told(frames().get(thread))


def _told(innermost: FrameType | None) -> str:
    if innermost is None:
        return "its last line"
    try:
        frame, verb = _entered_from(innermost)
    # CPython 3.11.7 gives a cell as the next frame of a thread that is just returning
    except AttributeError:
        return "its last line"
    return _place_of(innermost) if frame is None else f"{verb} at {_place_of(frame)}"


def _entered_from(frame: FrameType | None) -> tuple[FrameType | None, str]:
    """The frame that called the nearest entry outwards, and that entry's name; one entry may call
    another."""
    while frame is not None and id(frame.f_code) not in _ENTRIES:
        frame = frame.f_back
    verb = ""
    while frame is not None and id(frame.f_code) in _ENTRIES:
        verb = frame.f_code.co_name
        frame = frame.f_back
    return frame, verb


def _place_of(frame: FrameType) -> str:
    """The place of a frame: remembered, because Python searches a table for the line of an
    instruction."""
    code = frame.f_code
    found = _PLACES.get((id(code), frame.f_lasti))
    if found is None:
        if len(_PLACES) >= _MOST_PLACES:  # a program that makes code all the time
            _PLACES.clear()
        found = _PLACES[id(code), frame.f_lasti] = place(code.co_filename, frame.f_lineno), code
    return found[0]
