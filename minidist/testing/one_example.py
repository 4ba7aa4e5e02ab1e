"""Run a collective on one example and compare each rank's result with NumPy's."""

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.errors import CommError, ConfigError, DeadlockError, TimeoutError
from minidist.launch import run
from minidist.launch.arguments import check_seconds
from minidist.testing.reference import (
    REDUCING,
    ROOTED,
    Example,
    argument,
    bits,
    expected,
    same,
    tolerance,
)

CALLS = 2  # on one group, one after the other: the second receives what the first left behind
LATE = 0.03  # seconds that the last rank waits before it calls a barrier, unless a rank leaves it
MOST_LATE = 1.0  # seconds that it waits until all others have called; one of them may have failed
MOST_SHOWN = 40  # elements of arguments in a message
MOST_RANKS_SHOWN = 4


def check_example(
    example: Example,
    function: Callable[..., Any],
    *,
    same_bits: bool = True,
    overwrites: bool = False,
    limit: float = 5.0,
) -> None:
    """Run `function` on the ranks of one example, twice on the same group, and compare the results
    with NumPy's.

        check_example(Example("all_reduce", 3, (4, 4, 4)), ring_all_reduce)

    Args:    example: the verb, the ranks and their arrays. function: as check_collective.
             same_bits: as check_collective. overwrites: as check_collective.
             limit: seconds that the ranks may take.
    Returns: None.
    Raises:  AssertionError: a rank raised, waits in vain, changed its argument, or returned another
             result than NumPy; the message tells which ranks, and the first element that differs.
             ConfigError if the function does not take the arguments of the verb, or the example's
             fields do not fit together.
    """
    example.check()
    limit = check_seconds("check_example", "limit", limit)
    options = _options(example, function)
    size = 1 + max(example.world_ranks, default=example.size - 1)
    arrivals = [Arrivals(example.size) for _ in range(CALLS)]
    try:
        found = run(
            lambda world: _on_rank(world, example, function, options, arrivals),
            size=size,
            transport=example.transport,
            limit=limit,
        )
    except Exception as error:
        raise AssertionError(_text(example, function, *_raised(error))) from error
    members = example.world_ranks or range(example.size)
    inside = [calls for calls in (found[rank] for rank in members) if calls is not None]
    for number in range(CALLS):
        results = [calls[number] for calls in inside]
        problems = _problems(example, number, results, same_bits, overwrites)
        if not problems:
            continue
        when = f"in call {number + 1} on the same group, " if number else ""
        title = f"is wrong {when}on {len(problems)} of {example.size} ranks"
        lines = [f"  rank {rank}: {problem}" for rank, problem in problems.items()]
        if len(lines) > MOST_RANKS_SHOWN:
            lines[MOST_RANKS_SHOWN - 1 :] = [f"  … and {len(lines) - MOST_RANKS_SHOWN + 1} more"]
        raise AssertionError(
            _text(example, function, title, [*lines, *_arguments(example, number)])
        )


class Arrivals:
    """The ranks that have called a barrier. One rank calls last: it waits until all others have
    called, then until one of them has left the barrier too early, or for LATE seconds."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._called: set[int] = set()
        self._lock = threading.Lock()
        self._others_called = threading.Event()
        self._left_early = threading.Event()

    def call(self, rank: int, last: int) -> None:
        """Note that `rank` calls the barrier; rank `last` waits first."""
        if rank == last and self._size > 1:
            self._others_called.wait(MOST_LATE)
            self._left_early.wait(LATE)
        with self._lock:
            self._called.add(rank)
            if len(self._called) == self._size - 1:
                self._others_called.set()

    def missing(self) -> list[int]:
        """Return the ranks that have not called the barrier; a rank asks when it has left it."""
        with self._lock:
            missing = sorted(set(range(self._size)) - self._called)
        if missing:
            self._left_early.set()
        return missing


def _options(example: Example, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the keywords of the call: root and op where the verb has them and the function takes
    them."""
    if not callable(function):
        raise ConfigError(f"check of {example.verb}: {function!r} is no function")
    try:
        parameters = {**inspect.signature(function).parameters}
    except (TypeError, ValueError):  # a function in C, whose arguments Python does not know
        parameters = {}
    every = not parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    options: dict[str, Any] = {}
    if example.verb in ROOTED:
        if not every and "root" not in parameters:
            raise ConfigError(
                f"check of {example.verb}: {_name(function)} takes no argument `root`; it is "
                "called as function(group, x, root=0)"
            )
        options["root"] = example.root
    if example.verb in REDUCING:
        if every or "op" in parameters:
            options["op"] = example.op
        elif example.op != "sum":
            raise ConfigError(
                f"check of {example.verb}: {_name(function)} takes no argument `op`, so op "
                f'{example.op} cannot be checked; leave ops=("sum",)'
            )
    return options


def _on_rank(
    world: Group,
    example: Example,
    function: Callable[..., Any],
    options: dict[str, Any],
    arrivals: Sequence[Arrivals],
) -> list[tuple[Any, bool, list[int]]] | None:
    """Return of each call of one rank: its result, whether its argument is unchanged, the ranks
    that had not called a barrier when it left; None for a rank outside the group."""
    group = world
    if example.world_ranks:
        inside = world.rank in example.world_ranks
        key = example.world_ranks.index(world.rank) if inside else None
        own = world.split(0 if inside else None, key)
        if own is None:
            return None
        group = own
    found = []
    for number in range(CALLS):
        if example.verb == "barrier":
            arrivals[number].call(group.rank, example.root)
            function(group)
            found.append((None, True, arrivals[number].missing()))
            continue
        x = argument(example, group.rank, number)
        result = function(group, x, **options)
        found.append((result, same(x, argument(example, group.rank, number)), []))
    return found


# ---------------------------------------------------------------------------------------- problems


def _problems(
    example: Example,
    number: int,
    results: Sequence[tuple[Any, bool, list[int]]],
    same_bits: bool,
    overwrites: bool,
) -> dict[int, str]:
    """Return {rank: what is wrong} of call `number`."""
    problems = {}
    for rank, want in enumerate(expected(example, number)):
        result, unchanged, missing = results[rank]
        problem = ""
        if missing:
            problem = f"left the barrier before {_ranks(missing)} had called it"
        elif not unchanged and not overwrites:
            problem = "changed its argument x"
        elif want is not None:
            problem = _difference(example, result, want)
        if problem:
            problems[rank] = problem
    if problems or not same_bits or example.verb != "all_reduce":
        return problems
    first = bits(results[0][0])
    return {
        rank: "has other bits than rank 0: ranks must add in the same order"
        for rank, (result, _, _) in enumerate(results)
        if bits(result) != first
    }


def _difference(example: Example, got: Any, want: Any) -> str:
    """Return in words how a result differs from NumPy's; "" if it is right."""
    if isinstance(want, list):
        if not isinstance(got, list | tuple):
            return f"returned {_kind(got)}, expected a list of {len(want)} arrays"
        if len(got) != len(want):
            return f"returned {len(got)} arrays, expected {len(want)}"
        for src, (mine, right) in enumerate(zip(got, want, strict=True)):
            if problem := _difference(example, mine, right):
                return f"part {src}: {problem}"
        return ""
    if not isinstance(got, np.ndarray | np.generic):
        return f"returned {_kind(got)}, expected an array"
    got = np.asarray(got)
    if got.dtype != want.dtype:
        return f"returned dtype {got.dtype}, expected {want.dtype}"
    if got.shape != want.shape:
        return f"returned shape {got.shape}, expected {want.shape}"
    rounded = example.values == "rough" or example.op == "mean"
    if rounded and example.verb in REDUCING:
        wide = np.complex128 if want.dtype.kind == "c" else np.float64
        near = tolerance(example)
        right = np.isclose(
            got.astype(wide), want.astype(wide), rtol=near["rtol"], atol=near["atol"]
        )
    else:
        right = np.equal(got, want)
    if np.all(right):
        return ""
    place = tuple(int(index) for index in np.argwhere(~right)[0])
    element = f"[{', '.join(map(str, place))}]"
    wrong = int(np.size(right) - np.count_nonzero(right))
    tail = f"; {wrong} of {want.size} elements differ" if want.size > 1 else ""
    return f"element {element} is {got[place]}, NumPy has {want[place]}{tail}"


def _raised(error: Exception) -> tuple[str, list[str]]:
    """Return what an error of a run says of the collective: a title, and lines."""
    lines = [f"  {line}" for line in str(error).splitlines()]
    if isinstance(error, DeadlockError):
        return "does not end: ranks wait in vain", lines
    if isinstance(error, TimeoutError):
        return "does not end within the limit", lines
    if isinstance(error, CommError):
        return "sends messages that do not fit", [f"  {type(error).__name__}", *lines]
    return f"raised {type(error).__name__}", lines


# -------------------------------------------------------------------------------------------- text


def _text(example: Example, function: Callable[..., Any], title: str, lines: Sequence[str]) -> str:
    again = f"check_example({example!r}, {_name(function)})"
    return "\n".join(
        [f"{example.verb} {title}", f"  {_described(example)}", *lines, f"only this: {again}"]
    )


def _described(example: Example) -> str:
    """Return an example in words."""
    words = [f"{example.size} rank{'s' * (example.size > 1)}"]
    if example.world_ranks:
        words[0] += f", which are ranks {', '.join(map(str, example.world_ranks))} of the job"
    if example.verb == "barrier":
        words.append(f"rank {example.root} calls last")
    else:
        words += [f"root {example.root}"] * (example.verb in ROOTED)
        words += [f"op {example.op}"] * (example.verb in REDUCING)
        words += [example.dtype, _lengths(example), f"{example.layout} arrays"]
        words += [f"{example.values} values"] * (example.values != "whole")
    return ", ".join([*words, f"transport {example.transport}"])


def _lengths(example: Example) -> str:
    if example.verb == "all_to_all":
        return f"elements per part {example.lengths}"
    unit = "rows of 2" if example.verb in ("scatter", "gather", "all_gather") else "elements"
    if example.verb in ("scatter", "broadcast"):
        return f"{unit}: {example.lengths[example.root]}"
    if len(set(example.lengths)) == 1:
        return f"{unit} per rank: {example.lengths[0]}"
    return f"{unit} by rank: {' '.join(map(str, example.lengths))}"


def _arguments(example: Example, number: int) -> list[str]:
    """Return the arguments of call `number`, a line for each rank; none if they are long."""
    brought = {rank: argument(example, rank, number) for rank in range(example.size)}
    there = {rank: x for rank, x in brought.items() if x is not None}
    total = sum(
        sum(part.size for part in x) if isinstance(x, list) else x.size for x in there.values()
    )
    if total > MOST_SHOWN:
        return []
    return [
        f"  x of rank {rank}: {[p.tolist() for p in x] if isinstance(x, list) else x.tolist()}"
        for rank, x in there.items()
    ]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", "function"))
