"""MPI's own collectives: results and costs are tests/comm/test_conformance.py's; here is what is
special of them."""

import re

import native_calls
import numpy as np
import pytest
from helpers import run

from minidist.comm.transports.progress.mailbox import Mailbox
from minidist.errors import CommError, ConfigError


@pytest.fixture(scope="module")
def peaceful():
    """Return what three ranks of one mpirun return of each job that leaves them as they were."""
    return run(native_calls.peaceful, size=3, transport="mpi")


def test_groups_keep_apart(peaceful):
    results = [groups for groups, _, _ in peaceful]
    assert results == [[[2], [2, 1, 0], [5.0 if rank < 2 else 4.0] * 8] for rank in range(3)]


def test_what_mpi_does_not_know_is_refused(peaceful):
    for _, texts, _ in peaceful:
        assert [text.split(";")[0].removeprefix("MPI has no ") for text in texts] == [
            "sum of float16",
            "sum of >f4",
            "max of complex64",
            "sum of bool",
        ]


def test_an_empty_chunk_is_no_alias(peaceful):
    for rank, (_, _, results) in enumerate(peaceful):
        assert results == [
            (3 * np.array_split(np.arange(length), 3)[rank]).tolist() for length in (0, 1, 3, 5)
        ]


class Uncalled:
    """A library of collectives that nobody may reach while ranks disagree."""

    def __getattr__(self, name):
        raise AssertionError(f"the library's {name} was called")


def check_disagreement(kind, odd, folder, **job):
    """Every rank raises MismatchError with two calls and where they are; or DeadlockError, if one
    does not call."""
    with pytest.raises(CommError):
        run(native_calls.disagree, kind, odd, str(folder), **job)
    call = rf"rank \d calls .*, at {native_calls.HERE}.*\n"
    for rank in range(job["size"]):
        said = (folder / str(rank)).read_text()
        if kind == "not calling":
            assert re.match(
                "returned" if rank == odd else rf"DeadlockError: .*, rank {odd} has ended", said
            ), said
        else:
            assert re.match(
                rf"MismatchError: ranks disagree in .*{kind if kind != 'order' else 'verb'}.*:\n  {call}  "
                + call,
                said,
            ), said


@pytest.mark.parametrize(("size", "odd"), [(2, 1), (5, 3)])
@pytest.mark.parametrize("kind", native_calls.WAYS)
def test_every_rank_learns_who_disagrees_before_the_library_is_called(
    kind, size, odd, tmp_path, monkeypatch
):
    monkeypatch.setattr(Mailbox, "check_native", lambda self, op, dtype: None)
    monkeypatch.setattr(Mailbox, "native", lambda self, group, world_ranks: Uncalled())
    check_disagreement(kind, odd, tmp_path, size=size)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind == "op" else pytest.mark.soak)
        for kind in native_calls.WAYS
    ],
)
def test_the_same_over_mpi(kind, tmp_path):
    check_disagreement(kind, 2, tmp_path, size=3, transport="mpi")


@pytest.mark.soak
def test_a_wait_keeps_the_limit_and_yields_its_core():
    run(native_calls.left_waiting, size=2, transport="mpi")


@pytest.mark.parametrize("transport", ["threads", "tcp"])
def test_other_transports_have_none(transport):
    def ranks(world):
        with pytest.raises(
            ConfigError,
            match=f"transport {transport} has no collectives of its own; .*ranks of mpi",
        ):
            world.all_reduce(np.ones(2), algorithm="native")
        return world.all_reduce(np.ones(2)).tolist()

    assert run(ranks, size=2, transport=transport) == [[2.0, 2.0]] * 2


def test_alone_there_is_nothing_to_send():
    def ranks(world):
        x = np.arange(3.0)
        own = {
            "broadcast": x,
            "reduce": x,
            "all_reduce": x,
            "gather": x,
            "all_gather": x,
            "scatter": x,
            "reduce_scatter": x,
            "all_to_all": [x],
        }
        results = [
            getattr(world, verb)(argument, algorithm="native") for verb, argument in own.items()
        ]
        world.barrier(algorithm="native")
        assert not any(row["messages"] for row in world.ledger.rows())
        return [np.asarray(result).reshape(-1).tolist() for result in results]

    assert run(ranks, size=1)[0] == [[0.0, 1.0, 2.0]] * 8
