"""How a process's end is heard before it is over: an uncaught exception, SystemExit, sys.exit."""

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
    """sys.exit: the interpreter does the same."""
    raise SystemExit(status)


def replace_exit() -> None:
    """Once in a process and in all that it forks: sys.exit is the one above, in every module that
    has taken its name.

    Takes 15 ms where minidist is loaded. Before Python 3.12, C_EXIT ends the process without a
    SystemExit.
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
    """Have uncaught exceptions, sys.exit(not 0) and the end of the process told to the job."""

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
        """SystemExit.code, for which Python itself, with no frame above, asks when it ends by that
        error."""
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
