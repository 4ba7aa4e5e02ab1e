"""Exercise 26: filled rightly it passes, each wrong filling fails under its name; the clock agrees
with a formula."""

from pathlib import Path

import pytest
from filling import assert_named, graded, right

from minidist import lessons
from minidist.comm.chunks import bounds
from minidist.grading import load_module
from minidist.survive.interval import best_interval, goodput

RIGHT = right("26")
WRONG = {
    "numbers are lost": {1: "chunk[:-1].tofile(file)"},
    "the right numbers in another order": {1: "chunk[::-1].tofile(file)"},
    "your code has written no such file": {1: 'chunk.tofile(folder / "all.bin")'},
    "other bytes than float64": {1: "chunk.astype(np.float32).tofile(file)"},
    "only one rank's digest": {2: "digest[None]"},
    "not every shard's digest": {2: "group.all_gather(digest[None])[:2]"},
    "makes each byte of a digest an entry": {2: "digest"},
    "one rank's digest for every shard": {2: "[digest] * group.size"},
    "your digests are in another order": {2: "group.all_gather(digest[None])[::-1]"},
    "a torn manifest can be seen": {
        3: '(folder / "draft").rename(folder / "draft2")\n'
        '(folder / "manifest.json").write_text((folder / "draft2").read_text())'
    },
    "no manifest": {3: "None"},
    "your overlap ends at the chunk's stop": {4: "(max(start, old[rank]), stop)"},
    "your overlap begins at the chunk's start": {4: "(start, min(stop, old[rank + 1]))"},
    "takes whole shards, instead of": {4: "(min(start, old[rank]), max(stop, old[rank + 1]))"},
    "takes whole shards, instead of what": {4: "(old[rank], old[rank + 1])"},
    "takes one number too few of each shard": {
        4: "(max(start, old[rank]), min(stop, old[rank + 1]) - 1)"
    },
    "other ranks' numbers": {5: "np.fromfile(file)"},
    "takes the position in the vector": {5: "np.fromfile(file)[first:last]"},
    "counts from the chunk's start": {5: "np.fromfile(file)[first - start : last - start]"},
    "takes the first numbers": {5: "np.fromfile(file)[: last - first]"},
    "takes one number too many of a shard": {
        5: "np.fromfile(file)[first - old[rank] : last - old[rank] + 1]"
    },
    "your overlap ends at the later stop": {4: "(max(start, old[rank]), max(stop, old[rank + 1]))"},
    "your overlap begins at the earlier start": {
        4: "(min(start, old[rank]), min(stop, old[rank + 1]))"
    },
    "and do not end where it ends": {5: "np.fromfile(file)[first - old[rank] :]"},
    "not end where it ends": {5: "np.fromfile(file)[first - old[rank] : last]"},
    "one number too late": {4: "(max(start, old[rank]), min(stop, old[rank + 1]) + 1)"},
    "all numbers of the shard up to the overlap's end": {
        5: "np.fromfile(file)[: last - old[rank]]"
    },
    "your 2 stands before the root": {6: "2 * (save * between) ** 0.5"},
    "your interruption loses a whole interval": {6: "(save * between) ** 0.5"},
    "your factor 2 is on the wrong side": {6: "(save * between / 2) ** 0.5"},
    "the square of τ, not yet": {6: "2 * save * between"},
    "the part of the time that is lost": {6: "(2 * save / between) ** 0.5"},
    "not the best interval": {6: "save"},
}


def test_the_right_filling_passes(tmp_path: Path) -> None:
    result = graded("26", RIGHT, tmp_path)
    assert result.passed, result.results[-1].line()


@pytest.mark.sampled
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_filling_fails_under_its_name(mistake: str, tmp_path: Path) -> None:
    assert_named("26", mistake, WRONG[mistake], tmp_path)


def test_the_unfilled_exercise_names_its_first_hole(tmp_path: Path) -> None:
    result = graded("26", {}, tmp_path)
    assert not result.passed
    assert (
        "fill hole 1" in result.results[-1].line()
        and "exercise_26.py line" in result.results[-1].line()
    )


@pytest.mark.sampled
@pytest.mark.parametrize("factor", [0.3, 1.0, 4.0])
def test_the_clock_that_jumps_keeps_what_the_formula_says(factor: float) -> None:
    lab = load_module(lessons.find("26").part("experiments.py"), "26")
    interval = factor * best_interval(10.0, 3600.0)
    seconds = 3e6
    spans = lab.replay(
        interval, lab.interruptions(3600.0, seconds, 3), save=10.0, restart=30.0, seconds=seconds
    )
    assert lab.kept(spans) == pytest.approx(
        goodput(interval, save=10.0, between=3600.0, restart=30.0), rel=0.03
    )
    assert all(
        one.stop == pytest.approx(other.start) for one, other in zip(spans, spans[1:], strict=False)
    )


def test_what_other_intervals_cost() -> None:
    """The story's numbers of section 5: by the formula, and of the figure's lanes."""
    story = " ".join(lessons.find("26").part("README.md").read_text(encoding="utf-8").split())
    figure = load_module(lessons.find("26").part("figure.py"), "26")
    best = best_interval(figure.SAVE, figure.BETWEEN)

    def cost(factor: float) -> float:
        return 100 * (1 - goodput(best * factor, save=figure.SAVE, between=figure.BETWEEN))

    assert f"that is {best:.0f} s, and {cost(1):.0f} % of the time" in story
    assert f"as often costs {cost(1 / 8):.0f} %, eight times as seldom {cost(8):.0f} %" in story
    half, twice = (cost(factor) - cost(1) for factor in (1 / 2, 2))
    assert f"half of it costs {half:.1f} % more of the time, twice as long {twice:.1f} %" in story
    kept = goodput(best, save=figure.SAVE, between=figure.BETWEEN, restart=figure.RESTART)
    price = f"a save of {figure.SAVE:.0f} s and a restart of {figure.RESTART:.0f} s"
    assert f"{price} the rebate must be above {100 * (1 - kept):.0f} %" in story
    moments = figure.lab.interruptions(figure.BETWEEN, figure.DAYS * 86_400.0, seed=4)
    lost = [
        100
        * (
            1
            - figure.lab.kept(
                figure.lab.replay(
                    best * factor,
                    moments,
                    save=figure.SAVE,
                    restart=figure.RESTART,
                    seconds=figure.HOURS * 3600.0,
                )
            )
        )
        for factor in (1 / 8, 1, 8)
    ]
    assert f"{lost[0]:.0f} %, {lost[1]:.0f} % and {lost[2]:.0f} % of the time are not kept" in story


def test_how_many_shards_a_rank_of_six_reads_of_eight() -> None:
    """The quiz's answer: two; three in some sizes that 24 does not divide."""

    def shards(numbers: int) -> set[int]:
        old = bounds(numbers, 8)
        new = bounds(numbers, 6)
        return {
            sum(
                max(new[rank], old[shard]) < min(new[rank + 1], old[shard + 1])
                for shard in range(8)
            )
            for rank in range(6)
        }

    assert all(shards(numbers) == {2} for numbers in range(24, 2400, 24))
    assert set().union(*(shards(numbers) for numbers in range(24, 2400))) == {2, 3}
