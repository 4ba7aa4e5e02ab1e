"""Test how one example is run, and what is said of its results."""

import re
import threading

import numpy as np
import pytest

from minidist.comm.group import Group
from minidist.errors import ConfigError
from minidist.testing import Example, check_example, one_example
from minidist.testing.one_example import Arrivals

THREE = Example("all_reduce", 3, (4, 4, 4))


def told(example, function, **options):
    """The message of a wrong collective."""
    with pytest.raises(AssertionError) as caught:
        check_example(example, function, **options)
    return str(caught.value)


def test_the_last_rank_waits_until_another_has_left_the_barrier(monkeypatch):
    monkeypatch.setattr(one_example, "LATE", 20.0)
    arrivals = Arrivals(2)
    last = threading.Thread(target=arrivals.call, args=(1, 1))
    last.start()
    arrivals.call(0, 1)
    assert arrivals.missing() == [1]
    last.join()  # at once: rank 0 has left
    assert arrivals.missing() == []


@pytest.mark.parametrize("transport", ["threads", "threads-unbuffered"])
def test_a_barrier_that_does_nothing_is_found_whoever_calls_last(transport):
    for last in range(3):
        example = Example("barrier", 3, (0, 0, 0), root=last, transport=transport)
        message = told(example, lambda group: None)
        assert re.search(
            rf"left the barrier before ranks? (\d, )*{last}(, \d)* had called it", message
        )


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (lambda x: None, "returned None, expected an array"),
        (lambda x: x.tolist(), "returned a list, expected an array"),
        (lambda x: x.astype(np.float64), "returned dtype float64, expected float32"),
        (lambda x: x.reshape(-1), "returned shape (4,), expected (2, 2)"),
        (lambda x: np.where(x == x[1, 0], np.nan, x), "element [1, 0] is nan, NumPy has"),
        (lambda x: x + (x == x[1, 1]), "; 1 of 4 elements differ"),
    ],
)
def test_a_wrong_result_is_described(result, says):
    message = told(THREE, lambda group, x: result(group.all_reduce(x)))
    assert f"rank 0: {says}" in message or says in message
    assert message.startswith("all_reduce is wrong on 3 of 3 ranks\n")
    assert all(f"  x of rank {rank}: [[" in message for rank in range(3))


def test_nan_on_every_rank_is_not_right():
    rough = Example("all_reduce", 2, (3, 3), values="rough")
    message = told(rough, lambda group, x: group.all_reduce(x) * np.float32("nan"))
    assert "element [0] is nan" in message and "rough values" in message


def test_what_the_other_ranks_of_a_reduce_return_does_not_count():
    example = Example("reduce", 3, (4, 4, 4), root=1)
    check_example(example, lambda group, x, root: group.all_reduce(x))


def test_long_arguments_and_many_ranks_are_not_shown():
    example = Example("all_reduce", 8, (50,) * 8)
    message = told(example, lambda group, x: x)
    assert "x of rank" not in message and "  … and 5 more" in message
    assert len(message.splitlines()) == 7


def test_an_error_of_a_rank_is_its_cause():
    def fails(group, x):
        if group.rank == 1:
            raise KeyError("weight")
        return group.all_reduce(x)

    with pytest.raises(AssertionError, match="all_reduce raised KeyError") as caught:
        check_example(THREE, fails)
    assert isinstance(caught.value.__cause__, KeyError)


def test_messages_that_do_not_fit_are_told():
    def other_op(group, x):
        return group.all_reduce(x, "max" if group.rank else "sum")

    message = told(THREE, other_op)
    assert message.startswith("all_reduce sends messages that do not fit\n")
    assert "MismatchError" in message


def test_a_group_of_some_ranks_in_another_order():
    example = Example("broadcast", 2, (3, 3), root=1, world_ranks=(3, 0))
    seen = []

    def broadcast(group, x, root):
        seen.append((group.rank, group.world_ranks[group.rank], x is not None))
        return group.broadcast(x, root)

    check_example(example, broadcast)
    assert sorted(set(seen)) == [(0, 3, False), (1, 0, True)]


def test_a_limit_that_is_no_time_is_refused():
    with pytest.raises(ConfigError, match="limit"):
        check_example(THREE, Group.all_reduce, limit=0)
