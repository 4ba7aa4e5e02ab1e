"""Find code in a student's answer that is not the student's work: imports of the library's own
answer, and ways around the grader.

    borrowed(student, template)     (4, "import of minidist.parallel.data.ddp") or None

An answer may use the names that its exercise imports, all verbs of the objects that it gets, NumPy
and most of Python's library. It may not import other parts of minidist, look inside objects
(`group._transport`), change what it imports (`np.allclose = …`), or run and change other programs'
code (`exec`, `sys.modules`). Python cannot be closed by reading alone, so the grade is also made by
a process that never runs the answer (graded_apart.py).
"""

import ast
from collections.abc import Iterator

REACHING = {
    *("builtins", "code", "codeop", "ctypes", "faulthandler", "gc", "imp", "importlib", "inspect"),
    *("marshal", "multiprocessing", "os", "pickle", "pkgutil", "pydoc", "runpy", "signal", "site"),
    *("socket", "subprocess", "sys", "threading", "traceback", "types", "unittest", "atexit"),
}
"""Modules of Python's library that reach other code or the process."""

CALLS = {
    *("__import__", "breakpoint", "compile", "delattr", "eval", "exec", "getattr", "globals"),
    *("locals", "open", "setattr", "vars"),
}
"""Functions of Python that do so."""

SPECIAL = {
    f"__{name}__"
    for name in (
        *("add", "call", "contains", "eq", "getitem", "init", "iter", "len", "lt", "mul", "next"),
        *("post_init", "repr", "setitem", "sub"),
    )
}
"""Names of methods that stand for a sign of the language, such as []."""

OURS = "minidist"
"""How the names of our modules begin, also of a check's, which is minidist_lesson_03_check."""


def borrowed(student: ast.Module, template: ast.Module) -> tuple[int, str] | None:
    """Return the line and the name of the first thing that an answer may not use; None if there is
    nothing.

    Args:    template: the exercise, whose own imports, names and attributes are allowed.
    """
    allowed = {name for _, name in _uses(template)}
    found = sorted((use for use in _uses(student) if use[1] not in allowed), key=lambda use: use[0])
    return found[0] if found else None


def _uses(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of each import, call and attribute that only an exercise itself may have."""
    imported = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(module)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_closed(alias.name):
                    yield node.lineno, f"import of {alias.name}"
        elif isinstance(node, ast.ImportFrom):
            home = "." * node.level + (node.module or "")
            if node.level or _is_closed(home):
                for alias in node.names:
                    yield node.lineno, f"import of {home}.{alias.name}"
        elif isinstance(node, ast.Name) and node.id in CALLS:
            yield node.lineno, f"call of {node.id}"
        elif isinstance(node, ast.Name) and node.id[:2] == "__" and node.id != "__name__":
            yield node.lineno, f"name {node.id}"
        elif isinstance(node, ast.Attribute) and node.attr[:1] == "_" and node.attr not in SPECIAL:
            yield node.lineno, f"private name .{node.attr}"
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            changed = ast.unparse(node)
            if changed.partition(".")[0] in imported:
                yield node.lineno, f"change of {changed}"


def _is_closed(module: str) -> bool:
    return module.startswith(OURS) or module.partition(".")[0] in REACHING
