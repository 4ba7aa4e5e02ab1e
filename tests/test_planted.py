"""A planted bug is caught only by a check that passes without it."""

import pytest
from planted import Bug, check_caught


class Sum:
    """What the bugs are planted in."""

    @property
    def scale(self) -> int:
        return 2

    @staticmethod
    def double(x: int) -> int:
        return 2 * x

    def of(self, x: int, y: int) -> int:
        return self.double(x) + self.scale * y


def check(x: int = 1) -> None:
    assert Sum().of(x, 1) == 2 * x + 2


METHOD = Bug("method", Sum, "of", lambda right, self, x, y: right(self, x, y) + 1)
STATIC_METHOD = Bug("static method", Sum, "double", lambda right, x: right(x) + 1)
PROPERTY = Bug("property", Sum, "scale", lambda right, self: right(self) + 1)


@pytest.mark.parametrize("bug", [METHOD, STATIC_METHOD, PROPERTY], ids=str)
def test_the_wrong_function_is_given_the_right_one(
    bug: Bug, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_caught(bug, check, monkeypatch)
    monkeypatch.undo()
    check()


def test_a_bug_that_does_no_harm_is_not_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    bug = Bug("none", Sum, "of", lambda right, *given: right(*given))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check_caught(bug, check, monkeypatch)


def test_another_error_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    bug = Bug("typing error", Sum, "of", lambda right, self: 0)
    with pytest.raises(TypeError):
        check_caught(bug, check, monkeypatch)


def test_a_check_that_fails_without_the_bug_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> None:
        raise AssertionError("as always")

    with pytest.raises(AssertionError, match="as always"):
        check_caught(METHOD, never, monkeypatch)


def test_options_and_further_replacements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both checks are given the options; the bug is planted in both places."""
    seen = []

    def check_and_note(x: int) -> None:
        seen.append(x)
        check(x)

    scale = (Sum, "scale", lambda right, self: 0)
    both = Bug("both", Sum, "double", lambda right, x: 0, {"x": 5}, also=(scale,))
    check_caught(both, check_and_note, monkeypatch)
    assert seen == [5, 5] and Sum().of(5, 1) == 0
