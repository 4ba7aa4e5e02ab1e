"""The code in place of a hole: an exercise is compared with the code that it is cut from, or with a
student's copy.

    exercise.py                                     the plain version, or a student's copy

    incoming = hole(2, "which chunk arrives?")      incoming = (group.rank - step - 2) % group.size
    hole(3, "add what arrives", incoming)           arrived = group.exchange(…)
                                                    chunks[incoming] += arrived

A hole that is a statement stands for one statement or several, any other for an expression. All
other code must be equal, except docstrings, comments and annotations. So the right code of a hole
is read from the plain version, and a student's answers are taken out of a copy one by one.
"""

import ast
import copy
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Nodes = list[ast.AST]
"""The code of one hole: an expression, or statements."""

_UNSAID = {"annotation", "returns", "type_comment", "ctx", "kind"}
Definition = ast.FunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Answer:
    """A student's code of one hole; or of a whole function with `holes`, if the rest of it was
    changed too."""

    holes: tuple[int, ...]
    nodes: Nodes  # the student's
    right: Nodes

    @property
    def is_open(self) -> bool:
        """Return whether a hole is still in the code."""
        return any(number_of(node) for top in self.nodes for node in ast.walk(top))

    @property
    def is_right_code(self) -> bool:
        """Return whether the code is word for word the right code."""
        return _words(self.nodes) == _words(self.right)


def number_of(node: ast.AST) -> int:
    """Return the number of the hole that this expression or statement is; 0 if it is none."""
    call = node.value if isinstance(node, ast.Expr) else node
    if not (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "hole"
        and call.args
    ):
        return 0
    first = call.args[0]
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, int) else 0


def tasks(template: ast.AST) -> dict[int, str]:
    """Return the task of each hole, by number."""
    calls = [node for node in ast.walk(template) if isinstance(node, ast.Call) and number_of(node)]
    return {
        number_of(call): str(ast.literal_eval(call.args[1]))
        for call in sorted(calls, key=number_of)
    }


def match(template: ast.AST, source: ast.AST) -> dict[int, Nodes] | None:
    """Return the code of each hole of `template` in `source`; None if they differ elsewhere."""
    found: dict[int, Nodes] = {}
    return found if _same(template, source, found) else None


def _same(template: ast.AST, source: ast.AST, found: dict[int, Nodes]) -> bool:
    template = _untyped(template)
    source = _untyped(source)
    number = number_of(template)
    if number and isinstance(source, ast.expr):
        found[number] = [source]
        return True
    return type(template) is type(source) and all(
        _equal(getattr(template, field, None), getattr(source, field, None), found)
        for field in template._fields
        if field not in _UNSAID
    )


def _untyped(node: ast.AST) -> ast.AST:
    """Return `x: int = 1` as `x = 1`."""
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        return ast.copy_location(ast.Assign([node.target], node.value), node)
    return node


def _equal(template: object, source: object, found: dict[int, Nodes]) -> bool:
    """Return whether nodes, lists of nodes, names or numbers are equal, except at holes."""
    if isinstance(template, ast.AST) and isinstance(source, ast.AST):
        return _same(template, source, found)
    if isinstance(template, list) and isinstance(source, list):
        if any(isinstance(node, ast.stmt) for node in template):
            return _blocks(_code(template), _code(source), found)
        return len(template) == len(source) and all(
            _equal(a, b, found) for a, b in zip(template, source, strict=True)
        )
    return template == source


def _code(block: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements except docstrings."""
    return [
        node
        for node in block
        if not (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        )
    ]


def _blocks(
    template: Sequence[ast.stmt], source: Sequence[ast.stmt], found: dict[int, Nodes]
) -> bool:
    """Return whether two blocks are equal statement by statement; a hole takes as few statements as
    possible, at least one."""
    if not template:
        return not source
    number = number_of(template[0])
    for taken in range(1, len(source) - len(template) + 2):
        trial = dict(found)
        if number:
            trial[number] = list(source[:taken])
        elif taken > 1 or not _same(template[0], source[0], trial):
            return False
        if _blocks(template[1:], source[taken:], trial):
            found.update(trial)
            return True
    return False


def definitions(tree: ast.AST) -> dict[str, Definition]:
    """Return the functions and classes at the top of a module, and the methods as
    `Class.method`."""
    found: dict[str, Definition] = {}
    for node in getattr(tree, "body", []):
        if isinstance(node, Definition):
            found[node.name] = node
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}": part for name, part in definitions(node).items()}
    return found


def right_code(
    template: ast.Module, sources: Iterable[str], answers: Mapping[int, str]
) -> dict[int, Nodes]:
    """Return the right code of each hole: from the `sources` of the functions that an exercise is
    cut from, then `answers`.

    Raises:  ValueError if the exercise is not cut from a source: its code differs outside the
             holes.
    """
    parts = definitions(template)
    found = dict[int, Nodes]()
    for source in sources:
        node = ast.parse(textwrap.dedent(source)).body[0]
        name = getattr(node, "name", "")
        pieces = match(parts[name], node) if name in parts else None
        if pieces is None:
            raise ValueError(
                f"the exercise is not cut from {name}: their code differs outside the holes"
            )
        found |= pieces
    return found | {number: _parsed(text) for number, text in answers.items()}


def _parsed(text: str) -> Nodes:
    """Return the code of an answer."""
    body = ast.parse(textwrap.dedent(text).strip()).body
    return [body[0].value] if len(body) == 1 and isinstance(body[0], ast.Expr) else list(body)


def answers_of(
    template: ast.Module, student: ast.Module, right: Mapping[int, Nodes]
) -> list[Answer]:
    """Return a student's answers: hole by hole, or function by function where its other lines were
    changed."""
    theirs = definitions(student)
    found = dict[tuple[int, ...], Answer]()
    for name, part in definitions(template).items():
        pieces = match(part, theirs[name]) if name in theirs else None
        if pieces is not None:
            found |= {
                (number,): Answer((number,), nodes, right[number])
                for number, nodes in pieces.items()
            }
        elif name in theirs and isinstance(part, ast.FunctionDef) and (held := _held(part)):
            swaps = {id(node): right[number_of(node)] for node in _holes(part)}
            found[held] = Answer(held, [theirs[name]], [rebuilt(part, swaps)])
    return [found[holes] for holes in sorted(found)]


def _holes(part: ast.AST) -> list[ast.AST]:
    """Return the holes in `part`, each as the statement that it is, or else as an expression."""
    found = [node for node in ast.walk(part) if number_of(node)]
    statements = {id(node.value) for node in found if isinstance(node, ast.Expr)}
    return [node for node in found if id(node) not in statements]


def _held(part: ast.AST) -> tuple[int, ...]:
    return tuple(sorted(map(number_of, _holes(part))))


def corrected(student: ast.Module, answers: Iterable[Answer]) -> ast.Module:
    """Return a student's module with the right code in place of these answers; the lines keep their
    numbers."""
    swaps: dict[int, Nodes] = {}
    for answer in answers:
        first, *others = answer.nodes
        swaps[id(first)] = [_placed(node, first) for node in answer.right]
        swaps |= {id(node): [] for node in others}
    module = rebuilt(student, swaps)
    assert isinstance(module, ast.Module)
    return ast.fix_missing_locations(module)


def filled(template: ast.Module, right: Mapping[int, Nodes]) -> ast.Module:
    """Return an exercise with the right code in place of every hole."""
    swaps = {id(node): right[number_of(node)] for node in _holes(template)}
    module = rebuilt(template, swaps)
    assert isinstance(module, ast.Module)
    return ast.fix_missing_locations(module)


def _placed(node: ast.AST, where: ast.AST) -> ast.AST:
    """Return a copy of `node` with the line numbers of `where`."""
    copied = copy.deepcopy(node)
    for part in ast.walk(copied):
        ast.copy_location(part, where)
    return copied


def rebuilt(node: ast.AST, swaps: Mapping[int, Nodes]) -> ast.AST:
    """Return a copy of `node` with other code in place of the nodes whose `id` is a key of
    `swaps`."""
    if id(node) in swaps:
        return swaps[id(node)][0]
    fields: dict[str, Any] = {}
    for name, value in ast.iter_fields(node):
        if isinstance(value, list):
            fields[name] = [new for old in value for new in _swapped(old, swaps)]
        else:
            fields[name] = rebuilt(value, swaps) if isinstance(value, ast.AST) else value
    return ast.copy_location(type(node)(**fields), node)


def _swapped(old: Any, swaps: Mapping[int, Nodes]) -> list[Any]:
    """Return the nodes that replace an element of a list; an expression among statements becomes a
    statement."""
    if not isinstance(old, ast.AST):
        return [old]
    new = swaps[id(old)] if id(old) in swaps else [rebuilt(old, swaps)]
    if not isinstance(old, ast.stmt):
        return new
    return [
        ast.copy_location(ast.Expr(node), node) if isinstance(node, ast.expr) else node
        for node in new
    ]


def _words(nodes: Nodes) -> list[str]:
    """Return code in a form to compare, without places and spaces."""
    return [ast.dump(node.value if isinstance(node, ast.Expr) else node) for node in nodes]


def blank(source: str) -> str:
    """Return an exercise with only the heads of the functions that have holes: signature, docstring,
    and the tasks of their holes as comments."""
    lines = source.splitlines()
    outer = _outermost(ast.parse(source))
    for part in sorted(outer, key=lambda part: -part.lineno):
        doc = part.body[0]
        has_doc = ast.get_docstring(part) is not None
        first = (doc.end_lineno if has_doc else part.body[0].lineno - 1) or 0
        space = " " * part.body[0].col_offset
        asked = tasks(part)
        body = [
            line
            for number, task in asked.items()
            for line in textwrap.wrap(
                f"{number} {task}",
                100,
                initial_indent=f"{space}# ",
                subsequent_indent=f"{space}#   ",
            )
        ]
        body.append(f'{space}return hole({min(asked)}, "write {part.name}")')
        lines[first : part.end_lineno] = body
    return "\n".join(lines) + "\n"


def _outermost(tree: ast.AST) -> list[ast.FunctionDef]:
    """Return the functions and methods that have holes, without those inside them."""
    found = list[ast.FunctionDef]()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            found += [node] if _holes(node) else []
        else:
            found += _outermost(node)
    return found
