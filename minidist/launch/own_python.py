"""Commands of our own processes: Python with the current folder removed from its import path.

`python -m MODULE` and `python -c CODE` put the current folder first on that path, so a user's
random.py or copy.py there would run in place of Python's own. `-P` prevents this from Python 3.11
on; the first words of the code do so in every Python, including an older one on another host. A
user's script is started as Python itself starts it.
"""

import sys

_WITHOUT_FOLDER = "import sys; sys.path[0] or sys.path.pop(0); "  # "" is the current folder
_SAFE_PATH = ("-P",) if sys.version_info >= (3, 13) else ()
"""From Python 3.13 on, `python -c` imports linecache before the code runs."""

_MODULE = (
    'from runpy import run_module; __name__ = "minidist"; run_module("{}", '
    'run_name="__main__", alter_sys=True)'
)
"""The name tells call_site.in_program that this frame is no user's, and `import minidist` that the
process is ours."""


def code_command(code: str, *words: str, options: tuple[str, ...] = ()) -> list[str]:
    """Return the command that runs code of ours with these words, as `python -c code words` would.

    Args: options: of Python, such as "-W", "ignore".
    """
    return [sys.executable, *_SAFE_PATH, *options, "-c", _WITHOUT_FOLDER + code, *words]


def module_command(module: str, *words: str) -> list[str]:
    """Return the command that runs a module of minidist with these words, as `python -m module
    words` would."""
    return code_command(_MODULE.format(module), *words)


def is_own(module: str) -> bool:
    """Return whether a module is minidist's, so that it needs nothing of the current folder."""
    return module.partition(".")[0] == "minidist"
