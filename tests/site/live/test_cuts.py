"""The numbers of the live figure `cuts`, computed another way."""

from typing import Any

import pytest
from live_figures import figure

from minidist.console import size_text
from minidist.site.live import cuts


@pytest.mark.parametrize(
    ("place", "held"),
    [
        # columns of q, k, v with biases, rows of out; a quarter of the MLP; whole biases and norms
        ((3, 1, 0), [n * 8 * (3 * 49 + 48) + 48 * (49 + 48) + 6 * 48 for n in (2, 2, 1, 1)]),
        ((3, 2, 2), [12 * (2 * 49 + 48) + 48 * (49 + 48) + 6 * 48] * 4),
    ],
)
def test_cuts_hold_and_send_what_real_steps_do(place: tuple[int, ...], held: list[int]) -> None:
    ranks, heads, key_heads = (int(word) for word in cut_picture(place).command.split()[-3:])
    numbers, sent = cuts.measured(ranks, heads, key_heads)
    assert numbers == held == cuts.cut_block(ranks, heads, key_heads).weights
    assert sum(cuts.bytes_of_layer(ranks, heads, key_heads)) == sent
    told = " ".join(cut_picture(place).facts)
    assert f"at most {max(held):,}" in told
    assert all(size_text(n) in told for n in cuts.bytes_of_layer(ranks, heads, key_heads) if n)


def cut_picture(place: tuple[int, ...]) -> Any:
    return figure("cuts", "en").picture(*place)


def test_one_key_head_lies_whole_on_each_rank() -> None:
    """The prediction's answer, of numbers that the cut names: 12 columns of queries, 12 shared."""
    columns = cuts.cut_block(4, 8, 1).parts["attention.qkv.weight"]
    shared = [*range(48, 60)]
    assert [own.tolist() for own in columns] == [
        [*range(12 * rank, 12 * rank + 12), *shared] for rank in range(4)
    ]
    live = figure("cuts", "en")
    assert live.predict.choices[live.predict.right] == str(len(columns[0])) == "24"
    frames = [shape for shape in cut_picture((3, 2, 2)).shapes if shape[5:6] == ["edge"]]
    assert len(frames) == 2
    assert any("5 ranks" in fact or "tp=5" in fact for fact in cut_picture((4, 0, 0)).facts)
