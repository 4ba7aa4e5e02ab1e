"""values: every value survives the journey, and nothing malformed does harm."""

import contextlib
import enum
from collections import OrderedDict, namedtuple

import ml_dtypes
import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from minidist.comm.serialization import NESTING, Kind, pack, unpack
from minidist.errors import CommError, DtypeError


def same(a, b):
    """Equal in type, dtype, shape and bits, all the way down."""
    if isinstance(a, np.ndarray | np.generic):
        return (
            type(a) is type(b)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and a.tobytes() == b.tobytes()
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return a == b or a != a


arrays = hnp.arrays(
    st.one_of(
        hnp.boolean_dtypes(),
        hnp.integer_dtypes(endianness="?"),
        hnp.floating_dtypes(endianness="?"),
        hnp.complex_number_dtypes(),
        hnp.unicode_string_dtypes(),
        hnp.byte_string_dtypes(),
        hnp.datetime64_dtypes(),
        hnp.timedelta64_dtypes(),
    ),
    hnp.array_shapes(min_dims=0, min_side=0, max_dims=4, max_side=4),
)
keys = st.one_of(st.text(max_size=5), st.integers(), st.tuples(st.integers(), st.text(max_size=3)))
atoms = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.binary(),
    arrays,
    st.sets(st.integers()),
    st.frozensets(st.text(max_size=3)),
)
values = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=12,
)


@given(values)
def test_every_value_comes_back_the_same(value):
    assert same(unpack(pack(value)), value)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4"])
def test_ml_dtypes_travel_by_name(name):
    array = np.arange(-3, 3).reshape(2, 3).astype(getattr(ml_dtypes, name))
    assert same(unpack(pack(array)), array)
    assert same(unpack(pack(array[1, 1])), array[1, 1])


def test_arrays_are_copies_and_writable_whatever_the_layout():
    array = np.arange(24, dtype=np.float32).reshape(4, 6)[::2, ::-3]
    result = unpack(pack(array))
    result += 1
    np.testing.assert_array_equal(result, array + 1)
    np.testing.assert_array_equal(unpack(pack(np.asfortranarray(array))), array)


def test_subclasses_travel_as_what_they_extend():
    point = namedtuple("point", "x y")
    colour = enum.IntEnum("colour", "red green")
    assert unpack(pack([point(1, 2), colour.green, OrderedDict(a=1)])) == [(1, 2), 2, {"a": 1}]


@pytest.mark.parametrize(
    "value",
    [
        object(),
        np.array([object()]),
        np.zeros(2, "i4,f8"),
        lambda: 0,
        "\ud800",
        np.ones(2, np.dtype(ml_dtypes.bfloat16).newbyteorder()),
    ],
    ids=["object", "object array", "structured", "function", "surrogate", "byte order"],
)
def test_what_cannot_travel_is_named(value):
    with pytest.raises(DtypeError, match="cannot travel"):
        pack({"deep": [value]})


def test_nesting_is_limited_on_both_sides():
    value = ()
    for _ in range(NESTING + 1):
        value = (value,)
    with pytest.raises(DtypeError, match="nested"):
        pack(value)
    data = pack([])
    for _ in range(1000):
        data = msgpack.packb(msgpack.ExtType(Kind.TUPLE, msgpack.packb([1]) and data))
    with pytest.raises(CommError, match="nested"):
        unpack(data)


def forged(kind, *parts):
    return msgpack.packb(msgpack.ExtType(kind, msgpack.packb(list(parts))))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x91",
        b"\xdd\xff\xff\xff\xff",
        pack(1) + b"x",
        forged(Kind.ARRAY, "<f4", [1 << 40], b""),
        forged(Kind.ARRAY, "<f4", [-1], b""),
        forged(Kind.ARRAY, "<f4", [2], b"1234"),
        forged(Kind.ARRAY, "|O", [1], b"12345678"),
        forged(Kind.ARRAY, "finfo", [1], b"12345678"),
        forged(Kind.ARRAY, "<U999999999", [0], b""),
        forged(Kind.ARRAY, "<f4", [0, 1 << 63], b""),
        forged(Kind.ARRAY, "<f4", [1] * 99, b"1234"),
        forged(Kind.SCALAR, "<M8[zz]", b"12345678"),
        forged(Kind.SET, [1]),
        forged(99),
    ],
    ids=range(16),
)
def test_malformed_values_are_an_error_of_ours(data):
    with pytest.raises(CommError, match="malformed"):
        unpack(data)


@given(st.binary(max_size=200))
def test_random_bytes_never_do_worse_than_an_error(data):
    with contextlib.suppress(CommError):
        unpack(data)
