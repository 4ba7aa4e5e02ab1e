"""Planted bugs as data: what is wrong, where, and the job in which a parity test must catch it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import getattr_static
from typing import Any

import pytest

Wrong = Callable[..., Any]
"""Called in place of the right function: wrong(right, *its arguments)."""


@dataclass(frozen=True, repr=False)
class Bug:
    """One bug.

    Args:    name: the id of its case.
             owner: the class or module whose attribute is replaced.
             attribute: the name of a function, a method, a static method or a property.
             wrong: what is called instead.
             options: options of the check that must fail.
             raises: the errors that count as caught.
             also: further replacements that the bug needs, each (owner, attribute, wrong).
    """

    name: str
    owner: Any
    attribute: str
    wrong: Wrong
    options: dict[str, Any] = field(default_factory=dict)
    raises: type[Exception] | tuple[type[Exception], ...] = AssertionError
    also: tuple[tuple[Any, str, Wrong], ...] = ()

    def __repr__(self) -> str:
        return self.name

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        """Replace the right functions by the wrong ones."""
        for owner, attribute, wrong in ((self.owner, self.attribute, self.wrong), *self.also):
            patch.setattr(owner, attribute, _replacement(getattr_static(owner, attribute), wrong))


def _replacement(right: Any, wrong: Wrong) -> Any:
    """Return what `right` is, a function, a property or a static method, that calls `wrong`."""
    if isinstance(right, property):
        return property(_replacement(right.fget, wrong))
    if isinstance(right, staticmethod):
        return staticmethod(_replacement(right.__func__, wrong))

    def planted(*args: Any, **options: Any) -> Any:
        return wrong(right, *args, **options)

    return planted


def check_caught(bug: Bug, check: Callable[..., Any], patch: pytest.MonkeyPatch) -> None:
    """`check(**bug.options)` passes without the bug, and fails with it."""
    check(**bug.options)
    bug.plant(patch)
    with pytest.raises(bug.raises):
        check(**bug.options)
