"""What each module imports, read from the source: imports inside functions and for type checkers,
too."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
HOMES = {
    "minidist": ROOT / "minidist",
    "minidist.bench": ROOT / "benchmarks",
    "minidist.kernels": ROOT / "kernels",
    "minidist.lessons": ROOT / "lessons",
}


class Import(NamedTuple):
    """`importer` imports the module `imported` in line `line` of `path`."""

    importer: str
    imported: str
    path: Path
    line: int

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.importer} imports {self.imported}"


@cache
def modules() -> dict[str, Path]:
    """Every module of minidist by its dotted name. `minidist.lessons` has its package's own files
    and the assignments, no chapter's."""
    found = {}
    for package, folder in HOMES.items():
        for path in sorted(folder.rglob("*.py")):
            if package == "minidist.lessons" and path.parent.name[:2].isdigit():
                continue
            name = ".".join((package, *path.relative_to(folder).with_suffix("").parts))
            found[name.removesuffix(".__init__")] = path
    return found


def imports(module: str) -> tuple[Import, ...]:
    """The imports of a module that lead to modules of this project."""
    return _read(module)[0]


def classes(module: str) -> tuple[tuple[str, int], ...]:
    """(name, line) of each class at the top of a module."""
    return _read(module)[1]


@cache
def _read(module: str) -> tuple[tuple[Import, ...], tuple[tuple[str, int], ...]]:
    """Imports and classes of a module: its source is parsed once."""
    path = modules()[module]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = tuple(
        Import(module, name, path, node.lineno)
        for node in ast.walk(tree)
        for name in _imported(node)
    )
    return found, tuple(
        (node.name, node.lineno) for node in tree.body if isinstance(node, ast.ClassDef)
    )


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in modules())
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute in this project"
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            if (found := inner if inner in modules() else node.module) in modules():
                yield found


def reached(module: str, inside: str, without: str = "") -> list[str]:
    """`module`, and what it imports inside the package `inside`, and what those import there, and
    so on."""
    seen = {module}
    left = [module]
    while left:
        for found in imports(left.pop()):
            name = found.imported
            packages = modules()[name].name == "__init__.py"
            if (
                name.startswith(f"{inside}.")
                and not packages
                and not (without and name.startswith(f"{without}."))
            ):
                left += [name] if name not in seen else []
                seen.add(name)
    return sorted(seen)


def lines(module: str) -> int:
    """Return how many lines the file of a module has."""
    return len(modules()[module].read_text(encoding="utf-8").splitlines())
