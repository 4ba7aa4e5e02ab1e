"""Test a collective of your own against NumPy: on ranks that are threads, over a buffered and an
unbuffered transport.

    from minidist.testing import check_collective

    def all_reduce(group, x):        # by group.send, group.recv, group.exchange
        ...

    check_collective("all_reduce", all_reduce)

An AssertionError tells the smallest example that is wrong: ranks, size, dtype, layout, and the
first element that differs, or which rank waits for which. Its parts, for tests of another form:

    check_example(Example("all_reduce", 3, (4, 4, 4)), all_reduce)     # one example; no Hypothesis
    @given(example=strategies.examples("all_reduce"))                  # a property test of your own

`strategies` are strategies of Hypothesis: arrays of every dtype and layout, uneven lengths,
groups, algorithms, transports, examples. They and check_collective need Hypothesis:
pip install "minidist[test]".
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minidist.testing import strategies
    from minidist.testing.checker import check_collective
    from minidist.testing.one_example import check_example
    from minidist.testing.reference import Example

__all__ = ["Example", "check_collective", "check_example", "strategies"]

_HOMES = {
    "Example": "minidist.testing.reference",
    "check_example": "minidist.testing.one_example",
    "check_collective": "minidist.testing.checker",
}
_WITH_HYPOTHESIS = ("check_collective", "strategies")


def __getattr__(name: str) -> Any:
    """Load a name from its module (PEP 562).

    Raises: AttributeError for any other name; ImportError where Hypothesis is missing and the name
    needs it.
    """
    if name not in __all__:
        raise AttributeError(
            f"module 'minidist.testing' has no attribute {name!r}; it offers {', '.join(__all__)}"
        )
    try:
        if name == "strategies":
            return importlib.import_module("minidist.testing.strategies")
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if name not in _WITH_HYPOTHESIS or error.name != "hypothesis":
            raise
        raise ImportError(
            f"minidist.testing.{name} needs Hypothesis, which is not installed: "
            'pip install "minidist[test]"'
        ) from None


def __dir__() -> list[str]:
    """Return only the public names."""
    return list(__all__)
