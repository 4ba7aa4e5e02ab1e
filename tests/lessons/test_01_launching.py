"""Exercise 01: filled rightly it passes, and each wrong filling fails under its name."""

from pathlib import Path

import pytest
from filling import assert_named, graded, right

RIGHT = right("01")
WRONG = {
    "local rank for rank": {1: 'int(environ["LOCAL_RANK"])'},
    "text for a number": {1: 'environ["RANK"]'},
    "NODE_RANK under torchrun": {2: 'int(environ.get("NODE_RANK", 0))'},
    "the place on the machine for the machine": {3: 'int(environ["OMPI_COMM_WORLD_NODE_RANK"])'},
    "that is the place *on* the machine": {3: "rank % local_size"},
    "the machine for the rank": {1: 'int(environ["GROUP_RANK"])'},
    "one too many": {1: 'int(environ["RANK"]) + 1'},
    "every machine is the first": {3: "0"},
    "mpirun (Open MPI) sets": {3: "rank / local_size"},
    "the size of another job": {4: "8"},
    "local size for size": {4: "local_size"},
    "wrong local rank": {5: 'int(environ["SLURM_PROCID"])'},
    "the same samples on every rank": {6: "range(0, length, 2)"},
    "samples lost or doubled": {6: "range(identity.local_rank, length, identity.size)"},
    "the list was sorted": {7: 'int(sorted(visible.split(","))[identity.local_rank])'},
    "device 0 .. 3 although others are visible": {7: "identity.local_rank"},
    "past the end of the list": {7: 'int(visible.split(",")[identity.local_rank])'},
    "place 1 of a list of 1": {7: 'int(visible.split(",")[identity.local_rank])'},
    "the rank in the whole job": {7: 'int(visible.split(",")[identity.rank])'},
    "wrong device": {7: "int(visible[0])"},
    "count in it with the rank on this machine": {
        7: 'int(visible.split(",")[identity.rank % len(visible.split(","))])'
    },
    "stays at the end of the list": {
        7: 'int(visible.split(",")[min(identity.local_rank, len(visible.split(",")) - 1)])'
    },
    "an entry of the list is a text": {
        7: 'visible.split(",")[identity.local_rank % len(visible.split(","))]'
    },
}


def test_the_right_filling_passes(tmp_path: Path) -> None:
    result = graded("01", RIGHT, tmp_path)
    assert result.passed, result.results[-1].line()


@pytest.mark.sampled
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_filling_fails_under_its_name(mistake: str, tmp_path: Path) -> None:
    assert_named("01", mistake, WRONG[mistake], tmp_path)


def test_the_unfilled_exercise_names_its_first_hole(tmp_path: Path) -> None:
    result = graded("01", {}, tmp_path)
    assert not result.passed
    assert (
        "fill hole 1" in result.results[-1].line()
        and "exercise_01.py line" in result.results[-1].line()
    )
