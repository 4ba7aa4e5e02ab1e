"""Signatures: packing, dtypes' names, and what counts as agreement."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.comm.signature import Signature, behind_key, dtype_code, dtype_of, pack_block, unpack
from minidist.errors import DtypeError, MismatchError


def signature(**changes):
    return Signature(
        1, 7, "all_reduce", "ring", "sum", None, "<f4", (3, 4), "train.py:40"
    )._replace(**changes)


@pytest.mark.parametrize(
    "dtype",
    [
        "f4",
        ">f8",
        "bool",
        "i1",
        "c16",
        "M8[ms]",
        "m8[s]",
        "U5",
        "S2",
        "longdouble",
        "f2",
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e5m2,
        ml_dtypes.int4,
        [("key", "<i4"), ("x", "<f8", (2,))],
        [("a", "<i4", (2, 3)), ("b", [("c", "<f8"), (("title", "d"), "<i2")])],
    ],
)
def test_every_dtype_has_a_name_that_leads_back(dtype):
    assert dtype_of(dtype_code(np.dtype(dtype))) == np.dtype(dtype)


@pytest.mark.parametrize(
    "dtype",
    [
        object,
        np.dtypes.StringDType(),
        "V0",
        [("a", object)],
        [("a", ml_dtypes.bfloat16)],
        np.dtype(ml_dtypes.bfloat16).newbyteorder(),
    ],
)
def test_a_dtype_that_cannot_travel_is_refused(dtype):
    with pytest.raises(DtypeError, match="cannot be sent"):
        dtype_code(np.dtype(dtype))


def test_headers_lead_back():
    key, where = signature().pack()
    assert unpack(key + where) == (signature(), None)
    theirs, block = unpack(key + where + pack_block(np.dtype(ml_dtypes.bfloat16), (0, 3), "cuda"))
    assert theirs == signature()
    assert block == (np.dtype(ml_dtypes.bfloat16), (0, 3), "cuda")


def test_what_stands_behind_a_known_key():
    _key, where = signature().pack()
    assert behind_key(where) == ("train.py:40", None)
    for shape in ((0, 3), (3, 0), (0, 3)):
        assert behind_key(where + pack_block(np.dtype("f4"), shape, "cpu")) == (
            "train.py:40",
            (np.dtype("f4"), shape, "cpu"),
        )
    for rest in (b"", where[:-1], where + b"\x01"):
        with pytest.raises(MismatchError, match="not a call's"):
            behind_key(rest)


@given(st.binary(max_size=60))
def test_bytes_that_are_no_header_are_refused(data):
    try:
        theirs, block = unpack(data)
    except MismatchError:
        return
    assert len(theirs) == len(Signature._fields)


def test_what_agrees():
    mine = signature()
    assert mine.agrees(signature(where="elsewhere.py:1"))
    assert mine.agrees(signature(dtype=None, shape=None))
    assert mine.agrees(signature(shape=(None, 4)))
    for changes in (
        {"group": 2},
        {"sequence": 8},
        {"verb": "reduce"},
        {"algorithm": "tree"},
        {"op": "max"},
        {"root": 0},
        {"dtype": "<i4"},
        {"shape": (4, 3)},
        {"shape": (12,)},
        {"shape": (None, 3)},
    ):
        assert not mine.agrees(signature(**changes)), changes
        assert not signature(**changes).agrees(mine), changes


def test_how_a_call_is_told():
    assert (
        signature().describe()
        == "all_reduce(float32 (3, 4), op=sum, algorithm=ring), its call 7, at train.py:40"
    )
    assert signature(shape=(None, 4)).describe().startswith("all_reduce(float32 (?, 4),")
    assert signature(
        verb="barrier", op=None, dtype=None, shape=None, algorithm=None
    ).describe() == ("barrier(), its call 7, at train.py:40")
