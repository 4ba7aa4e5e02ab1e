"""Which cases of a test the default run takes: the mark `sampled` (CONTRIBUTING.md)."""

from collections.abc import Iterable, Sequence

import pytest


def sampled_tests(items: Iterable[pytest.Item]) -> list[list[pytest.Item]]:
    """Return the cases of each test that is marked `sampled`, without those that are soak."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("soak"):
            tests.setdefault(item.nodeid.split("[")[0], []).append(item)
    return list(tests.values())


def left_out(cases: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the cases of one test that the default run does not need.

    With `sampled(every=n)` it needs each n-th case. Else it takes the case with the most values
    that no case before has, the first of several, until each value of each parameter occurs.
    """
    (mark,) = cases[0].iter_markers("sampled")
    if every := mark.kwargs.get("every"):
        return [case for number, case in enumerate(cases) if number % every]
    values = {case: values_of(case) for case in cases}
    unseen = set().union(*values.values())
    while unseen:
        needed = max(values, key=lambda case: len(values[case] & unseen))
        unseen -= values.pop(needed)
    return list(values)


def values_of(case: pytest.Item) -> set[tuple[str, str]]:
    """Return (parameter, value as text) of one case."""
    return {(name, repr(value)) for name, value in case.callspec.params.items()}
