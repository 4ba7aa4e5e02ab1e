"""MPI's own collectives: results and costs are tests/comm/test_conformance.py's; here is what is special of them."""

import native_calls
import numpy as np
import pytest
from helpers import run

from minidist.errors import ConfigError, MismatchError


def test_groups_keep_apart():
    results = run(native_calls.in_many_groups, size=4, transport="mpi")
    assert results == [[[3], [3, 2, 1, 0], [3.0 if rank < 2 else 7.0] * 8] for rank in range(4)]


def test_what_mpi_does_not_know_is_refused():
    for texts in run(native_calls.refused, size=2, transport="mpi"):
        assert [text.split(";")[0].removeprefix("MPI has no ") for text in texts] == [
            "sum of float16", "sum of >f4", "max of complex64", "sum of bool"]


@pytest.mark.parametrize("kind", ["op", pytest.param("root", marks=pytest.mark.soak),
                                  pytest.param("algorithm", marks=pytest.mark.soak)])
def test_who_disagrees_is_named(kind):
    with pytest.raises(MismatchError, match=f"ranks disagree in {kind}"):
        run(native_calls.disagree, kind, size=4, transport="mpi")


def test_a_wait_keeps_the_limit_and_yields_its_core():
    run(native_calls.left_waiting, size=2, transport="mpi")


@pytest.mark.parametrize("transport", ["threads", "sockets"])
def test_other_transports_have_none(transport):
    def ranks(world):
        with pytest.raises(ConfigError, match=f"transport {transport} has no collectives of its own; .*ranks of mpi"):
            world.all_reduce(np.ones(2), algorithm="native")
        return world.all_reduce(np.ones(2)).tolist()

    assert run(ranks, size=2, transport=transport) == [[2.0, 2.0]] * 2


def test_alone_there_is_nothing_to_send():
    def ranks(world):
        x = np.arange(3.0)
        own = {"broadcast": x, "reduce": x, "all_reduce": x, "gather": x, "all_gather": x, "scatter": x,
               "reduce_scatter": x, "all_to_all": [x]}
        results = [getattr(world, verb)(argument, algorithm="native") for verb, argument in own.items()]
        world.barrier(algorithm="native")
        assert not any(row["messages"] for row in world.ledger.rows())
        return [np.asarray(result).reshape(-1).tolist() for result in results]

    assert run(ranks, size=1)[0] == [[0.0, 1.0, 2.0]] * 8
