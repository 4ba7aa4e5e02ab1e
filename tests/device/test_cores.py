"""Cores are dealt over ranks, and a process started in the block has them."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.device import cores


@given(st.lists(st.integers(0, 500), min_size=1, unique=True), st.integers(1, 40))
def test_each_rank_has_its_own_or_all_share_them(chosen: list[int], ranks: int) -> None:
    dealt = cores.deal(chosen, ranks)
    assert len(dealt) == ranks
    if ranks <= len(chosen):
        assert sum(dealt, []) == chosen
        assert {len(own) for own in dealt} <= {len(chosen) // ranks, -(-len(chosen) // ranks)}
    else:
        assert dealt == [chosen] * ranks


@pytest.mark.parametrize(
    ("text", "numbers"), [("", []), ("3", [3]), ("0-2,5", [5, 0, 1, 2]), ("0,2", [0, 2])]
)
def test_in_words(text: str, numbers: list[int]) -> None:
    assert cores.in_words(numbers) == text


def test_a_started_process_has_them_and_this_thread_has_its_own_again() -> None:
    before = cores.usable()
    assert before is not None
    with cores.starting_on(before[-1:]):
        done = subprocess.run(
            [sys.executable, "-S", "-c", "import os; print(os.sched_getaffinity(0))"],
            capture_output=True,
            text=True,
            check=True,
        )
    assert done.stdout.strip() == str({before[-1]}) and cores.usable() == before
    with cores.starting_on([]):
        assert cores.usable() == before


def test_the_cores_of_all_ranks_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cores.VARIABLE, raising=False)
    assert cores.of_all_ranks() == len(os.sched_getaffinity(0))
    monkeypatch.setenv(cores.VARIABLE, "64")
    assert cores.of_all_ranks() == 64
