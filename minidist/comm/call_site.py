"""The line of the program that made a call: error messages show it, so that the reader finds the
place.

A program enters this package through an entry: a public method of Group, or of the handle of a
started call. Entries register their code objects here (`@entries`), so nothing depends on the names
of files. A place is "file:line" of the frame that called the outermost entry. Cost: about 1 µs. If
a thread has called no entry, the modules of its frames decide (`in_program`).
"""

import gc
import inspect
import sys
import threading
from types import CodeType, FrameType
from typing import TypeVar

_LONGEST = 200
_ENTRIES: dict[int, CodeType] = {}  # by id: the hash of a code object is computed at every use
# by id and instruction; the code is kept, so its id is, too
_PLACES: dict[tuple[int, int], tuple[str, CodeType]] = {}
_MOST_PLACES = 1000
_one_at_a_time = threading.Lock()

C = TypeVar("C", bound=type)


def entries(cls: C) -> C:
    """Register the public methods of a class as entries (class decorator)."""
    for name, method in vars(cls).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            _ENTRIES[id(method.__code__)] = method.__code__
    return cls


def place(filename: str, line: int) -> str:
    """Return "file:line"; for a very long path only its end; for a notebook's cell its name, as
    "Cell In[3]:2"."""
    if "ipykernel" in filename and (cell := _cell(filename)):
        return f"{cell}:{line}"
    return f"{filename[-_LONGEST:]}:{line}"


def _cell(filename: str) -> str:
    """Return the name of the notebook's cell whose code IPython keeps under this file name; "" if it
    keeps none."""
    notebook = sys.modules.get("IPython")
    shell = notebook and notebook.get_ipython()
    told = shell and shell.compile.format_code_name(filename)
    return " ".join(told) if told else ""


def caller(frame: FrameType | None = None) -> str:
    """Return the place that entered this package, as seen from `frame` (default: the caller's);
    without an entry, the place of `frame`."""
    frame = frame or sys._getframe(1)
    return _place_of(_entered_from(frame)[0] or frame)


def caller_at(depth: int) -> str:
    """Return caller() for a function whose entry is usually `depth` frames further out. Faster:
    Python makes an object for each inspected frame, and the frames between are skipped."""
    try:
        entry = sys._getframe(depth + 1)
    except ValueError:  # fewer frames
        return caller(sys._getframe(1))
    program = entry.f_back
    if program is not None and id(entry.f_code) in _ENTRIES and id(program.f_code) not in _ENTRIES:
        known = _PLACES.get((id(program.f_code), program.f_lasti))
        return _place_of(program) if known is None else known[0]
    return caller(sys._getframe(1))


def raised_at(error: BaseException) -> str:
    """Return the place that entered this package, in the traceback of `error`; without an entry,
    the line that raised it."""
    found = "an unknown place"
    trace = error.__traceback__
    while trace is not None and id(trace.tb_frame.f_code) not in _ENTRIES:
        found = place(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return found


def in_program(frame: FrameType) -> bool:
    """Return whether the frame's module belongs to the program: not to Python, and not to this
    package except its lessons."""
    # __spec__ has the module's name where `python -m` calls it __main__
    spec = frame.f_globals.get("__spec__")
    name = str(getattr(spec, "name", None) or frame.f_globals.get("__name__"))
    top = name.partition(".")[0]
    own = top == "minidist" and not name.startswith("minidist.lessons.")
    return not own and top not in sys.stdlib_module_names


def frames() -> dict[int, FrameType]:
    """Return the innermost frame of every thread.

    The garbage collector is off meanwhile: inside sys._current_frames() it can need a lock that
    Python holds there, and then every thread stops for good (CPython's issue 106883; seen on
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
    """Return the current call and line of a rank's thread: "all_reduce at train.py:40", or
    "train.py:40" outside an entry."""
    # no name for a frame that may belong to this package
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
    """Return the program's frame that called the outermost entry, and that entry's name; "" without
    an entry."""
    while frame is not None and id(frame.f_code) not in _ENTRIES:
        frame = frame.f_back
    verb = ""
    while frame is not None and id(frame.f_code) in _ENTRIES:
        verb = frame.f_code.co_name
        frame = frame.f_back
    return frame, verb


def _place_of(frame: FrameType) -> str:
    """Return the place of a frame; cached, because Python searches a table for the line of an
    instruction."""
    code = frame.f_code
    found = _PLACES.get((id(code), frame.f_lasti))
    if found is None:
        if len(_PLACES) >= _MOST_PLACES:  # a program that creates code objects all the time
            _PLACES.clear()
        found = _PLACES[id(code), frame.f_lasti] = place(code.co_filename, frame.f_lineno), code
    return found[0]
