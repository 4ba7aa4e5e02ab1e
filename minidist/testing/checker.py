"""Search for an example on which a collective is wrong, by Hypothesis."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import HealthCheck, Verbosity, given, settings
from hypothesis import seed as seeded
from hypothesis.strategies import SearchStrategy

from minidist.errors import ConfigError
from minidist.testing import strategies
from minidist.testing.every_dtype import every_dtype
from minidist.testing.one_example import check_example
from minidist.testing.reference import (
    DTYPES,
    LAYOUTS,
    OPS,
    REDUCING,
    SIZES,
    TRANSPORTS,
    Example,
    check_verb,
    defined,
    dtype_of,
)

SHRINKING = 3.0  # seconds for the search for a smaller example


def check_collective(
    verb: str,
    function: Callable[..., Any],
    *,
    sizes: Sequence[int] = SIZES,
    dtypes: Sequence[str] = DTYPES,
    ops: Sequence[str] = ("sum",),
    layouts: Sequence[str] = LAYOUTS,
    transports: Sequence[str] = TRANSPORTS,
    examples: int = 100,
    subgroups: bool = True,
    same_bits: bool = True,
    overwrites: bool = False,
    seed: int = 0,
    limit: float = 5.0,
) -> int:
    """Run a collective of your own on many examples and compare each rank's result with NumPy's.

        def all_reduce(group, x):
            return np.sum(group.all_gather(x[np.newaxis]), axis=0, dtype=x.dtype)

        check_collective("all_reduce", all_reduce)

    First it tries every dtype over every transport, then examples that Hypothesis draws. When one
    is wrong, Hypothesis searches for a smaller one. Each example calls the function twice on the
    same group, so that a message which the first call leaves behind is found. A deadlock ends by
    itself, without waiting for the limit.

    Args:    verb: the collective: broadcast, scatter, reduce, gather, all_reduce, reduce_scatter,
             all_gather, all_to_all, barrier. Arguments and results are those of the method of
             Group with that name.
             function: called on each rank, a thread, as
             function(group, x)           all_reduce, reduce_scatter, all_gather, all_to_all
             function(group, x, root=0)   broadcast, scatter (x is None except at the root),
                                          reduce, gather (its result counts at the root only)
             function(group)              barrier
             and with op="sum" where it reduces and has an argument `op`. Group's own methods will
             do: check_collective("all_reduce", Group.all_reduce).
             sizes: numbers of ranks. dtypes: names of NumPy or ml_dtypes. ops: sum, mean, max, min,
             prod. layouts: plain, strided, read-only, transposed.
             transports: "threads" (a send is buffered) and "threads-unbuffered" (it waits until it
             is received). examples: how many Hypothesis draws, at most.
             subgroups: whether groups may have some ranks of the job, in any order.
             same_bits: whether the result of an all_reduce must have the same bits on all ranks.
             overwrites: whether the function may change x.
             seed: other examples with another seed. limit: seconds for one example; after them
             a rank that loops without a message is an error, and its thread cannot be ended.
    Returns: the number of examples that were run.
    Raises:  AssertionError for a collective that is wrong: the message tells ranks, dtype, layout
             and the first element that differs, or which rank waits for which, and how to run only
             this example. ConfigError for an argument of this function that does not fit.
    """
    _check(verb, sizes=sizes, dtypes=dtypes, ops=ops, layouts=layouts, transports=transports)
    if isinstance(examples, bool) or not isinstance(examples, int) or examples < 0:
        raise ConfigError(f"check of {verb}: examples={examples!r}; expected a count, from 0")
    if overwrites:
        layouts = [name for name in layouts if name != "read-only"] or ["plain"]
    if verb in REDUCING:
        dtypes = [name for name in dtypes if any(defined(op, name) for op in ops)]
        if not dtypes:
            raise ConfigError(f"check of {verb}: no op of {ops!r} is defined for these dtypes")
    search = Search(function, same_bits=same_bits, overwrites=overwrites, limit=limit)
    choices: dict[str, Any] = {
        "sizes": sizes,
        "dtypes": dtypes,
        "ops": ops,
        "layouts": layouts,
        "transports": transports,
        "subgroups": subgroups,
    }
    for first in every_dtype(verb, **choices):
        if search.problem(first):
            choices |= {"dtypes": (first.dtype,), "transports": (first.transport,)}
            smaller = search.by_hypothesis(
                strategies.examples(verb, **choices), max(examples, 1), seed
            )
            raise search.problems[smaller or first].with_traceback(None)
    if examples:
        wrong = search.by_hypothesis(strategies.examples(verb, **choices), examples, seed)
        if wrong is not None:
            raise search.problems[wrong].with_traceback(None)
    return len(search.problems) + len(search.right)


class Search:
    """The examples that were run, and what was wrong with them. An example is run once."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self._function = function
        self._options = options
        self._deadline = 0.0
        self.right: set[Example] = set()
        self.problems: dict[Example, AssertionError] = {}

    def problem(self, example: Example) -> AssertionError | None:
        """Run an example; return what is wrong with it.

        When the time to shrink is over, examples that have not been run count as right: so
        Hypothesis ends with the smallest it has found.
        """
        if example in self.problems:
            return self.problems[example]
        over = self.problems and time.monotonic() > self._deadline
        if example in self.right or over:
            return None
        try:
            check_example(example, self._function, **self._options)
        except AssertionError as error:
            if not self.problems:
                # a rank that hangs outside of a message keeps its thread: one such example is enough
                hangs = isinstance(error.__cause__, TimeoutError)
                self._deadline = time.monotonic() + (0.0 if hangs else SHRINKING)
            self.problems[example] = error
            return error
        self.right.add(example)
        return None

    def by_hypothesis(
        self, strategy: SearchStrategy[Example], count: int, seed: int
    ) -> Example | None:
        """Return the smallest wrong example that Hypothesis finds; None if it finds none."""
        wrong: list[Example] = []

        @seeded(seed)
        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            derandomize=False,
            verbosity=Verbosity.quiet,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        @given(example=strategy)
        def is_right(example: Example) -> None:
            if self.problem(example) is not None:
                wrong.append(example)
                raise WrongExample

        try:
            is_right()
        except WrongExample:
            return wrong[-1]  # Hypothesis runs the smallest last
        return None


class WrongExample(Exception):
    """Tells Hypothesis that an example is wrong."""


def _check(verb: str, **choices: Sequence[Any]) -> None:
    """Raise ConfigError for choices that cannot be."""
    check_verb(verb)
    known = {"ops": OPS, "layouts": LAYOUTS, "transports": TRANSPORTS}
    for name, chosen in choices.items():
        if isinstance(chosen, str) or not chosen:
            raise ConfigError(f"check of {verb}: {name}={chosen!r}; expected a tuple of choices")
        for one in chosen:
            if name in known and one not in known[name]:
                raise ConfigError(
                    f"check of {verb}: {name} has {one!r}; choose among {', '.join(known[name])}"
                )
    for size in choices["sizes"]:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"check of {verb}: sizes has {size!r}; expected counts of ranks")
    for dtype in choices["dtypes"]:
        dtype_of(dtype)
