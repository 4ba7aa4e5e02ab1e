"""Pictures with Chinese words: the same figure, its words by the phrases of its lesson."""

import re
from pathlib import Path

import pytest
from matplotlib.ticker import AutoLocator

from minidist import lessons
from minidist.lessons import figures
from minidist.lessons.phrases import figure_phrases

WORDS = {"Idle": "空闲", "ranks": "rank 数", "forward": "前向传播", "early": "早", "late": "晚"}


def drawn() -> tuple[object, object]:
    figure = figures.new_figure(4, 3, "Idle", "left in English")
    ax = figure.add_axes((0.2, 0.2, 0.7, 0.5))
    ax.plot([0, 1], [0, 1], label="forward")
    ax.legend()
    ax.set_xlabel("ranks")
    ax.set_xticks([0, 1], ["early", "late"])
    ax.set_yticks([0, 1], ["rank 0", "rank 1"])
    return figure, ax


def test_every_word_of_a_figure_is_put_into_chinese(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "chinese_font", lambda: "DejaVu Sans")
    figure, ax = drawn()
    left = figures.speak_chinese(figure, lambda text: WORDS.get(text, text))
    assert left == ["left in English"]
    assert figure.texts[0].get_text() == "空闲" and ax.get_xlabel() == "rank 数"
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["前向传播"]
    assert [text.get_text() for text in ax.get_xticklabels()] == ["早", "晚"]
    assert [text.get_text() for text in ax.get_yticklabels()] == ["rank 0", "rank 1"]


def test_an_axis_in_chinese_keeps_its_span(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "chinese_font", lambda: "DejaVu Sans")
    figure, ax = drawn()
    ax.set_ylim(1.05, 0)  # a locator has a tick at 1.2, outside
    ax.yaxis.set_major_locator(AutoLocator())
    ax.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    figures.speak_chinese(figure, lambda text: WORDS.get(text, text))
    assert ax.get_ylim() == (1.05, 0)


@pytest.mark.filterwarnings("ignore:Glyph")  # the test's font has no Chinese letters
@pytest.mark.parametrize("font", ["DejaVu Sans", ""])
def test_a_second_picture_is_written_where_a_font_has_the_letters(
    font: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "chinese_font", lambda: font)
    with figures.also_in_chinese(lambda text: WORDS.get(text, text)):
        figures.save(drawn()[0], tmp_path)
    figures.save(drawn()[0], tmp_path / ".." / tmp_path.name, "later.png")
    names = {"figure.png", "later.png"} | ({"figure.zh.png"} if font else set())
    assert {path.name for path in tmp_path.iterdir()} == names


@pytest.mark.parametrize("lesson", lessons.every_lesson(), ids=lambda lesson: lesson.number)
def test_a_chinese_story_shows_the_chinese_picture_if_there_is_one(lesson: lessons.Lesson) -> None:
    story = lesson.part("README.zh.md").read_text(encoding="utf-8")
    shown = re.findall(r"!\[[^\]]*\]\(([^)]*\.png)\)", story)
    there = {path.name for path in lesson.folder.glob("*.zh.png")}
    assert {name for name in shown if name.endswith(".zh.png")} == there
    assert not there or figure_phrases(lesson.folder) is not None
