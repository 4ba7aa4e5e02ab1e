"""The site's sources: the repository's Markdown, as Sphinx reads it, once for each language.

A page keeps its place: docs/quickstart.md becomes LANGUAGE/docs/quickstart.html. In the Chinese site
a page is the twin README.zh.md, X.zh.md; where a document has none, its English. Links that lead to
code become plain words, diagrams become text, a term shows its meaning where a lesson first uses
it, and the live figures stand at the end of their sections.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from html import escape
from pathlib import Path

from minidist import lessons
from minidist.errors import ConfigError
from minidist.lessons.mermaid import as_text
from minidist.lessons.twins import twin_of
from minidist.site.live import Live, Say, data_of, every
from minidist.site.tips import with_tips

ROOT = lessons.FOLDER.parent
STATIC = Path(__file__).with_name("static")
LANGUAGES = ("en", "zh")
OTHER = {"en": "zh", "zh": "en"}
SWITCH = {"en": "中文", "zh": "English"}
LINK = re.compile(r"(!?)\[([^\]\n]*)\]\((?!https?://|#)([^)\s#]*)(#[^)\s]*)?\)")


def say(language: str) -> Say:
    """Return the function that chooses a text of a language."""
    return lambda english, chinese: chinese if language == "zh" else english


def documents() -> list[Path]:
    """Return every English document of the site, as a path from the repository's root.

    Raises: ConfigError if this is no clone: an installed package has no documents.
    """
    if not (ROOT / "docs" / "README.md").is_file():
        raise ConfigError("the site is built from a clone of the repository, which has docs/")
    found = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *lessons.FOLDER.glob("*.md")]
    found += [lesson.part("README.md") for lesson in lessons.every_lesson()]
    return sorted(path.relative_to(ROOT) for path in found if not path.name.endswith(".zh.md"))


def write_sources(folder: Path, language: str) -> None:
    """Write the sources of a language's site to a folder that is there: pages, pictures, conf.py,
    and the data of the live figures."""
    figures = every(say(language))
    pages = documents()
    for page in pages:
        target = folder / page
        target.parent.mkdir(parents=True, exist_ok=True)
        text = page_text(page, language, pages, figures)
        target.write_text(text, encoding="utf-8")
        for place in re.findall(r"!\[[^\]]*\]\(([^)]*)\)", text):
            picture = Path(os.path.normpath(page.parent / place))
            (folder / picture).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / picture, folder / picture)
    static = folder / "_static"
    shutil.copytree(STATIC, static)
    (static / "live").mkdir()
    for figure in figures:
        told = json.dumps(data_of(figure), ensure_ascii=False, separators=(",", ":"))
        script = f'(window.minidistLive ??= {{}})["{figure.name}"]={told};\n'
        (static / "live" / f"{figure.name}.js").write_text(script, encoding="utf-8")
    (folder / "index.md").write_text(_index(language, pages), encoding="utf-8")
    (folder / "conf.py").write_text(_configuration(language), encoding="utf-8")


def page_text(page: Path, language: str, pages: list[Path], figures: list[Live]) -> str:
    """Return a page's text for Sphinx. Args: page: the English document's path from the root."""
    text = shown(page, language).read_text(encoding="utf-8")
    text = re.sub(
        r"```mermaid\n(.*?)```", lambda m: f"```text\n{as_text(m[1])}\n```", text, flags=re.DOTALL
    )
    text = "".join(
        piece if piece.startswith("```") else _with_links(piece, page, language, pages)
        for piece in re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    )
    if page.parts[:1] == ("lessons",):
        text = with_tips(text, language)
    for figure in figures:
        if page.parts[:1] == ("lessons",) and page.parent.name.startswith(f"{figure.lesson}_"):
            text = _with_figure(text, figure, page)
    return text


def shown(page: Path, language: str) -> Path:
    """Return the file that a language's site shows as a page: the twin, or the English."""
    twin = twin_of(ROOT / page)
    return twin if language == "zh" and twin.is_file() else ROOT / page


def _with_links(text: str, page: Path, language: str, pages: list[Path]) -> str:
    """Return Markdown whose links lead to pages of the site; those to its twin lead to the other
    language's site, those to anything else become words."""

    def led(link: re.Match[str]) -> str:
        picture, words, path, anchor = link.groups()
        target = Path(os.path.normpath(page.parent / path.replace(".zh.md", ".md")))
        if picture:
            return link[0]
        if target == page and path and not anchor and words in SWITCH.values():
            up = "../" * len(page.parts)
            html = page.with_suffix(".html").as_posix()
            return f'<a href="{up}{OTHER[language]}/{html}">{words}</a>'
        if (index := target / "README.md") in pages:
            target = index
        if target not in pages:
            return words
        place = os.path.relpath(target, page.parent)
        if shown(page, language) == ROOT / page and shown(target, language) != ROOT / target:
            anchor = ""  # an English heading's, in a page whose headings are Chinese
        if anchor and target.name == "NOTES.md":  # an anchor in HTML, which Sphinx does not know
            return f'<a href="{place.removesuffix(".md")}.html{anchor}">{words}</a>'
        return f"[{words}]({place}{anchor or ''})"

    return LINK.sub(led, text)


def _with_figure(text: str, figure: Live, page: Path) -> str:
    """Return a story with a live figure at the end of its section."""
    begin = re.search(rf"^## {figure.section}\.? .*$", text, re.MULTILINE)
    if begin is None:
        raise ConfigError(f"lesson {figure.lesson} has no section {figure.section} for a figure")
    following = re.compile(r"^## ", re.MULTILINE).search(text, begin.end())
    end = following.start() if following else len(text)
    up = "../" * (len(page.parts) - 1)
    block = f"""
<figure class="live" id="live-{figure.name}" data-live="{figure.name}">
<figcaption>{escape(figure.title)}</figcaption>
<p>{escape(figure.predict.question)}</p>
<p class="still"><code>{escape(figure.picture(*(figure.start or [0] * len(figure.controls))).command)}</code></p>
</figure>
<script src="{up}_static/live/{figure.name}.js"></script>

"""
    return text[:end].rstrip("\n") + "\n" + block + text[end:]


def _index(language: str, pages: list[Path]) -> str:
    """Return the first page's source: it shows README.md, and lists all pages."""
    words = say(language)
    parts = [
        (words("Begin", "开始"), _chosen(pages, "README.md", "docs/quickstart.md")),
        (words("Lessons", "课程"), _chosen(pages, "lessons/*/README.md")),
        (
            words("The course", "课程资料"),
            _chosen(pages, "lessons/*.md", "docs/words.md", "docs/teaching/*"),
        ),
        (words("How-to", "操作指南"), _chosen(pages, "docs/howto/*")),
        (words("Concepts", "概念"), _chosen(pages, "docs/concepts/*")),
        (words("Reference", "参考"), _chosen(pages, "docs/README.md", "docs/reference/*")),
        (words("Measured", "实测"), _chosen(pages, "docs/measured/*")),
    ]
    listed = [
        "```{toctree}\n:hidden:\n:caption: "
        + caption
        + "\n\n"
        + "\n".join(page.with_suffix("").as_posix() for page in found)
        + "\n```\n"
        for caption, found in parts
    ]
    return "```{include} README.md\n```\n\n" + "\n".join(listed)


def _chosen(pages: list[Path], *patterns: str) -> Iterator[Path]:
    """Yield the pages that fit a pattern, in the order of the patterns."""
    for pattern in patterns:
        yield from (page for page in pages if page.match(pattern) and _depth(page, pattern))


def _depth(page: Path, pattern: str) -> bool:
    return len(page.parts) == pattern.count("/") + 1


def _configuration(language: str) -> str:
    """Return Sphinx's conf.py."""
    return f"""from sphinx.search.zh import SearchChinese

SearchChinese.language_name = "English"  # its page asks for a stemmer by this name; Sphinx 9 has none for Chinese
project = "minidist"
extensions = ["myst_parser"]
language = "{say(language)("en", "zh_CN")}"
html_theme = "furo"
html_title = "minidist"
html_static_path = ["_static"]
html_css_files = ["live.css"]
html_js_files = ["live.js"]
html_show_sphinx = False
html_show_search_summary = False  # it would read pages by requests, which a folder does not answer
html_copy_source = False
myst_heading_anchors = 4
suppress_warnings = ["myst.header", "toc.not_included", "misc.highlighting_failure"]
"""
