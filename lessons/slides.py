"""Slides for a lecture, made from the lessons: one Markdown deck in Marp's format.

    python -m minidist.lessons.slides --out slides               # all lessons
    python -m minidist.lessons.slides --out slides --only 03 04

Of each lesson: its title and modules, the notes' quotation at its head, its figure, and the
questions of its quiz without their answers. DIR/slides.md and DIR/figures/ need nothing else: Marp
(`marp slides.md --pdf`, or its extension of an editor) shows them.
"""

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from minidist import lessons
from minidist.console import Parser, folder_to_write
from minidist.errors import ConfigError
from minidist.files import whole
from minidist.lessons import Lesson

DECK = "slides.md"
FRONT = """---
marp: true
theme: default
paginate: true
title: "{title}"
---
"""
QUESTIONS = 4  # of a quiz, per slide


def quotation(story: str) -> str:
    """Return the notes' words at the head of a story, as Markdown; "" if there are none."""
    found = re.search(r"^>.*(?:\n>.*)*", story.partition("\n## ")[0], re.MULTILINE)
    return found[0] if found else ""


def figure_words(story: str) -> str:
    """Return what a story says its figure shows."""
    found = re.search(r"!\[([^\]]*)\]\(figure\.png\)", story)
    return found[1] if found else ""


def questions(story: str) -> list[str]:
    """Return the questions of a story's quiz, each as an item of a numbered list, without
    answers."""
    section = re.search(r"^## \d+ Quiz\n(.*?)(?=^## |\Z)", story, re.DOTALL | re.MULTILINE)
    if section is None:
        return []
    asked = re.sub(r"<details>.*?</details>", "", section[1], flags=re.DOTALL)
    items = re.split(r"^(?=\d+\. )", asked, flags=re.MULTILINE)
    return [without_links(item.strip()) for item in items if re.match(r"\d+\. ", item)]


def without_links(text: str) -> str:
    """Return Markdown with the words of its links, whose targets are not beside the deck."""
    return re.sub(r"(?<!!)\[([^\]]*)\]\([^)]*\)", r"\1", text)


def slides_of(lesson: Lesson, figure: str) -> list[str]:
    """Return the slides of one lesson. Args: figure: the path of its picture, "" if there is
    none."""
    story = lesson.part("README.md").read_text(encoding="utf-8")
    modules = ", ".join(f"`{module}`" for module in lesson.modules)
    title = f"{lesson.number} · {lesson.title}"
    slides = [f"# {title}\n\n{without_links(quotation(story))}\n\nnotes: {lesson.notes}\n{modules}"]
    words = figure_words(story)
    if figure:
        slides.append(f"## {title}\n\n![h:460]({figure})\n\n{words}")
    else:
        slides.append(
            f"## {title}\n\n{words}\n\n`minidist lesson {lesson.number} --figure` draws it."
        )
    asked = questions(story)
    for first in range(0, len(asked), QUESTIONS):
        items = "\n\n".join(asked[first : first + QUESTIONS])
        slides.append(f"## {lesson.number} · Quiz\n\n{items}")
    return slides


def write_deck(chosen: Sequence[Lesson], folder: Path) -> Path:
    """Write the deck of these lessons and their pictures to a folder; return the deck's path."""
    slides: list[str] = []
    for lesson in chosen:
        picture = lesson.part("figure.png")
        figure = ""
        if picture.is_file():  # an installed package has no pictures
            figure = f"figures/{lesson.number}.png"
            (folder / "figures").mkdir(exist_ok=True)
            shutil.copyfile(picture, folder / figure)
        slides += slides_of(lesson, figure)
    title = ", ".join(lesson.number for lesson in chosen)
    deck = folder / DECK
    with whole(deck) as draft:
        text = FRONT.format(title=f"minidist: lessons {title}") + "\n" + "\n\n---\n\n".join(slides)
        draft.write_text(text + "\n", encoding="utf-8")
    return deck


def main(argv: Sequence[str] | None = None) -> int:
    """Write the deck that the options ask for; return 0, or 2 for bad input."""
    parser = Parser(
        prog="python -m minidist.lessons.slides",
        description="Slides of the lessons, as one Markdown deck for Marp.",
    )
    parser.add_argument(
        "--out",
        required=True,
        type=folder_to_write,
        metavar="DIR",
        help="the folder of slides.md and its figures; it is made if need be",
    )
    parser.add_argument("--only", nargs="+", metavar="NN", help="these lessons (default: all)")
    try:
        args = parser.parse_args(argv)
        chosen = [lessons.find(number) for number in args.only or ()] or lessons.every_lesson()
        deck = write_deck(chosen, args.out)
    except (ConfigError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    print(f"{deck}: {len(chosen)} lessons; marp {deck} --pdf makes pages of it")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
