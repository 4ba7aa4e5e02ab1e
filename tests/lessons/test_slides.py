"""The slides: a deck that Marp reads, with each lesson's quotation, figure and questions, and no
answers."""

import re
from pathlib import Path

import pytest
import yaml

from minidist import lessons
from minidist.lessons import Lesson
from minidist.lessons.slides import figure_words, main, questions, quotation

LESSONS = lessons.every_lesson()
each_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.number)


def story(lesson: Lesson) -> str:
    return lesson.part("README.md").read_text(encoding="utf-8")


def answers(text: str) -> list[str]:
    """The hidden answers of a story, as they stand."""
    hidden = re.findall(r"<summary>Answer</summary>\n(.*?)</details>", text, re.DOTALL)
    return [answer.strip() for answer in hidden]


@each_lesson
def test_each_lesson_has_what_its_slides_need(lesson: Lesson) -> None:
    text = story(lesson)
    assert quotation(text).startswith("> ") and figure_words(text)
    asked = questions(text)
    assert [int(one.split(".")[0]) for one in asked] == [*range(1, len(answers(text)) + 1)]
    assert len(asked) >= 3


def test_the_whole_deck(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path / "made")]) == 0
    deck = tmp_path / "made" / "slides.md"
    assert f"{deck}: 27 lessons" in capsys.readouterr().out
    text = deck.read_text(encoding="utf-8")
    assert wrong_with(text, LESSONS, deck.parent) == []


def wrong_with(text: str, chosen: list[Lesson], folder: Path) -> list[str]:
    """What is wrong with a deck of these lessons."""
    _, front, body = text.split("---\n", 2)
    head = yaml.safe_load(front)
    wrong = [] if head["marp"] is True and head["paginate"] is True else ["front matter"]
    slides = body.split("\n---\n")
    titles = [slide.strip().splitlines()[0] for slide in slides]
    if [one for one in titles if one.startswith("# ")] != [
        f"# {lesson.number} · {lesson.title}" for lesson in chosen
    ]:
        wrong.append("titles")
    for lesson in chosen:
        for question in questions(story(lesson)):
            wrong += [] if question in body else [f"a question of {lesson.number}"]
        for answer in answers(story(lesson)):
            wrong += [f"an answer of {lesson.number}"] if answer in body else []
        if quotation(story(lesson)).splitlines()[0] not in body:
            wrong.append(f"the quotation of {lesson.number}")
    pictures = re.findall(r"!\[h:\d+\]\(([^)]+)\)", body)
    if len(pictures) != len(chosen) or not all((folder / one).is_file() for one in pictures):
        wrong.append("figures")
    links = re.findall(r"(?<!!)\[[^\]]*\]\(([^)]*)\)", re.sub(r"`[^`]*`", "", body))
    return wrong + [f"a link to {link}" for link in links]


@pytest.mark.parametrize(
    "now,planted,found",
    [
        ("marp: true", "marp: false", "front matter"),
        (
            "## 03 · Quiz",
            "## 03 · Quiz\n\n`2·3/4 · 12 MiB = 18 MiB`, in `2·3 = 6` messages of 3 MiB.",
            "an answer",
        ),
        ("figures/03.png", "figures/30.png", "figures"),
        ("> 没有", "> 有", "the quotation"),
        ("1. Four ranks", "1. Five ranks", "a question"),
        ("# 03 · Ring", "# 04 · Ring", "titles"),
    ],
)
def test_a_wrong_deck_is_seen(now: str, planted: str, found: str, tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path), "--only", "03"]) == 0
    text = (tmp_path / "slides.md").read_text(encoding="utf-8")
    chosen = [lessons.find("03")]
    assert wrong_with(text, chosen, tmp_path) == []
    assert now in text
    wrong = wrong_with(text.replace(now, planted, 1), chosen, tmp_path)
    assert [one for one in wrong if one.startswith(found)], wrong


def test_links_become_words_and_answers_go() -> None:
    story = (
        "# 07 · A\n\n> *words* ([N0](../../docs/notes.md))\n\n## 1 Quiz\n\n1. Why [b](c.md)?\n\n"
        "<details><summary>Answer</summary>\n\n2. No.\n\n</details>\n\n2. And\nthen?\n\n## 2 D\n"
    )
    assert questions(story) == ["1. Why b?", "2. And\nthen?"]
    assert quotation(story) == "> *words* ([N0](../../docs/notes.md))"
    assert questions("# 07 · A\n") == [] and quotation("# 07 · A\n") == ""


def test_only_some_lessons(tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path), "--only", "4", "03"]) == 0
    text = (tmp_path / "slides.md").read_text(encoding="utf-8")
    assert re.findall(r"^# (\d\d)", text, re.MULTILINE) == ["04", "03"]
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == ["03.png", "04.png"]


def test_without_pictures_the_slide_says_how_to_draw_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an installed package."""
    part = Lesson.part
    monkeypatch.setattr(
        Lesson,
        "part",
        lambda self, name: tmp_path / "none.png" if name == "figure.png" else part(self, name),
    )
    assert main(["--out", str(tmp_path), "--only", "03"]) == 0
    text = (tmp_path / "slides.md").read_text(encoding="utf-8")
    assert "`minidist lesson 03 --figure` draws it" in text and "![" not in text


@pytest.mark.parametrize(
    "words,complaint",
    [(["--only", "03"], "--out"), (["--out", "/proc/none"], "/proc"), (["--only", "77"], "77")],
)
def test_bad_input_is_one_line(
    words: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*words, *(["--out", str(tmp_path)] if complaint == "77" else [])]
    assert main(words) == 2
    printed = capsys.readouterr()
    assert complaint in printed.err and printed.err.count("\n") == 1
