"""Neighbours of a right answer, as a tired student writes them: off by one, another sign, another
axis, a value from before, no copy. None of them may pass a check.

    for code in neighbours("(group.rank - step) % group.size"): ...

A neighbour that means the same as the right code stands in SAME of test_near_misses.py.
"""

import ast
import copy
from collections.abc import Callable, Iterator
from typing import Any

SWAPS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult, ast.FloorDiv),
    ast.FloorDiv: (ast.Mod, ast.Div),
    ast.Mod: (ast.FloorDiv,),
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}
"""{sign: the signs that are written instead}."""

OTHER_NAMES = {
    "min": "max",
    "max": "min",
    "minimum": "maximum",
    "maximum": "minimum",
    "sum": "max",
    "floor": "ceil",
    "ceil": "floor",
}
"""{function or method: the one that is taken instead}."""

NO_COPY = {"copy", "array", "sqrt", "abs", "ascontiguousarray"}
"""Functions and methods that a student leaves out."""


def neighbours(code: str) -> Iterator[str]:
    """Yield each different code that is one small mistake away from `code`."""
    right = ast.parse(code)
    seen = {ast.unparse(right)}
    for place, node in enumerate(ast.walk(right)):
        for change in _changes(node):
            wrong = copy.deepcopy(right)
            target = _at(wrong, place)
            new = change(target)
            if new is not target:
                wrong = _Put(target, new).visit(wrong)
            text = ast.unparse(ast.fix_missing_locations(wrong))
            if text and text not in seen:
                seen.add(text)
                yield text


def _at(tree: ast.AST, place: int) -> ast.AST:
    """Return the node that ast.walk yields as number `place`."""
    return next(node for number, node in enumerate(ast.walk(tree)) if number == place)


class _Put(ast.NodeTransformer):
    """Replaces one node of a tree; by None it goes."""

    def __init__(self, old: ast.AST, new: Any) -> None:
        self.old = old
        self.new = new

    def visit(self, node: ast.AST) -> Any:
        return self.new if node is self.old else self.generic_visit(node)


Change = Callable[[Any], Any]
"""Changes a node in place and returns it, or returns what stands instead of it."""


def _changes(node: ast.AST) -> Iterator[Change]:
    """Yield the mistakes that can be made at a node."""
    if isinstance(node, ast.Module) and len(node.body) > 1:
        for number in range(len(node.body)):
            yield lambda module, number=number: _without(module, "body", number)
    if isinstance(node, ast.BinOp):
        for sign in SWAPS.get(type(node.op), ()):
            yield lambda found, sign=sign: _set(found, op=sign())
        yield lambda found: found.left
        yield lambda found: found.right
        if isinstance(node.op, ast.Sub | ast.Div | ast.FloorDiv | ast.Mod | ast.MatMult):
            yield lambda found: _set(found, left=found.right, right=found.left)
    if isinstance(node, ast.AugAssign):
        for sign in SWAPS.get(type(node.op), ()):
            yield lambda found, sign=sign: _set(found, op=sign())
        yield lambda found: ast.Assign([found.target], found.value)
    if isinstance(node, ast.Compare):
        for sign in SWAPS.get(type(node.ops[0]), ()):
            yield lambda found, sign=sign: _set(found, ops=[sign(), *found.ops[1:]])
        for sign in SWAPS.get(type(node.ops[-1]), ()) if len(node.ops) > 1 else ():
            yield lambda found, sign=sign: _set(found, ops=[*found.ops[:-1], sign()])
    if isinstance(node, ast.BoolOp):
        for sign in SWAPS[type(node.op)]:
            yield lambda found, sign=sign: _set(found, op=sign())
        for number in range(len(node.values)):
            yield lambda found, number=number: found.values[number]
    if isinstance(node, ast.UnaryOp):
        yield lambda found: found.operand
    if isinstance(node, ast.IfExp):
        yield lambda found: found.body
        yield lambda found: found.orelse
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        for step in (1, -1):
            yield lambda found, step=step: ast.Constant(found.value + step)
    if isinstance(node, ast.Slice):
        for part in ("lower", "upper"):
            if getattr(node, part) is not None:
                yield lambda found, part=part: _set(found, **{part: None})
                for sign in (ast.Add, ast.Sub):
                    yield lambda found, part=part, sign=sign: _set(
                        found,
                        **{part: ast.BinOp(getattr(found, part), sign(), ast.Constant(1))},
                    )
    if isinstance(node, ast.Tuple) and len(node.elts) == 2:
        yield lambda found: _set(found, elts=found.elts[::-1])
    if isinstance(node, ast.comprehension):
        for number in range(len(node.ifs)):
            yield lambda found, number=number: _without(found, "ifs", number)
    if isinstance(node, ast.Attribute) and node.attr == "T":
        yield lambda found: found.value
    if isinstance(node, ast.Call):
        yield from _calls(node)


def _calls(node: ast.Call) -> Iterator[Change]:
    """Yield the mistakes of a call: another function, its arguments turned round, one left out."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in OTHER_NAMES:
        part = "attr" if isinstance(node.func, ast.Attribute) else "id"
        yield lambda found: _set(found, func=_set(found.func, **{part: OTHER_NAMES[name]}))
    if name in NO_COPY:
        yield lambda found: found.args[0] if found.args else found.func.value
    if len(node.args) > 1 and name not in OTHER_NAMES:  # min(a, b) is min(b, a)
        yield lambda found: _set(found, args=[found.args[1], found.args[0], *found.args[2:]])
    for number, keyword in enumerate(node.keywords):
        if keyword.arg != "algorithm":  # every algorithm gives the same sum
            yield lambda found, number=number: _without(found, "keywords", number)


def _set(node: Any, **fields: Any) -> Any:
    for name, value in fields.items():
        setattr(node, name, value)
    return node


def _without(node: Any, part: str, number: int) -> Any:
    del getattr(node, part)[number]
    return node
