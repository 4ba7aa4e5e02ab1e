"""One word for one thing: a class name stands for one class in the whole library."""

import ast
from collections import defaultdict

from imports import ROOT, modules


def test_a_class_name_stands_for_one_class() -> None:
    homes = defaultdict(list)
    for path in modules().values():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert len(homes) > 250
    twice = {name: places for name, places in homes.items() if len(places) > 1}
    assert not twice, twice
