"""docs/reference/api.md: signatures and docstrings of the public names."""

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import minidist
from minidist.comm.group import Group, Pending
from minidist.nn import GPTConfig
from minidist.reference.markdown import block, head, page

FUNCTIONS = ("init", "run", "simulate", "plan_for")
CLASSES: tuple[type, ...] = (Group, Pending, minidist.Mesh, minidist.Plan, minidist.Trainer)


def api_page() -> str:
    """Return the page."""
    lines = head(
        "API",
        "After this page you know what you can call from a program of your own: `import minidist "
        "as md`. `dir(md)` lists the names, and `help(md.run)` prints the same texts.",
        "A docstring names the arguments with their shapes and units, the result, the errors, and "
        "of a collective its exact cost. A test asserts each cost.",
    )
    for name in FUNCTIONS:
        lines += _part("##", f"md.{name}", _function(name))
    for cls in CLASSES:
        lines += _class(cls)
    lines += ["", "## minidist.nn.GPTConfig", *block(_doc(GPTConfig))]
    lines += ["", "## md.errors", "", "Every exception, as one tree: [errors](errors.md)."]
    return page(lines)


def _function(name: str) -> Callable[..., Any]:
    """Return a public function from its home: md.simulate may also be the package of its name,
    depending on what was imported before."""
    home = importlib.import_module(minidist._HOMES[name])
    found: Callable[..., Any] = getattr(home, name)
    return found


def _class(cls: type) -> Iterator[str]:
    """Yield the part of a class: its docstring, its methods and properties."""
    public = "md." if cls.__name__ in minidist.__all__ else ""
    yield from ("", f"## {public}{cls.__name__}", *block(_doc(cls)))
    for name in sorted(name for name in dir(cls) if not name.startswith("_")):
        member = inspect.getattr_static(cls, name)
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if inspect.isfunction(function):
            yield from _part("###", f"{cls.__name__}.{name}", function)
        elif isinstance(member, property) and member.__doc__:
            yield from ("", f"### {cls.__name__}.{name}", *block(_doc(member)))


def _part(level: str, name: str, function: Callable[..., Any]) -> Iterator[str]:
    """Yield heading, call and docstring of a function."""
    yield from ("", f"{level} {name}")
    yield from block(f"{name}{_arguments(function)}\n\n{_doc(function)}")


def _arguments(function: Callable[..., Any]) -> str:
    """Return the parameters with their defaults; the docstring tells their types."""
    signature = inspect.signature(function)
    told = [
        each.replace(annotation=inspect.Parameter.empty, default=_shown(each.default))
        for each in signature.parameters.values()
        if each.name not in ("self", "cls")
    ]
    return str(inspect.Signature(told))


class ObjectDefault:
    """A default that is an object, by the name of its class: its address differs by run."""

    def __init__(self, default: Any) -> None:
        self.name = type(default).__name__

    def __repr__(self) -> str:
        return f"{self.name}()"


def _shown(default: Any) -> Any:
    """Return a default whose repr is the same in every run."""
    return ObjectDefault(default) if " at 0x" in repr(default) else default


def _doc(thing: object) -> str:
    return inspect.getdoc(thing) or ""
