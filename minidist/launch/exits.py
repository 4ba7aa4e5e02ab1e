"""Report the end of a rank's process before it is over: an uncaught exception, SystemExit or
sys.exit."""

import atexit
import ctypes
import gc
import os
import sys
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from minidist.comm.health.failure import exit_status
from minidist.launch.children import flush_output

if TYPE_CHECKING:
    from minidist.launch.membership import Membership

C_EXIT = sys.exit


def exit_in_python(status: Any = None, /) -> NoReturn:
    """Raise SystemExit, as sys.exit does."""
    raise SystemExit(status)


def replace_exit() -> None:
    """Replace sys.exit by exit_in_python in every module that imported it.

    It is done once per process; forks inherit it. It takes 15 ms when minidist is loaded. Before
    Python 3.12, the built-in sys.exit ends the process without a SystemExit.
    """
    if sys.exit is not C_EXIT:
        return
    for module in list(sys.modules.values()):
        names = (
            ModuleType.__getattribute__(module, "__dict__")
            if isinstance(module, ModuleType)
            else {}
        )
        if names is not globals():  # read as it is: a lazy module stays unloaded
            names.update({name: exit_in_python for name, value in names.items() if value is C_EXIT})


def watch_exits(membership: "Membership") -> None:
    """Report uncaught exceptions, sys.exit with a status other than 0, and the end of the process
    to the job."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not membership.is_this_process():
            sys.__excepthook__(kind, error, trace)
            membership.status = 1
            return
        membership.say(error, membership.fail(error))
        membership.leave()
        if membership.status != 1:  # with which Python itself would end
            flush_output()
            os._exit(membership.status)

    def code(error: SystemExit) -> Any:
        """Return SystemExit.code.

        If the interpreter itself reads it (no frame above), the process is exiting: note the
        status.
        """
        code = slot.__get__(error)
        if sys._getframe().f_back is None and membership.is_this_process():
            membership.exit = error
            membership.status = exit_status(code)
            return membership.status if isinstance(code, int) else code
        return code

    atexit.register(membership.leave)
    sys.excepthook = hook
    # SystemExit reaches no hook, and a built-in class takes no assignment
    slot = vars(SystemExit)["code"]
    gc.get_referents(vars(SystemExit))[0]["code"] = property(code, slot.__set__)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))
    replace_exit()
