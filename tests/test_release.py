"""Test what a package index shows, and what a wheel and a source distribution hold."""

import importlib.util
import re
from configparser import ConfigParser

from imports import ROOT

import minidist

SPEC = importlib.util.spec_from_file_location("setup_of_the_project", ROOT / "setup.py")
assert SPEC is not None and SPEC.loader is not None
SETUP = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(SETUP)
RELATIVE = re.compile(r"\]\((?!https?://|#)")


def test_no_link_of_the_description_leads_nowhere() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(RELATIVE.findall(readme)) > 30
    shown = SETUP.for_an_index(readme)
    assert not RELATIVE.search(shown) and "![" not in shown and "quickstart" in shown
    shown = SETUP.for_an_index(readme, "https://example.org/minidist/blob/main")
    assert not RELATIVE.search(shown)
    assert "(https://example.org/minidist/blob/main/docs/quickstart.md)" in shown


def test_the_source_distribution_names_every_folder_and_document() -> None:
    lines = (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines()
    named = {word for line in lines for word in line.split()[1:]}
    there = {
        path.name
        for path in ROOT.iterdir()
        if path.suffix == ".md" or (path.is_dir() and path.name[0] != "." and path.name != "runs")
    }
    made = {"minidist", "minidist.egg-info", "build", "dist", "__pycache__"}
    assert there - made <= named, there - made - named


def test_classifiers_name_only_what_the_suite_ran_on() -> None:
    read = ConfigParser()
    read.read(ROOT / "setup.cfg", encoding="utf-8")
    classifiers = read["metadata"]["classifiers"].split("\n")
    versions = [line for line in classifiers if re.search(r"Python :: 3\.\d", line)]
    assert versions == [
        f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)
    ]
    assert [line for line in classifiers if "Operating System" in line] == [
        "Operating System :: POSIX :: Linux"
    ]


def test_code_changes_and_documents_name_one_version() -> None:
    number = ".".join(minidist.__version__.split(".")[:2])
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", changes, re.MULTILINE)[0].startswith(number)
    documents = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    assert f"The documents are of minidist {number}\n" in documents
    assert "version = attr: minidist.__version__" in (ROOT / "setup.cfg").read_text()
