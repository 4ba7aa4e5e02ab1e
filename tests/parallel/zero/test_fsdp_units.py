"""The order in which ZeRO-3 gathers its units."""

from typing import Any

import pytest
from fake_units import FakeUnit, names_of, units_named

from minidist.parallel.zero.fsdp_units import GatherOrder


def forward(order: GatherOrder, units: Any) -> list[str]:
    """Run a forward through these units; return what was to come at each."""
    order.begin_pass()
    found = []
    for unit in units:
        order.enter(unit)
        unit.calls += 1
        found.append(names_of(order.coming))
    return found


def backward(order: GatherOrder, units: Any) -> list[str]:
    """Run a backward through these units; return what was to come at each."""
    order.begin_backward(0)
    found = []
    for unit in units:
        order.enter_backward(unit)
        unit.calls -= 1
        found.append(names_of(order.coming))
    order.end_backward()
    return found


def test_the_first_forward_teaches_the_order() -> None:
    root: Any = FakeUnit("root")
    a, b, c = units = units_named("abc")
    order: Any = GatherOrder(root, units)
    assert order.before_first_backward
    assert forward(order, [a, b, c]) == ["", "", ""]
    assert backward(order, [c, b, a]) == ["ba", "a", ""]
    assert not order.before_first_backward
    assert forward(order, [a, b, c]) == ["bc", "c", ""]
    assert names_of(order.units_of(0)) == "rootabc"


def test_a_unit_that_is_called_twice_is_to_come_until_its_last_backward() -> None:
    a, b = units = units_named("ab")
    order: Any = GatherOrder(units_named("r")[0], units)
    forward(order, [a, b, a])
    assert backward(order, [a, b, a]) == ["ba", "a", ""]
    assert forward(order, [a, b, a]) == ["ba", "a", ""]


def test_a_backward_expects_no_unit_without_gradients() -> None:
    """The result of `a` asks for no gradient, so its call is not counted."""
    a, b, c = units = units_named("abc")
    order: Any = GatherOrder(units_named("r")[0], units)
    forward(order, [a, b, c])
    a.calls = 0
    assert backward(order, [c, b]) == ["b", ""]


def test_a_shorter_forward_does_not_forget_the_order() -> None:
    a, b, c = units = units_named("abc")
    order: Any = GatherOrder(units_named("r")[0], units)
    forward(order, [a, b, c])
    backward(order, [c, b, a])
    forward(order, [a])
    backward(order, [a])
    assert forward(order, [a, b, c]) == ["bc", "c", ""]


def test_the_end_of_a_backward_frees_what_it_did_not_reach() -> None:
    a, b = units = units_named("ab")
    order: Any = GatherOrder(units_named("r")[0], units)
    forward(order, [a, b])
    a.is_free = False
    assert backward(order, [b]) == ["a"]
    assert a.is_free
    assert a.calls == 0


def test_a_backward_outside_its_forward_is_an_error() -> None:
    a, b = units = units_named("ab")
    order: Any = GatherOrder(units_named("r")[0], units)
    forward(order, [a])
    order.begin_backward(0)
    with pytest.raises(ValueError, match="not in list"):
        order.enter_backward(b)
