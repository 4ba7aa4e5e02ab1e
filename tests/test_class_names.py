"""One word for one thing: a class name stands for one class in the whole library."""

from collections import defaultdict

from imports import ROOT, classes, modules


def test_a_class_name_stands_for_one_class() -> None:
    homes = defaultdict(list)
    for module, path in modules().items():
        for name, line in classes(module):
            homes[name].append(f"{path.relative_to(ROOT)}:{line}")
    assert len(homes) > 250
    twice = {name: places for name, places in homes.items() if len(places) > 1}
    assert not twice, twice
