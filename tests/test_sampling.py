"""The default run takes each value of each parameter of a sampled test, or each n-th case."""

import itertools
from types import SimpleNamespace

import pytest
from sampling import left_out, sampled_tests

SIZES = (1, 2, 3, 5)
NAMES = ("ring", "tree", "direct")


class Case:
    """What sampling asks of a pytest.Item."""

    def __init__(self, test: str, params: dict, *marks: pytest.Mark) -> None:
        self.nodeid = f"{test}[{params}]"
        self.callspec = SimpleNamespace(params=params)
        self.marks = marks

    def iter_markers(self, name: str) -> list[pytest.Mark]:
        return [mark for mark in self.marks if mark.name == name]

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next(iter(self.iter_markers(name)), None)


def product(mark: pytest.MarkDecorator) -> list[Case]:
    return [
        Case("test_any", {"size": size, "name": name}, mark.mark)
        for size, name in itertools.product(SIZES, NAMES)
    ]


def test_each_value_of_each_parameter_is_taken() -> None:
    cases = product(pytest.mark.sampled)
    out = left_out(cases)
    taken = [case.callspec.params for case in cases if case not in out]
    assert {params["size"] for params in taken} == set(SIZES)
    assert {params["name"] for params in taken} == set(NAMES)
    assert len(taken) == len(SIZES)  # as many as the parameter with the most values


def test_every_nth_case_is_taken() -> None:
    cases = product(pytest.mark.sampled(every=5))
    assert [case for case in cases if case not in left_out(cases)] == [cases[n] for n in (0, 5, 10)]


def test_a_test_without_the_mark_and_a_soak_case_are_not_sampled() -> None:
    sampled = Case("test_a", {"size": 1}, pytest.mark.sampled.mark)
    long = Case("test_a", {"size": 2}, pytest.mark.sampled.mark, pytest.mark.soak.mark)
    assert sampled_tests([sampled, long, Case("test_b", {"size": 1})]) == [[sampled]]
