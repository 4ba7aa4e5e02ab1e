"""Exercise 03: filled rightly it passes, and each wrong filling fails under its name."""

from pathlib import Path

import pytest
from filling import assert_named, graded, right

RIGHT = right("03")
WHOLE = """np.array_split(group.exchange(np.concatenate(chunks), dst=next_rank, src=prev_rank),
                       group.size)[incoming]"""
SEND_FIRST = "(group.send(chunks[outgoing], dst=next_rank), group.recv(src=prev_rank))[1]"
WRONG = {
    "wrong chunk index": {1: "(group.rank + step) % group.size"},
    "not a ring": {
        3: "group.exchange(chunks[outgoing], dst=prev_rank, src=next_rank)",
        1: "(group.rank + step + 1) % group.size",
        2: "(group.rank + step + 2) % group.size",
    },
    "whole tensors": {3: WHOLE},
    "one step short": {4: "group.size - 2"},
    "deadlock: all ranks send first": {3: SEND_FIRST},
    "deadlock: all ranks receive first": {
        3: "(group.recv(src=prev_rank), group.send(chunks[outgoing], dst=next_rank))[0]"
    },
    "deadlock: a rank waits for a message that no rank sends": {
        3: "group.exchange(chunks[outgoing], dst=next_rank, src=next_rank)"
    },
    "ranks make different numbers of steps": {4: "group.rank"},
    "wrong number of steps": {4: "group.size"},
    "stale or doubled chunk: a finished chunk": {6: "(group.rank - step - 2) % group.size"},
    "stale or doubled chunk": {5: "group.rank", 6: "prev_rank"},
}


def test_the_right_filling_passes(tmp_path: Path) -> None:
    result = graded("03", RIGHT, tmp_path)
    assert result.passed, result.results[-1].line()


@pytest.mark.sampled
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_filling_fails_under_its_name(mistake: str, tmp_path: Path) -> None:
    assert_named("03", mistake, WRONG[mistake], tmp_path)


def test_the_unfilled_exercise_names_its_first_hole(tmp_path: Path) -> None:
    result = graded("03", {}, tmp_path)
    assert not result.passed
    assert (
        "fill hole 1" in result.results[-1].line()
        and "exercise_03.py line" in result.results[-1].line()
    )
