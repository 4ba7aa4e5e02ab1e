"""The numbers of the live figure `ring`, computed another way."""

from live_figures import figure


def test_the_ring_of_the_figure_sums() -> None:
    live = figure("ring", "en")
    ends = live.picture(2, 14, 0)  # four ranks, at the end
    cells = [shape[6] for shape in ends.shapes if shape[0] == "r" and len(shape) > 6]
    assert cells == ["10"] * 16
    lost = live.picture(2, 14, 1)
    assert any("wrong" in fact for fact in lost.facts)
    assert any(shape[0] == "r" and shape[5] == "wrong" for shape in lost.shapes)
