"""One suite for every transport: what tests/support/conformance.py demands, on each of TRANSPORTS.

A new transport is held to everything here by one more line in TRANSPORTS.
"""

import conformance
import pytest
from collective_checker import ALL_PAIRS, Drawn, cost_case
from helpers import MIXED, SOON, THREADS, run

from minidist.comm.cost.volume import FORMULAS

TRANSPORTS = [
    "threads",
    "threads-unbuffered",
    "tcp",
    MIXED,
    "shm",
    "mpi",
]
BLOCKING = ["plain-tcp"]
"""Transports whose sends block: held to conformance.BLOCKING, to every verb, and to the ends of a
job.

tests/comm/test_never_hangs.py, test_kills.py and test_expendable.py demand more of the others.
"""

on_every_transport = pytest.mark.parametrize("transport", [*TRANSPORTS, *BLOCKING])


@pytest.mark.sampled
@pytest.mark.parametrize("check", conformance.PEACEFUL, ids=lambda check: check.__name__)
@pytest.mark.parametrize("transport", [name for name in TRANSPORTS if name in THREADS])
def test_one_demand(check, transport):
    run(check, size=3, transport=transport)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    "transport",
    [
        *(name for name in TRANSPORTS if name not in (MIXED, "mpi")),
        *(
            # every verb over them is below
            pytest.param(name, marks=pytest.mark.soak)
            for name in ("mpi", *BLOCKING)
        ),
    ],
)
def test_all_demands_on_two_ranks(transport):
    run(conformance.all_peaceful, size=2, transport=transport)


@pytest.mark.parametrize(
    "transport",
    [
        *(
            pytest.param(name, marks=pytest.mark.soak if name == "tcp" else ())
            # MIXED has links of tcp, too
            for name in TRANSPORTS
        ),
        *BLOCKING,
    ],
)
@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.soak)])
def test_every_verb_by_every_algorithm(transport, size):
    """Also, in the same job, all demands on four ranks, and on three the bits that three threads
    have.

    Over mpi, MPI itself gives the same.
    """
    cases = list(conformance.fixed_cases(size, transport))
    ranks = run(conformance.calls_in_one_job, cases, size=size, transport=transport)
    counted, bits, compared = zip(*ranks, strict=True)
    assert list(bits) == (run(conformance.bits, size=3) if size == 3 else [[]] * 4)
    assert all(rank == bits[0] for rank in bits)
    pairs = [pair for pair in ALL_PAIRS if pair[1] != "shared" and pair[0] != "barrier"]
    assert (
        list(compared)
        == [len(pairs) * size * (2 if size == 3 else 4) if transport == "mpi" else 0] * size
    )
    for number, fields in enumerate(cases):
        case = Drawn(**fields)
        formula = FORMULAS[fields["verb"], fields["algorithm"]]
        messages = sum(rank[number][0] for rank in counted)
        nbytes = sum(rank[number][1] for rank in counted)
        assert (messages, nbytes) == (
            formula.messages_of(cost_case(case)),
            formula.bytes_of(cost_case(case)),
        ), case


@pytest.mark.sampled(every=4)
@on_every_transport
def test_abort_ends_every_wait(transport):
    assert all(run(conformance.aborted, size=2, transport=transport))


@pytest.mark.sampled(every=4)
@on_every_transport
def test_one_failing_rank_ends_all_with_its_name(transport, tmp_path):
    with pytest.raises(LookupError, match="rank 2.*boom on purpose"):
        run(conformance.one_rank_fails, str(tmp_path), 2, size=4, transport=transport)
    for survivor in (0, 1, 3):
        world_rank, seconds, message = (tmp_path / str(survivor)).read_text().split("|", 2)
        assert world_rank == "2"
        assert float(seconds) < SOON
        assert "LookupError" in message
        assert "boom on purpose" in message
        assert "conformance.py" in message  # the line that raised
