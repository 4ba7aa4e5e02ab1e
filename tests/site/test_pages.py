"""The site's sources and its pages: every link leads to a page, nothing comes from another host."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from minidist.errors import ConfigError
from minidist.site.live import every
from minidist.site.pages import LANGUAGES, documents, page_text, say, write_sources

MOST_BYTES = 30 << 20
FOREIGN = re.compile(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(?:https?:)?//')


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_link_of_every_page_leads_to_a_page(language: str) -> None:
    pages = documents()
    figures = every(say(language))
    for page in pages:
        text = page_text(page, language, pages, figures)
        plain = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
        for path in re.findall(r"(?<!!)\[[^\]\n]*\]\((?!https?://|#)([^)\s#]+)", plain):
            target = (page.parent / path).as_posix()
            assert Path(re.sub(r"[^/]+/\.\./", "", target)) in pages or _in(pages, target), path


def _in(pages: list[Path], target: str) -> bool:
    parts: list[str] = []
    for part in target.split("/"):
        if part == "..":
            parts.pop()
        elif part != ".":
            parts.append(part)
    return Path(*parts) in pages


@pytest.mark.parametrize("language", LANGUAGES)
def test_each_figure_stands_in_its_lesson(language: str) -> None:
    pages = documents()
    figures = every(say(language))
    told = "".join(page_text(page, language, pages, figures) for page in pages)
    for figure in figures:
        assert told.count(f'data-live="{figure.name}"') == 1
        assert figure.predict.question[:20] in told


def test_a_figure_of_a_section_that_is_gone_is_told() -> None:
    (ring,) = [live for live in every(say("en")) if live.name == "ring"]
    moved = type(ring)(**{**vars(ring), "section": "99"})
    page = next(page for page in documents() if page.parent.name == "03_ring")
    with pytest.raises(ConfigError, match="lesson 03 has no section 99"):
        page_text(page, "en", documents(), [moved])


@pytest.mark.soak
def test_the_sources_are_whole(tmp_path: Path) -> None:
    write_sources(tmp_path, "zh")
    assert (tmp_path / "_static" / "live" / "ring.js").is_file()
    index = (tmp_path / "index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^[\w./-]+$", index, re.MULTILINE)
    assert {f"{name}.md" for name in listed} == {page.as_posix() for page in documents()}


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_site_is_built_and_needs_no_other_host(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "minidist.site", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES
    for path in files:
        if path.suffix == ".html":
            text = path.read_text(encoding="utf-8")
            loads = [tag for tag in FOREIGN.findall(text) if "<a " not in tag]
            assert not re.search(r'<(?:script|link|img)[^>]*(?:src|href)="(?:https?:)?//', text), (
                loads
            )
            for link in re.findall(r'(?:src|href)="(?!https?:|mailto:|data:|#)([^"#?]+)', text):
                assert (path.parent / link).exists(), (path, link)
