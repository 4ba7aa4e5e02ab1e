"""Every verb by every algorithm, against NumPy and against its formula: results, order, bits,
arguments, ledger."""

import numpy as np
import pytest
from collective_checker import ALL_PAIRS, PAIRS, Drawn, bits, examine
from helpers import THREADS, run
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import calls

from minidist.comm.collectives import ring
from minidist.comm.collectives.ring import STRETCH_BYTES
from minidist.comm.cost import volume
from minidist.comm.cost.volume import FORMULAS

CASES = [
    pytest.param(verb, algorithm, transport, id=f"{verb}-{algorithm}-{transport}")
    for verb, algorithm in PAIRS
    for transport in THREADS
]
IN_TURN = [CASES[2 * number + number % 2] for number in range(len(PAIRS))]
"""Each algorithm over one of the two transports: tests/comm/test_conformance.py has it over
both."""


@pytest.mark.parametrize(("verb", "algorithm", "transport"), IN_TURN)
@settings(max_examples=2)
@given(data=st.data())
def test_sample(verb, algorithm, transport, data):
    examine(data.draw(calls(verb, algorithm, transport)))


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("verb", "algorithm", "transport"), CASES)
@settings(max_examples=400, derandomize=False)
@given(data=st.data())
def test_full_count(verb, algorithm, transport, data):
    examine(data.draw(calls(verb, algorithm, transport)))


@pytest.mark.parametrize("transport", THREADS)
@settings(max_examples=3)
@given(data=st.data())
def test_same_bits_run_after_run(transport, data):
    case = data.draw(
        st.sampled_from([pair for pair in PAIRS if pair[0] == "all_reduce"]).flatmap(
            lambda pair: calls(*pair, transport)
        )
    )
    first = examine(case)
    second = examine(case)
    assert [bits(a) for a in first] == [bits(b) for b in second]


@pytest.mark.sampled
@pytest.mark.parametrize("transport", THREADS)
@pytest.mark.parametrize(
    "algorithm", [algorithm for verb, algorithm in PAIRS if verb == "all_reduce"]
)
def test_same_bits_by_every_algorithm(algorithm, transport):
    """The drawn cases above are too few to meet every algorithm: one case of each, whose sums
    depend on the order."""
    case = Drawn(
        "all_reduce",
        algorithm,
        4,
        [37] * 4,
        rough=True,
        transport=transport,
        nodes=[7, 3, 3, 7] if algorithm == "hierarchical" else (),
    )
    first = examine(case)
    second = examine(case)
    assert [bits(a) for a in first] == [bits(b) for b in second]


@pytest.mark.parametrize(
    "algorithm", [algorithm for verb, algorithm in PAIRS if verb == "all_reduce"]
)
def test_one_element_is_rounded_alike_on_every_rank(algorithm):
    """NumPy has a loop of its own for one element in place, where a complex product is rounded
    otherwise."""

    def job(world):
        draw = np.random.default_rng(world.rank)
        seen = []
        for dtype in (np.complex128, np.complex64) * 6:
            x = draw.standard_normal(2).view(np.complex128).astype(dtype)
            seen.append(bits(world.all_reduce(x, op="prod", out=x, algorithm=algorithm)))
        return seen

    ranks = run(job, size=5)
    assert all(rank == ranks[0] for rank in ranks)


@pytest.mark.sampled
@pytest.mark.parametrize("size", [3, 6])
def test_an_order_of_bytes_is_kept(size):
    """Lengths differ where they may: blocks that are joined on the way are not joined in the
    machine's order."""
    for verb, algorithm in PAIRS:
        lengths = [4, 0, 2, 3, 1, 4][:size]
        lengths = {"gather": lengths, "all_gather": lengths, "all_to_all": [lengths] * size}.get(
            verb, [5] * size
        )
        for dtype in (">u2", ">c8"):
            examine(Drawn(verb, algorithm, size, lengths, dtype))


def test_every_algorithm_has_its_formula():
    assert set(FORMULAS) == set(ALL_PAIRS)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("how", "dtype"),
    [
        ("new", "float64"),
        *(pytest.param(how, "int8", marks=pytest.mark.soak) for how in ("new", "in place")),
    ],
)
def test_a_long_array_goes_round_the_ring_in_stretches(how, dtype):
    length = STRETCH_BYTES // np.dtype(dtype).itemsize + 5
    examine(Drawn("all_reduce", "ring", 3, [length] * 3, dtype, op="max", how=how))


@pytest.mark.parametrize("algorithm", ["ring", "torus", "hierarchical"])
@settings(max_examples=3)
@given(data=st.data())
def test_stretches_cost_what_the_formulas_say(algorithm, data):
    """With stretches so short that most drawn arrays take several, in each ring that an algorithm
    is made of."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (ring, volume):
            patch.setattr(module, "STRETCH_BYTES", 64)
        examine(data.draw(calls("all_reduce", algorithm, "threads")))
