"""The examples that the strategies draw."""

import inspect

import numpy as np
import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st

import minidist as md
from minidist import testing
from minidist.errors import ConfigError
from minidist.testing import check_example, reference, strategies
from minidist.testing.reference import EVERY_DTYPE, LAYOUTS, VERBS, dtype_of

QUICK = settings(max_examples=300, database=None, derandomize=True)


@given(x=strategies.arrays(), size=strategies.sizes())
@settings(max_examples=10)
def test_a_broadcast_keeps_every_array(x, size):
    """The example of the module."""
    for result in md.run(lambda world: world.broadcast(x), size=size):
        assert result.dtype == x.dtype and np.array_equal(result, x)


def test_arrays_have_every_dtype_layout_and_length():
    seen = set()

    @given(x=strategies.arrays())
    @settings(max_examples=300)
    def look(x):
        transposed = x.ndim == 2 and x.flags.f_contiguous and not x.flags.c_contiguous
        strided = x.ndim == 1 and not x.flags.c_contiguous
        seen.update(
            [
                x.dtype.str if x.dtype.kind != "V" else x.dtype.name,
                f"writeable {x.flags.writeable}",
                "transposed" if transposed else "strided" if strided else "plain",
                "empty" if x.size == 0 else "long" if x.size > 1000 else "short",
            ]
        )

    look()
    dtypes = {dtype_of(name) for name in EVERY_DTYPE}
    assert {one.str if one.kind != "V" else one.name for one in dtypes} <= seen
    assert {"writeable True", "writeable False", "transposed", "strided", "plain"} <= seen
    assert {"empty", "long", "short"} <= seen


def test_an_array_of_one_dtype_and_length():
    x = find(strategies.arrays("bfloat16", "plain", 7), lambda _: True, settings=QUICK)
    assert (x.dtype.name, x.size, x.flags.c_contiguous) == ("bfloat16", 7, True)


def test_splits_are_uneven_and_groups_in_any_order():
    split = find(strategies.splits(3), lambda parts: len(set(parts)) == 3, settings=QUICK)
    assert len(split) == 3
    assert find(strategies.groups(3), lambda ranks: True, settings=QUICK) == ()
    group = find(strategies.groups(3), lambda ranks: ranks and ranks[0] > ranks[1], settings=QUICK)
    assert len(set(group)) == 3 and max(group) < 5


@given(data=st.data())
@settings(max_examples=20)
def test_algorithms_are_those_of_the_verb_and_transport(data):
    size = data.draw(strategies.sizes())
    transport = data.draw(strategies.transports())
    verb = data.draw(st.sampled_from(("all_reduce", "all_gather", "reduce_scatter")))
    algorithm = data.draw(strategies.algorithms(verb, transport))
    assert algorithm not in reference.ONLY_ON
    x = np.arange(size + 1.0)
    md.run(
        lambda world: getattr(world, verb)(x, algorithm=algorithm), size=size, transport=transport
    )


def test_algorithms_of_another_transport():
    assert find(strategies.algorithms("all_reduce", "shm"), lambda name: name == "shared")
    assert find(strategies.algorithms("all_reduce", "mpi"), lambda name: name == "native")
    with pytest.raises(ConfigError, match="no collective 'sum'"):
        strategies.algorithms("sum")


@pytest.mark.parametrize("verb", VERBS)
@given(data=st.data())
@settings(max_examples=5)
def test_examples_are_right_by_the_library(verb, data):
    example = data.draw(strategies.examples(verb, ops=reference.OPS, dtypes=EVERY_DTYPE))
    assert example.layout in LAYOUTS and len(example.lengths) == example.size
    assert eval(repr(example), {"Example": testing.Example}) == example
    check_example(example, getattr(md.Group, verb))


@pytest.mark.parametrize(
    "name", ["arrays", "examples", "groups", "lengths", "splits", "algorithms"]
)
def test_every_strategy_tells_its_arguments_and_result(name):
    function = getattr(strategies, name)
    told = inspect.getdoc(function)
    assert told.startswith("Draw ") and "Returns: a strategy of" in told
    parameters = [one for one in inspect.signature(function).parameters if one != "draw"]
    assert [one for one in parameters if f"{one}" not in told.partition("Args:")[2]] == []


@pytest.mark.parametrize("name", ["check_collective", "check_example"])
def test_the_checkers_tell_arguments_result_errors_and_an_example(name):
    function = getattr(testing, name)
    told = inspect.getdoc(function)
    assert f"    {name}(" in told
    arguments, _, rest = told.partition("Args:")[2].partition("Returns:")
    assert "Raises:" in rest and "AssertionError" in rest
    missing = [one for one in inspect.signature(function).parameters if f"{one}:" not in arguments]
    assert missing == []
    assert dir(testing) == testing.__all__
    with pytest.raises(AttributeError, match="no attribute 'chek'; it offers Example, check_coll"):
        testing.chek  # noqa: B018
