"""Call matching: ranks that call different things get MismatchError with both calls, and nobody
gets a wrong result."""

import re

import numpy as np
import pytest
from collective_checker import PAIRS, REDUCING, ROOTED, Drawn, bring, call, expected, mutated, same
from helpers import THREADS, run
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.comm.verbs import reduced
from minidist.errors import CommError, MismatchError, ShapeError

ONES = np.ones(6, np.float32)

KINDS = {
    "verb": (lambda w: w.all_reduce(ONES), lambda w: w.reduce_scatter(ONES)),
    "shape": (lambda w: w.all_reduce(ONES), lambda w: w.all_reduce(ONES.reshape(2, 3))),
    "length": (lambda w: w.all_reduce(ONES), lambda w: w.all_reduce(ONES[1:])),
    "dtype": (lambda w: w.all_reduce(ONES), lambda w: w.all_reduce(ONES.astype(np.float64))),
    "dtype of one size": (
        lambda w: w.all_reduce(ONES),
        lambda w: w.all_reduce(ONES.view(np.int32)),
    ),
    "op": (lambda w: w.all_reduce(ONES, op="max"), lambda w: w.all_reduce(ONES, op="min")),
    "root": (lambda w: w.broadcast(ONES, root=0), lambda w: w.broadcast(ONES, root=1)),
    "algorithm": (
        lambda w: w.all_reduce(ONES, algorithm="ring"),
        lambda w: w.all_reduce(ONES, algorithm="direct"),
    ),
    "order": (
        lambda w: (w.all_reduce(ONES), w.barrier()),
        lambda w: (w.barrier(), w.all_reduce(ONES)),
    ),
    "one call left out": (
        lambda w: (w.broadcast(ONES), w.all_reduce(ONES)),
        lambda w: w.all_reduce(ONES),
    ),
    "rows": (
        lambda w: w.all_gather(ONES.reshape(3, 2)),
        lambda w: w.all_gather(ONES.reshape(2, 3)),
    ),
    "rows of the result": (
        lambda w: w.all_gather(ONES, out=np.empty(6 * w.size, np.float32)),
        lambda w: w.all_gather(ONES[1:], out=np.empty(5 * w.size, np.float32)),
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("transport", THREADS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mismatch_shows_both_calls(kind, transport, size):
    usual, odd = KINDS[kind]
    # others may have what the root sent by then
    hear = {1, 2 % size} if kind == "root" else set(range(size))
    returned = {}

    def ranks(world):
        returned[world.rank] = (odd if world.rank == 1 else usual)(world)

    with pytest.raises(MismatchError) as caught:
        run(ranks, size=size, transport=transport)
    text = str(caught.value)
    assert (
        len(re.findall(r"rank \d calls \w+\(.*\), its call \d, at \S*test_call\.py:\d+", text)) == 2
    ), text
    assert "rank 1 calls" in text, text
    assert not returned.keys() & hear
    assert all((result == ONES).all() for result in returned.values())


@st.composite
def disagreements(draw):
    """A call, and what one rank calls instead."""
    verb, algorithm = draw(st.sampled_from([pair for pair in PAIRS if pair[0] != "barrier"]))
    size = draw(st.integers(2, 6))
    length = draw(st.sampled_from((1, 5, 64, 1000)))
    lengths = [[length] * size] * size if verb == "all_to_all" else [length] * size
    usual = Drawn(
        verb, algorithm, size, lengths, root=draw(st.integers(0, size - 1)) if verb in ROOTED else 0
    )
    kinds = [
        "verb",
        "dtype",
        *(["op"] if verb in REDUCING else []),
        *(["root"] if verb in ROOTED else []),
        *(["shape"] if verb in REDUCING else []),
        *(["algorithm"] if len([pair for pair in PAIRS if pair[0] == verb]) > 1 else []),
    ]
    kind = draw(st.sampled_from(kinds))
    odd_rank = draw(st.integers(0, size - 1))
    if kind == "verb":
        other, its = draw(
            st.sampled_from([pair for pair in PAIRS if pair[0] not in (verb, "all_to_all")])
        )
        odd = Drawn(other, its, size, [length] * size, root=odd_rank)
    elif kind == "dtype":
        odd = mutated(usual, dtype=draw(st.sampled_from(("int32", "float64"))))
        if verb in ("broadcast", "scatter"):
            odd_rank = usual.root  # the others bring no array
    elif kind == "op":
        odd = mutated(usual, op="max")
    elif kind == "root":
        odd = mutated(usual, root=(usual.root + draw(st.integers(1, size - 1))) % size)
    elif kind == "shape":
        odd = mutated(usual, lengths=[length + draw(st.integers(1, 3))] * size)
    else:
        odd = mutated(
            usual,
            algorithm=draw(
                st.sampled_from([its for other, its in PAIRS if other == verb and its != algorithm])
            ),
        )
    return kind, usual, odd, odd_rank


def check_disagreement(transport, drawn):
    kind, usual, odd, odd_rank = drawn
    outcomes = {}

    def ranks(world):
        case = odd if world.rank == odd_rank else usual
        try:
            outcomes[world.rank] = ("returned", call(world, case, bring(case, world.rank), None))
            world.barrier()
        except MismatchError as error:
            outcomes[world.rank] = ("mismatch", str(error))
            raise
        except CommError:
            outcomes.setdefault(world.rank, ("ended", None))
            raise

    if kind == "dtype" and usual.verb in ("broadcast", "scatter"):
        # only the root says the dtype: no disagreement
        run(ranks, size=usual.size, transport=transport)
        return
    with pytest.raises(MismatchError) as caught:
        run(ranks, size=usual.size, transport=transport)
    assert "test_call.py:" in str(caught.value) or "collective_checker.py:" in str(caught.value)
    # who returned before it was told did not depend on the odd rank
    for rank, (what, value) in outcomes.items():
        if what == "returned" and rank != odd_rank:
            assert same(value, expected(usual)[rank]), f"rank {rank} returned {value!r}"


@pytest.mark.sampled
@pytest.mark.parametrize("transport", THREADS)
@settings(max_examples=40)
@given(drawn=disagreements())
def test_random_mismatches_are_caught(transport, drawn):
    check_disagreement(transport, drawn)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("transport", THREADS)
@settings(max_examples=1500, derandomize=False)
@given(drawn=disagreements())
def test_random_mismatches_are_caught_full_count(transport, drawn):
    check_disagreement(transport, drawn)


def test_an_out_that_fits_no_call_is_the_callers_own_mistake():
    with pytest.raises(ShapeError, match=r"out= has shape \(7,\), the result has \(12,\)"):
        run(lambda world: world.all_gather(ONES, out=np.empty(7, np.float32)), size=2)


def test_a_foreign_message_is_refused():
    """Bytes under a group's tag that are no call of ours."""

    def ranks(world):
        if world.rank == 0:
            world.transport.start_send(
                1, world.tag, np.zeros(3, np.uint8), b"\xc1 not a header"
            ).wait()
        else:
            world.barrier()

    with pytest.raises(MismatchError, match="header is not a call's"):
        run(ranks, size=2)


def test_a_receive_that_does_not_fit_shows_both_sides():
    def ranks(world):
        if world.rank == 0:
            world.send(np.ones(3), dst=1)
        else:
            world.recv(src=0, out=np.empty(4))

    with pytest.raises(MismatchError) as caught:
        run(ranks, size=2)
    assert re.search(
        r"rank 1 calls recv\(float64 \(4,\)\), its call 1, at \S*test_call.py:\d+",
        str(caught.value),
    )
    assert re.search(
        r"rank 0 calls send\(float64 \(3,\)\), its call 1, at \S*test_call.py:\d+",
        str(caught.value),
    )


def test_a_call_is_so_small_that_python_makes_no_dict_for_it():
    """CPython keeps 30 attributes of an object beside it; with the next it makes a dict, which took
    1.5 µs a call."""

    def attributes(world):
        return len(vars(reduced(world, "all_reduce", np.ones(3), "sum", None, "auto")))

    assert 20 < max(run(attributes, size=2)) < 30
