"""Examples in a fixed order: every dtype over every transport."""

from collections.abc import Iterator, Sequence
from typing import Any

from minidist.testing.reference import (
    DTYPES,
    LAYOUTS,
    REDUCING,
    ROOTED,
    SIZES,
    TRANSPORTS,
    Example,
    check_verb,
    defined,
    dtype_of,
)

VALUES_OF = {"f": ("large", "rough"), "c": ("large", "rough")}
"""The values of each kind of dtype; of other kinds "large" and "whole"."""


def every_dtype(
    verb: str,
    *,
    sizes: Sequence[int] = SIZES,
    dtypes: Sequence[str] = DTYPES,
    ops: Sequence[str] = ("sum",),
    layouts: Sequence[str] = LAYOUTS,
    transports: Sequence[str] = TRANSPORTS,
    subgroups: bool = True,
) -> Iterator[Example]:
    """Yield examples that take every dtype over every transport, with sizes, ops, layouts, roots
    and lengths in turn.

        for example in every_dtype("broadcast", dtypes=("float32", "int8")):
            check_example(example, my_broadcast)

    Args:    verb: the collective. sizes, dtypes, ops, layouts, transports, subgroups: as
             check_collective; an op is defined for each dtype.
    Returns: an iterator of Example: two for each dtype and transport. No Hypothesis is needed.
    Raises:  ConfigError for another verb or a dtype that does not exist.
    """
    check_verb(verb)
    number = 0
    for transport in transports:
        for dtype in dtypes if verb != "barrier" else dtypes[:1]:
            for values in VALUES_OF.get(dtype_of(dtype).kind, ("large", "whole")):
                size = sizes[number % len(sizes)]
                some = [op for op in ops if defined(op, dtype)]
                length = (2 * size + 1, size + 2, 6, 1)[number % 4]
                yield Example(
                    verb,
                    size,
                    _uneven(verb, size, length),
                    dtype,
                    some[number % len(some)] if verb in REDUCING else "sum",
                    number % size if verb in (*ROOTED, "barrier") else 0,
                    layouts[number % len(layouts)],
                    values,
                    tuple(range(size, 0, -1)) if subgroups and number % 3 == 2 else (),
                    transport,
                )
                number += 1


def _uneven(verb: str, size: int, length: int) -> Any:
    if verb == "barrier":
        return (0,) * size
    if verb == "all_to_all":
        return tuple(
            tuple((length + src + 2 * dst) % 7 for dst in range(size)) for src in range(size)
        )
    if verb in ("gather", "all_gather"):
        return tuple((length + 2 * rank) % (length + 2) for rank in range(size))
    return (length,) * size
