"""The numbers of the live figure `sawtooth`, computed another way."""

from minidist import lessons
from minidist.grading import load_module
from minidist.site.live.sawtooth import CONFIG, SIZES, step_of, turning_points


def test_the_sawtooth_has_the_peaks_of_the_lessons_formula() -> None:
    """The inputs of all segments but one, and a whole segment, to an input; forwards counted."""
    lab = load_module(lessons.find("19").part("experiments.py"), "19")
    each = lab.inside(CONFIG, 1)
    layers = 48

    def formula(size: int) -> int:
        return (layers // size - 1) * each["all"] + size * each["none"]

    assert step_of(layers, 3).peak - step_of(layers, 6).peak == formula(3) - formula(6)
    for size in (1, 2, 3, 6):
        less = step_of(layers, 6).peak - step_of(layers, size).peak
        assert abs(less - (formula(6) - formula(size))) <= each["all"]
    assert min(SIZES, key=lambda size: step_of(layers, size).peak) == 2
    assert [step_of(layers, size).runs for size in SIZES] == [48, *[96] * 5]


def test_the_sawtooth_keeps_every_peak_of_the_curve() -> None:
    assert turning_points([1, 3, 5, 5, 2, 2, 4, 4]) == [(0, 1), (3, 5), (5, 2), (7, 4)]
    step = step_of(6, 1)
    assert max(height for _, height in turning_points(step.moments)) == max(step.moments)
    teeth = [at for at, _ in turning_points(step.moments[: step.turn])]
    assert len(teeth) >= 2 * 6  # up and down in each block
