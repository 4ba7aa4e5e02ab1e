"""All generated pages: {path in the clone: its text}."""

from pathlib import Path

import minidist
from minidist.errors import ConfigError
from minidist.files import whole
from minidist.reference.api import api_page
from minidist.reference.command_line import command_line_page
from minidist.reference.errors import errors_page
from minidist.reference.measured import measured_pages
from minidist.reference.rules import rules_page
from minidist.reference.run_files import run_files_page

ROOT = Path(minidist.__file__).resolve().parents[1]


def every_page() -> dict[str, str]:
    """Return {path from the clone's root: text} of all pages.

    Raises: ConfigError outside a clone: a wheel has neither docs/ nor benchmarks/.
    """
    if not (ROOT / "docs").is_dir():
        raise ConfigError("docs/ is written in a clone of the repository, and this is none")
    pages = {
        "docs/reference/command-line.md": command_line_page(),
        "docs/reference/api.md": api_page(),
        "docs/reference/errors.md": errors_page(),
        "docs/reference/run-files.md": run_files_page(),
        "docs/reference/diagnose.md": rules_page(),
    }
    measured = measured_pages(ROOT / "benchmarks" / "results")
    return pages | {f"docs/measured/{name}": text for name, text in measured.items()}


def written_pages() -> list[str]:
    """Write each page that differs, and return their names. Raises: as every_page."""
    changed = []
    for name, text in every_page().items():
        page = ROOT / name
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            page.parent.mkdir(parents=True, exist_ok=True)
            with whole(page) as draft:
                draft.write_text(text, encoding="utf-8")
            changed.append(name)
    return changed
