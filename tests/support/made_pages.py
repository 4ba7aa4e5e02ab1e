"""The pages that the code makes, made once a process: they take most of a second."""

from functools import cache

from imports import ROOT

from minidist.reference.markdown import MADE_BY
from minidist.reference.pages import every_page

ON_DISK = sorted(
    page.relative_to(ROOT).as_posix()
    for page in (ROOT / "docs").rglob("*.md")
    if MADE_BY in page.read_text(encoding="utf-8")
)
"""The paths of the pages in docs/ that say that they are made."""


@cache
def made() -> dict[str, str]:
    """Return every page, as the code makes it now."""
    return every_page()
