"""The order in which ZeRO-3 gathers the units of a pipeline's stages."""

from typing import Any

from fake_units import names_of, units_named

from minidist.autograd.tensor import no_grad
from minidist.parallel.zero.staged_zero3 import StageOrder

SCHEDULE = [(0, True), (1, True), (1, False), (0, False)]


def two_stages() -> tuple[Any, Any]:
    units = units_named("abcd")
    order = StageOrder(units_named("r")[0], units, [units[:2], units[2:]], SCHEDULE)
    order.begin_pass()
    return order, units


def test_a_stage_knows_its_units_before_the_first_forward() -> None:
    order, (a, b, c, d) = two_stages()
    assert not order.before_first_backward
    for unit, coming, following in ((a, "b", "cd"), (b, "", "cd"), (c, "d", "dc"), (d, "", "dc")):
        order.enter(unit)
        assert names_of(order.coming) == coming
        assert names_of(order.following) == following


def test_a_backward_is_that_of_one_stage() -> None:
    order, (a, _, c, d) = two_stages()
    order.enter(a)
    order.enter(c)
    order.begin_backward(1)
    assert names_of(order.units_of(1)) == "cd"
    order.enter_backward(d)
    assert names_of(order.coming) == "c"
    assert names_of(order.following) == "ba"
    order.begin_backward(0)
    assert names_of(order.coming) == "ba"
    assert order.following == []


def test_calls_of_other_microbatches_stay() -> None:
    order, (a, *_) = two_stages()
    a.calls = 2
    a.is_free = False
    order.begin_backward(0)
    order.end_backward()
    assert a.calls == 2
    assert not a.is_free


def test_without_gradients_only_forwards_follow() -> None:
    order, (_, _, c, _) = two_stages()
    with no_grad():
        order.begin_pass()
    order.enter(c)
    assert order.following == []


def test_a_stage_without_units_is_not_read_ahead() -> None:
    units = units_named("ab")
    order: Any = StageOrder(units_named("r")[0], units, [units, []], SCHEDULE)
    order.begin_pass()
    order.enter(units[0])
    assert names_of(order.following) == "ba"
