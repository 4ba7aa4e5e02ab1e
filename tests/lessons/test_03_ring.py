"""Exercise 03: filled rightly it passes, and each wrong filling fails under its name."""

from pathlib import Path

import pytest
from filling import graded

RIGHT = {
    1: "(link.rank - step - 1) % link.size",
    2: "(link.rank - step - 2) % link.size",
    3: "link.exchange(chunks[outgoing], dst=link.next_rank, src=link.prev_rank)",
    4: "link.size - 1",
    5: "(link.rank - step) % link.size",
    6: "(link.rank - step - 1) % link.size",
}
WHOLE = """np.array_split(link.exchange(np.concatenate(chunks), dst=link.next_rank, src=link.prev_rank),
                       link.size)[incoming]"""
SEND_FIRST = "(link.send(chunks[outgoing], dst=link.next_rank), link.recv(src=link.prev_rank))[1]"
WRONG = {
    "wrong chunk index": {1: "(link.rank + step) % link.size"},
    "not a ring": {3: "link.exchange(chunks[outgoing], dst=link.prev_rank, src=link.next_rank)",
                   1: "(link.rank + step + 1) % link.size",
                   2: "(link.rank + step + 2) % link.size"},
    "whole tensors": {3: WHOLE},
    "one step short": {4: "link.size - 2"},
    "deadlock: all ranks send first": {3: SEND_FIRST},
    "wrong number of steps": {4: "link.size"},
    "stale or doubled chunk": {5: "link.rank", 6: "link.prev_rank"},
}


def test_the_right_filling_passes(tmp_path: Path) -> None:
    result = graded("03", RIGHT, tmp_path)
    assert result.passed, result.results[-1].line()


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_filling_fails_under_its_name(mistake: str, tmp_path: Path) -> None:
    result = graded("03", {**RIGHT, **WRONG[mistake]}, tmp_path)
    assert not result.passed
    assert mistake in result.results[-1].line()


def test_the_unfilled_exercise_names_its_first_hole(tmp_path: Path) -> None:
    result = graded("03", {}, tmp_path)
    assert not result.passed
    assert "fill hole 1" in result.results[-1].line() and "exercise_03.py line" in result.results[-1].line()
