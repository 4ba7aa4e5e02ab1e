"""The page of rules has every cause that the code can name."""

import ast

from imports import ROOT

from minidist.observe.diagnose import slow, slow_links
from minidist.reference import rules

NAMED = {cause.name for causes in rules.CAUSES.values() for cause in causes}


def causes_in_code() -> set[str]:
    """Return the first argument of each Fault of the package, where it is a text."""
    found = {slow.CAUSE, slow_links.CAUSE}
    for path in (ROOT / "minidist/observe/diagnose").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Fault":
                first = node.args[0]
                if isinstance(first, ast.Constant):
                    found.add(str(first.value))
    return found


def test_every_cause_of_the_code_is_on_the_page() -> None:
    found = causes_in_code()
    assert len(found) > 15
    assert found - NAMED == set()
    calls = {"wrong …", "left out", "made too often", "wrong order"}  # made of parts in mismatches
    assert NAMED - found == calls


def test_the_page_has_the_constants_of_the_rules(monkeypatch) -> None:
    text = rules.rules_page()
    assert f"| {slow_links.TIMES:.0f} times the others' time" in text
    assert "after 18 messages" in text
