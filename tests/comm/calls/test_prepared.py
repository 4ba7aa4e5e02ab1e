"""Prepared calls: a repeated call gives the result, the record and the error of a first call."""

import numpy as np
import pytest
from helpers import run
from planted import Bug, check_caught

from minidist.comm.calls.prepared import PreparedCall, PreparedCalls
from minidist.errors import MismatchError

X = np.array([[3.0, 1.0], [2.0, 5.0]])
CALLS = [
    ("all_reduce", X, {"algorithm": "ring"}),
    ("all_reduce", X, {"algorithm": "tree"}),
    ("all_reduce", X, {"algorithm": "ring", "op": "max"}),
    ("all_reduce", X.astype(np.float32), {"algorithm": "ring"}),
    ("all_reduce", X[:1], {"algorithm": "ring"}),
    ("all_reduce", X.T, {"algorithm": "ring"}),
    ("all_reduce", X, {"algorithm": "ring", "out": (2, 2)}),
    ("reduce_scatter", X, {"algorithm": "ring"}),
    ("reduce", X, {"root": 0}),
    ("reduce", X, {"root": 1}),
    ("all_gather", X, {"algorithm": "ring"}),
    ("all_gather", X, {"algorithm": "ring", "out": (4, 2)}),
    ("gather", X, {"root": 0}),
    ("gather", X, {"root": 1}),
]
"""(verb, argument, options; for `out` its shape)"""

KEY = ("verb", "algorithm", "op", "root", "where", "dtype", "shape", "shape of out")
RECORDED = ("sequence", "verb", "algorithm", "op", "root", "dtype", "shape", "where", "nbytes")


def results_and_records(world, forget):
    """Return the results of CALLS, each made three times by one line and once by another, and the
    flight records; `forget`: each call is prepared anew."""
    results = []
    for _ in range(3):
        for verb, x, options in CALLS:
            options = dict(options)
            if "out" in options:
                options["out"] = np.empty(options["out"])
            if forget:
                world.prepared.clear()
            results.append(getattr(world, verb)(x + world.rank, **options))
    if forget:
        world.prepared.clear()
    results.append(world.all_reduce(X + world.rank, algorithm="ring"))
    records = [
        [entry[name] for name in RECORDED]
        for entry in world.ledger.flight.entries()
        if entry["kind"] == "call"
    ]
    return results, records


def check_repeated():
    for first, repeated in zip(
        run(lambda world: results_and_records(world, True), size=2),
        run(lambda world: results_and_records(world, False), size=2),
        strict=True,
    ):
        for wanted, found in zip(first[0], repeated[0], strict=True):
            np.testing.assert_array_equal(found, wanted)
        assert repeated[1] == first[1]


def without(place):
    """Return a Bug: the key lacks one of its fields."""

    def shorter(key):
        return key[:place] + key[place + 1 :]

    return Bug(
        f"key without {KEY[place]}",
        PreparedCalls,
        "get",
        lambda right, calls, key: right(calls, shorter(key)),
        also=(
            (
                PreparedCalls,
                "keep",
                lambda right, calls, key, prepared: right(calls, shorter(key), prepared),
            ),
        ),
        raises=(AssertionError, MismatchError),
    )


@pytest.mark.parametrize("bug", [without(place) for place in range(len(KEY))], ids=repr)
def test_a_repeated_call_is_as_a_first_call(bug, monkeypatch):
    check_caught(bug, check_repeated, monkeypatch)


@pytest.mark.parametrize(
    ("field", "x", "op"),
    [("op", X, "max"), ("dtype", X.astype(np.float32), "sum"), ("shape", X[:1], "sum")],
)
def test_a_rank_that_changes_a_repeated_call_is_found(field, x, op):
    def ranks(world):
        for turn in range(5):
            changed = world.rank == 1 and turn == 3
            world.all_reduce(x if changed else X, op if changed else "sum", algorithm="ring")

    with pytest.raises(MismatchError, match=f"(?s)ranks disagree in {field}.*its call 4"):
        run(ranks, size=2)


def test_a_group_keeps_a_bounded_number_of_calls():
    calls = PreparedCalls()
    prepared = PreparedCall("barrier", "naive", None, None, None, None, "", b"", lambda call: None)
    for key in range(2500):
        calls.keep(key, prepared)
        assert calls[key] is prepared
        assert len(calls) <= 1000
