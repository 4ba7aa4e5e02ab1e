"""Exercise 13: filled rightly it passes, and each wrong filling fails under its name; the lesson's
own ring is right."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filling import assert_named, graded, right

import minidist as md
from minidist import lessons
from minidist.errors import MemoryLimitError
from minidist.grading import load_module

RIGHT = right("13")
WRONG = {
    "numbers begin at 0": {1: "2 * ranks - rank"},
    "a sequence cut in `ranks`": {1: "rank + 1"},
    "the last rank would still have most to do": {1: "ranks + rank"},
    "queries must see their own block too": {2: "query_block > key_block"},
    "queries of block 0 see keys of block 1, target queries of block 0 do not see": {
        2: "query_block <= key_block"
    },
    "one block too few": {1: "2 * ranks - 2 - rank"},
    "only the own block": {2: "query_block == key_block"},
    "without a mask": {2: "True"},
    "only that of the new piece": {3: "scores.max(axis=1, keepdims=True)"},
    "or -inf less -inf": {3: "top"},
    "24 tokens, large scores: off by nan": {3: "np.maximum(top, scores.max())"},
    "the new maximum is not taken off": {4: "np.exp(top)"},
    "is left as it was": {4: "1.0"},
    "attention, 1 rank, 24 tokens: off by nan": {4: "np.exp(now - top)"},
    "large scores: off by nan": {4: "np.exp(top) / np.exp(now)"},
    "your code raised": {5: "total * shrink + p.sum(axis=1)"},
    "the keys before are forgotten in the sum": {5: "p.sum(axis=1, keepdims=True)"},
    "infinite: a query's sum is 0": {5: "total * shrink"},
    "one sum for all queries": {5: "total * shrink + p.sum()"},
    "the largest of this piece": {5: "total * shrink + p.max(axis=1, keepdims=True)"},
    "keys are weighted": {6: "y * shrink + p @ k"},
    "only what is older is scaled": {6: "(y + p @ v) * shrink"},
    "24 tokens: off by inf": {5: "(total + p.sum(axis=1, keepdims=True)) * shrink"},
    "hole 6: attention, 1 rank": {6: "(y * shrink + p @ v) / total"},
    "the keys before are forgotten in the weighted sum": {6: "p @ v"},
    "the offset is forgotten": {7: "np.arange(len(tokens_of(length, rank, ranks)))"},
    "as if a rank's tokens were consecutive": {7: "np.array_split(np.arange(length), ranks)[rank]"},
    "it has only its own tokens": {7: "np.arange(length)"},
    "another rank's positions": {7: "tokens_of(length, ranks - 1 - rank, ranks)"},
    "in another order than": {7: "tokens_of(length, rank, ranks)[::-1]"},
    "positions begin at 0": {7: "tokens_of(length, rank, ranks) + 1"},
    "do not lie side by side": {
        7: "tokens_of(length, rank, ranks)[0] + np.arange(len(tokens_of(length, rank, ranks)))"
    },
    "numbers of blocks, not positions": {7: "blocks_of(rank, ranks)"},
    "that is of all ranks, not of one": {8: "2 * ranks * (ranks - 1)"},
    "each is sent once less": {9: "4 * ranks - 1"},
    "their gradients are two": {9: "3 * ranks - 2"},
    "that is forward and backward": {8: "4 * (ranks - 1)"},
    "one send less": {8: "2 * ranks"},
    "keys and values are two": {8: "ranks - 1"},
    "no rank kept them": {9: "2 * ranks"},
    "the gradients are sent once more": {9: "4 * (ranks - 1)"},
}


def test_the_right_filling_passes(tmp_path: Path) -> None:
    result = graded("13", RIGHT, tmp_path)
    assert result.passed, result.results[-1].line()


@pytest.mark.sampled(every=13)
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_filling_fails_under_its_name(mistake: str, tmp_path: Path) -> None:
    assert_named("13", mistake, WRONG[mistake], tmp_path)


def test_the_unfilled_exercise_names_its_first_hole(tmp_path: Path) -> None:
    result = graded("13", {}, tmp_path)
    assert (
        "fill hole 1" in result.results[-1].line()
        and "exercise_13.py line" in result.results[-1].line()
    )


@pytest.fixture(scope="module")
def lab() -> Any:
    return load_module(lessons.find("13").part("experiments.py"), "13")


def test_the_walked_ring_computes_each_pair_of_blocks_once(lab: Any) -> None:
    """Compute what the figure draws: the triangle of 2P blocks, and P - 1 messages per rank, each
    to the next."""
    walked = md.run(lambda group: lab.walk(group, 13), size=3)[0]
    pairs = [(queries, keys) for *_, queries, keys in walked["pairs"]]
    assert sorted(pairs) == [(queries, keys) for queries in range(6) for keys in range(queries + 1)]
    assert len(walked["messages"]) == 6
    assert all(dst == (src + 1) % 3 for src, dst, *_ in walked["messages"])


def test_broken_rings_are_off_and_the_right_one_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    lesson = load_module(lessons.find("13").part("lesson.py"), "13")
    for experiment in lesson.BREAKS.values():
        experiment()
    off = [
        float(line.split("off one process by ")[1].split()[0])
        for line in capsys.readouterr().out.splitlines()
        if "off one process by" in line
    ]
    assert [value < 1e-10 for value in off] == [True, False, True, False]
    assert min(off[1], off[3]) > 1e-3


def test_the_bytes_of_the_window_table_are_the_formulas(lab: Any) -> None:
    """Each row of the story's table; section 4.2 of the lesson holds the formula against the
    ledger."""
    rows = re.findall(
        r"^\| ([\d,]+) \| (dense ring|`local:\S+`) \| ([\d,]+) \| ([\d,]+) \|$",
        lessons.find("13").part("README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert len(rows) == 6
    for tokens, name, sent, formula in rows:
        pattern = None if name == "dense ring" else name.strip("`")
        config = replace(
            lab.config_for(4, int(tokens.replace(",", ""))),
            width=16,
            heads=2,
            attention_pattern=pattern,
        )
        group = SimpleNamespace(size=4)
        target = 8 * lab.formula(group, config, "ring" if pattern is None else "pieces", 0)
        assert (sent, formula) == (f"{target:,}", f"{target:,}")


MILLION = load_module(lessons.find("13").folder / "million.py", "13")


def test_the_longest_sequence_follows_from_two_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line through two peaks gives a third, to the byte, and the limit that refuses it."""
    monkeypatch.setattr(MILLION, "TRANSPORT", "threads")
    monkeypatch.setattr(MILLION, "SHORT", (MILLION.STRIDE, 2 * MILLION.STRIDE))
    way = "cp=4, recompute, offload"
    base, slope = MILLION.line(way)
    peak = base + slope * 3 * MILLION.STRIDE
    found = MILLION.fullest(3 * MILLION.STRIDE, way, int(peak))
    assert found["peak"] == peak
    assert found["host"] == 8 * 16 * 4 * 3 * MILLION.STRIDE // 4  # inputs of the blocks
    with pytest.raises(MemoryLimitError):
        MILLION.fullest(3 * MILLION.STRIDE, way, int(peak) - 1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_million_tokens_need_what_the_line_says() -> None:
    way = "cp=4, recompute, offload"
    base, slope = MILLION.line(way)
    assert MILLION.fullest(MILLION.MILLION, way)["peak"] == base + slope * MILLION.MILLION
