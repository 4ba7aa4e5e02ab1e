"""The numbers of the live figure `schedules`, computed another way."""

from live_figures import figure

from minidist.grading import load_module
from minidist.lessons import FOLDER
from minidist.site.live.schedules import RANKS, SCHEDULES, clock


def test_the_schedules_have_the_bubbles_of_the_lesson() -> None:
    lab = load_module(FOLDER / "11_pipeline" / "experiments.py", "11")
    live = figure("schedules", "en")
    for which, (_, name, chunks) in enumerate(SCHEDULES):
        if chunks in (None, lab.CHUNKS):
            _, ideal = lab.ideal_bubble(name, 4, 8)
            facts = live.picture(which, RANKS.index(4), 2, 0).facts
            assert f"the bubble is {ideal:.1%}" in facts[0], name
    # the lesson's table of slow messages, and what a rank holds by the formula of schedules.py
    assert [clock(which, 4, 8, 0.5).length for which in (0, 1, 3)] == [36, 41, 45]
    held = [min(2 * (3 - rank) + 3 * 4 + 1, 4 * 8) / 4 for rank in range(4)]
    picture = live.picture(3, RANKS.index(4), 2, 0)
    assert ", ".join(f"{count:g}" for count in held) in picture.facts[1]
    boxes = [shape for shape in picture.shapes if shape[0] == "r" and shape[5] in ("c0", "c7")]
    assert len(boxes) == 4 * 4 * 8 + 2  # a forward a stage and microbatch, and the legend
