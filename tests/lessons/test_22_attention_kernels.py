"""Exercise 22: filled rightly it passes, each wrong filling fails under its name; what the story
states is counted."""

import re
from pathlib import Path

import numpy as np
import pytest
from filling import assert_named, graded, right
from kernel_checks import needs_compiler

from minidist import launch, lessons
from minidist.data import digits
from minidist.grading import load_module
from minidist.kernels import on_cpu
from minidist.lessons.page import Page

FOLDER = lessons.FOLDER / "22_attention_kernels"
LAB = load_module(FOLDER / "experiments.py", "22")
SPARSE = load_module(FOLDER / "sparse.py", "22")
RIGHT = right("22")
WRONG = {
    "what was summed grows instead": {1: '"__expf(now - top)"'},
    "nothing is scaled down": {1: '"1.0f"'},
    "the total is not scaled down": {2: '"total + p"'},
    "the sum of values is not scaled down": {3: '"sum[i] + p * v[key * 8 + i]"'},
    "the factor is taken from this key's score": {1: '"__expf(score - now)"'},
    "the new term is scaled down too": {2: '"(total + p) * shrink"'},
    "the new value is scaled down too": {3: '"(sum[i] + p * v[key * 8 + i]) * shrink"'},
    "values are added without their weight p": {3: '"sum[i] * shrink + v[key * 8 + i]"'},
    "the sum of values forgets": {3: '"p * v[key * 8 + i]"'},
    "not from the new maximum": {1: '"__expf(top - score)"'},
    "the new term is scaled instead of the old sum": {2: '"total + p * shrink"'},
    "the old sum is divided by the factor": {2: '"total / shrink + p"'},
    "v is read at another place": {3: '"sum[i] * shrink + p * v[i * 8 + key]"'},
    "the value of the first key each time": {3: '"sum[i] * shrink + p * v[i]"'},
    "divided inside the loop": {3: '"(sum[i] * shrink + p * v[key * 8 + i]) / total"'},
    "each term divided inside the loop": {3: '"sum[i] * shrink + p * v[key * 8 + i] / total"'},
    "not one string of letters": {4: '["B", "D"]'},
    "another update": {2: '"total * shrink + 2 * p"'},
    "g++ cannot read it": {2: '"total * schrink + p"'},
    "it broke a rule as it ran": {3: '"sum[i] * shrink + p * v[(key + 1) * 8 + i]"'},
    "there is no such place": {4: '"BF"'},
    "numbers are read before others have written them": {4: '"D"'},
    "a tile is overwritten while others still read it": {4: '"B"'},
    "some threads never come to C": {4: '"BC"'},
    "one barrier too many": {4: '"ABD"'},
    "more sectors than lanes": {5: "4 * stride"},
    "a sector for each lane, but neighbours share": {5: "32"},
    "as if lanes read neighbours": {5: "4"},
    "that is bytes": {5: "128 * stride"},
    "all lanes read one number": {5: "min(32, 4 * stride)"},
    "not a row and a column": {6: '"step"'},
    "each number is brought by one thread": {6: '"step", "step"'},
    "an own sector each": {6: '"threadIdx.x", "step"'},
    "the lanes are no neighbours": {
        6: '"threadIdx.x % 16 + step / 16 * 16", "threadIdx.x / 16 + step % 16 * 2"'
    },
}
SOAK = {
    "the factor is taken from this key's score",
    "the new term is scaled down too",
    "the new value is scaled down too",
    "what was summed grows instead",
    "the sum of values forgets",
    "another update",
    "there is no such place",
    "values are added without their weight p",
    "as if lanes read neighbours",
    "that is bytes",
    "the lanes are no neighbours",
    "it broke a rule as it ran",
    "not a row and a column",
    "not from the new maximum",
    "v is read at another place",
    "each term divided inside the loop",
    "more sectors than lanes",
}


@pytest.fixture(scope="module")
def lab():
    return LAB


@needs_compiler
@pytest.mark.parametrize("places", ["BD", "AB"])
def test_the_right_filling_passes(places: str, tmp_path: Path) -> None:
    result = graded("22", {**RIGHT, 4: f'"{places}"'}, tmp_path)
    assert result.passed, result.results[-1].line()


@pytest.mark.sampled(every=32)
@needs_compiler
@pytest.mark.parametrize(
    "mistake",
    [pytest.param(name, marks=[pytest.mark.soak] if name in SOAK else []) for name in WRONG],
)
def test_a_wrong_filling_fails_under_its_name(mistake: str, tmp_path: Path) -> None:
    assert_named("22", mistake, WRONG[mistake], tmp_path)


@pytest.mark.sampled(every=2)
@needs_compiler
@pytest.mark.parametrize(
    ("hole", "filling", "line"),
    [
        (2, '"total * schrink + p"', "total = TOTAL;"),
        (4, '"D"', "sum += a_tile[y][i] * b_tile[i][x];"),
    ],
)
def test_an_error_names_the_line_of_the_exercise(
    hole: int, filling: str, line: str, tmp_path: Path
) -> None:
    result = graded("22", {**RIGHT, hole: filling}, tmp_path)
    lines = (tmp_path / "exercise_22.py").read_text(encoding="utf-8").splitlines()
    number = next(number for number, text in enumerate(lines, 1) if line in text)
    assert f"exercise_22.py:{number}" in result.results[-1].line()


@needs_compiler
def test_the_unfilled_exercise_names_its_first_hole(tmp_path: Path) -> None:
    result = graded("22", {}, tmp_path)
    assert (
        "fill hole 1" in result.results[-1].line()
        and "exercise_22.py line" in result.results[-1].line()
    )


def test_without_a_compiler_the_check_says_how_to_get_one(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(on_cpu, "compiler", lambda: None)
    result = graded("22", RIGHT, tmp_path)
    assert (
        "C++ compiler: none, target g++" in result.results[-1].line()
        and "apt install" in result.results[-1].line()
    )


@pytest.mark.soak
def test_without_a_compiler_the_lesson_says_so_in_a_line(monkeypatch, capsys) -> None:
    monkeypatch.setattr(on_cpu, "compiler", lambda: None)
    lesson = load_module(FOLDER / "lesson.py", "22")
    launch.run(lambda group: lesson.tour(group, Page(group)), size=2, transport="threads")
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "One query, four tiles" in shown and "apt install g++" in shown and "sectors" not in shown
    )


@needs_compiler
def test_the_ladders_page_states_what_is_counted(lab) -> None:
    stated = re.findall(
        r"^\| v(\d) [^|]+\|(.+)\|$",
        (FOLDER / "MATMUL.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert [int(version) for version, _ in stated] == list(lab.LADDER)
    for version, row in stated:
        count = lab.matmul_count(int(version))
        products = count.operations // 2
        size = 2 if version == "5" else 4
        counted = (
            f"{count.seen.loads.bytes / size / products:.4f}",
            f"{count.seen.loads.requests:,}",
            f"{count.seen.loads.shared / products:.3f}",
            f"{count.intensity:.2f}",
        )
        assert tuple(cell.strip() for cell in row.split("|")) == counted, version


@pytest.mark.sampled
@needs_compiler
@pytest.mark.parametrize("version", [1, 2, 3])
def test_attention_moves_what_the_story_says(lab, version: int) -> None:
    count = lab.attention_count(version, 64)
    assert (count.seen.loads.bytes, count.seen.stores.bytes) == (count.read, count.written)


@pytest.mark.sampled
@needs_compiler
@pytest.mark.parametrize("size", [1, 3, 5])
def test_heads_over_any_number_of_ranks(size: int, capsys) -> None:
    lesson = load_module(FOLDER / "lesson.py", "22")
    launch.run(
        lambda group: lesson.heads_over_ranks(group, Page(group)), size=size, transport="threads"
    )
    assert re.search(r" 98304 │ +98304 │ ok │ +\de-07 │", capsys.readouterr().out)


def test_numbers_of_the_story(lab) -> None:
    assert lab.attention_bytes(1, 64)[0] // lab.attention_bytes(2, 64)[0] == 51
    assert [round(lab.long_intensity(version), 1) for version in (1, 2, 3)] == [0.2, 16.0, 63.9]
    ridges = {rate: round(peak / lab.H100.memory) for rate, peak in lab.H100.rates.items()}
    assert ridges == {"float32": 20, "tensor cores": 295}
    assert round(lab.H100.shared / (0.09375 / 2) / lab.H100.rates["tensor cores"], 2) == 0.72


def test_intensities_of_a_large_k_are_by_the_formula(lab) -> None:
    """MATMUL.md, below its table: what is written no longer counts."""
    side = 128
    depth = 1024
    found = []
    for version in lab.LADDER:
        read = lab.read_bytes(version, side, side, depth, 2 if version == 5 else 4)
        found.append(f"{2 * side * side * depth / read:.4g}")
    assert f": {', '.join(found)}." in (FOLDER / "MATMUL.md").read_text(encoding="utf-8")


def test_what_a_pattern_saves_is_the_tables() -> None:
    story = (FOLDER / "SPARSE.md").read_text(encoding="utf-8")
    pairs = re.findall(r"([\d.]+) MiB \| ([\d.]+) MiB \| [\d,]+ ms", story)
    saved = [100 * (1 - float(pattern) / float(tiled)) for tiled, pattern in pairs]
    assert len(saved) == 4
    assert f"saves {min(saved):.0f} to {max(saved):.0f} % of its bytes" in " ".join(story.split())


def test_the_tiles_of_the_notes_table_are_counted(lab):
    """Each row of SPARSE.md's table of the 6 and 10 times (N3:52)."""
    rows = re.findall(
        r"^\| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d.]+) \|",
        (FOLDER / "SPARSE.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert len(rows) == 5
    for row in rows:
        tokens, causal, pattern = (int(cell.replace(",", "")) for cell in row[:3])
        assert (causal, pattern) == (lab.tiles(tokens), lab.tiles(tokens, lab.PATTERN))
        assert row[3] == f"{causal / pattern:.1f}"


@pytest.mark.soak
def test_a_pattern_takes_less_of_everything_and_is_attention(lab):
    """Bytes as measured: under the pattern 10 times the tokens take about the bytes of every score;
    no seconds."""
    nbytes = {
        key: lab.forward_and_backward(*key)[1]
        for key in (
            ("every score kept", lab.SHORT),
            ("tiled, dense", lab.SHORT),
            (lab.PATTERN, lab.SHORT),
            (lab.PATTERN, lab.TEN),
        )
    }
    assert nbytes[lab.PATTERN, lab.TEN] < 1.15 * nbytes["every score kept", lab.SHORT]
    assert nbytes[lab.PATTERN, lab.SHORT] < nbytes["tiled, dense", lab.SHORT]
    assert nbytes["tiled, dense", lab.SHORT] < nbytes["every score kept", lab.SHORT] / 5


def test_a_rotation_leaves_the_scores_and_spreads_an_outlier() -> None:
    q, k, _ = LAB.outliers(128)
    turned_q, turned_k = LAB.rotated(q, k)
    np.testing.assert_allclose(turned_q @ turned_k.T, q @ k.T, atol=1e-10)
    assert np.abs(turned_q).max() < 0.5 * np.abs(q).max()
    errors = [*LAB.byte_errors(1024).values()]
    assert errors == sorted(errors, reverse=True)


def test_each_way_of_sparse_attention_is_that_of_the_mask() -> None:
    """scipy's and minidist's, also where the first block and the window do not touch."""
    q, k, v = (array[0, 0].astype(np.float64) for array in LAB.drawn(640))
    scores = np.where(SPARSE.seen_of(640, LAB.PATTERN), q @ k.T / 8, -np.inf)
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    right = p @ v / p.sum(axis=1, keepdims=True)
    ways = SPARSE.contenders(*(array.astype(np.float32) for array in (q, k, v)))
    for name in ("minidist, pattern", "scipy.sparse, pattern"):
        np.testing.assert_allclose(ways[name](), right, atol=1e-5)


def test_a_picture_has_its_digits_in_their_places() -> None:
    data = digits.load().train
    (picture,) = SPARSE.pictures(data, "step 0", 1)
    chosen = np.random.default_rng([ord(letter) for letter in "step 0"]).integers(
        0, len(data), (1, SPARSE.ROWS, SPARSE.COLUMNS)
    )
    rows = picture.reshape(16, 32)
    np.testing.assert_array_equal(rows[8:, 16:24], data.pixels[chosen[0, 1, 2]])
    inputs, targets = SPARSE.batch_of(data, "step 0", 1)
    np.testing.assert_array_equal(inputs[0, 1:], targets[0, :-1])
