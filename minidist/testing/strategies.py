"""Strategies of Hypothesis for tests of code that communicates. Draw in the main thread; the ranks
run inside the test.

    @given(x=strategies.arrays(), size=strategies.sizes())
    def test_a_broadcast_keeps_every_array(x, size):
        for result in md.run(lambda world: world.broadcast(x), size=size):
            assert result.dtype == x.dtype and np.array_equal(result, x)

The simplest value of each strategy comes first, because Hypothesis shrinks towards it.
"""

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from minidist.comm.collectives.select import ALGORITHMS
from minidist.testing.reference import (
    DTYPES,
    EVERY_DTYPE,
    LAYOUTS,
    ONLY_ON,
    REDUCING,
    ROOTED,
    SIZES,
    TRANSPORTS,
    VALUES,
    Example,
    check_verb,
    defined,
    dtype_of,
    laid_out,
    numbers,
)

LONG = 5003


def sizes(among: Sequence[int] = SIZES) -> st.SearchStrategy[int]:
    """Draw the number of ranks of a group.

    Args:    among: the sizes to draw from.
    Returns: a strategy of int.
    """
    return st.sampled_from(among)


def dtypes(among: Sequence[str] = EVERY_DTYPE) -> st.SearchStrategy[str]:
    """Draw the name of a dtype of NumPy or ml_dtypes, also in the other byte order.

    Args:    among: the names to draw from.
    Returns: a strategy of str; minidist.testing.reference.dtype_of makes a dtype of it.
    """
    return st.sampled_from(among)


def layouts(among: Sequence[str] = LAYOUTS) -> st.SearchStrategy[str]:
    """Draw how an array lies in memory: plain, strided, read-only, transposed.

    Args:    among: the layouts to draw from.
    Returns: a strategy of str.
    """
    return st.sampled_from(among)


def transports(among: Sequence[str] = TRANSPORTS) -> st.SearchStrategy[str]:
    """Draw a transport: "threads", or "threads-unbuffered", whose send waits for its receive.

    Args:    among: the transports to draw from; any that `minidist.run` takes.
    Returns: a strategy of str.
    """
    return st.sampled_from(among)


def algorithms(verb: str, transport: str = "threads") -> st.SearchStrategy[str]:
    """Draw an algorithm of one of Group's verbs, for its argument `algorithm=`.

    Args:    verb: "all_reduce", "broadcast", … transport: the algorithms that it has.
    Returns: a strategy of str.
    Raises:  ConfigError for another verb.
    """
    check_verb(verb)
    return st.sampled_from(
        [name for name in ALGORITHMS[verb] if transport in ONLY_ON.get(name, (transport,))]
    )


def lengths(size: int) -> st.SearchStrategy[int]:
    """Draw the number of elements of an array: lengths at which chunks are empty or uneven, a few
    elements per rank, up to LONG elements.

    Args:    size: number of ranks that divide the array.
    Returns: a strategy of int.
    """
    edges = sorted({0, 1, size - 1, size, size + 1, 2 * size, 7, 31, 127})
    return st.one_of(st.sampled_from(edges), st.integers(0, 3 * size), st.integers(0, LONG))


def splits(size: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw how many elements each rank has, mostly uneven; ranks may have none.

    Args:    size: number of ranks.
    Returns: a strategy of tuples of `size` integers.
    """
    return st.lists(lengths(size), min_size=size, max_size=size).map(tuple)


def groups(size: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw which ranks of a job are the ranks 0, 1, … of a group, in any order.

    Args:    size: number of ranks of the group.
    Returns: a strategy of tuples: () for the whole job, else `size` ranks of a job of at most
             size + 2.
    """
    some = st.permutations(range(size + 2)).map(lambda ranks: tuple(ranks[:size]))
    return st.one_of(st.just(()), some)


@st.composite
def arrays(
    draw: st.DrawFn,
    dtype: str | None = None,
    layout: str | None = None,
    length: int | None = None,
) -> np.ndarray:
    """Draw an array of one or two dims.

    Args:    dtype: its name; None: any of EVERY_DTYPE. layout: None: any of LAYOUTS.
             length: number of elements; None: any.
    Returns: a strategy of arrays. Numbers are small and whole, over the whole range of the dtype,
             or random floats.
    """
    kind = draw(dtypes()) if dtype is None else dtype
    count = draw(lengths(4)) if length is None else length
    values = draw(st.sampled_from([name for name in VALUES if _takes(kind, name)]))
    example = Example("all_gather", 1, (count,), kind, values=values)
    flat = numbers(example, draw(st.integers(0, 9)), count)
    columns = draw(st.sampled_from([n for n in (1, 2, 3) if count % n == 0]))
    shaped = flat if columns == 1 else flat.reshape(-1, columns)
    return laid_out(shaped, draw(layouts()) if layout is None else layout)


@st.composite
def examples(
    draw: st.DrawFn,
    verb: str,
    *,
    sizes: Sequence[int] = SIZES,
    dtypes: Sequence[str] = DTYPES,
    ops: Sequence[str] = ("sum",),
    layouts: Sequence[str] = LAYOUTS,
    transports: Sequence[str] = TRANSPORTS,
    subgroups: bool = True,
) -> Example:
    """Draw one call of a verb on all ranks of a group, for check_example.

        @given(example=strategies.examples("all_reduce", dtypes=("float32",)))
        def test_all_reduce(example):
            check_example(example, my_all_reduce)

    Args:    verb: "all_reduce", "broadcast", … sizes, dtypes, ops, layouts, transports: what to
             draw from. subgroups: whether a group may have some ranks of the job, in any order.
    Returns: a strategy of Example.
    Raises:  ConfigError for another verb (when it draws).
    """
    check_verb(verb)
    size = draw(st.sampled_from(sizes))
    if verb in REDUCING:
        dtypes = [name for name in dtypes if any(defined(op, name) for op in ops)]
    dtype = draw(st.sampled_from(dtypes))
    op = "sum"
    values = [name for name in VALUES if _takes(dtype, name)]
    if verb in REDUCING:
        op = draw(st.sampled_from([name for name in ops if defined(name, dtype)]))
    return Example(
        verb,
        size,
        _lengths_of(draw, verb, size),
        dtype,
        op,
        draw(st.integers(0, size - 1)) if verb in (*ROOTED, "barrier") else 0,
        draw(st.sampled_from(layouts)),
        draw(st.sampled_from(values)),
        draw(groups(size)) if subgroups else (),
        draw(st.sampled_from(transports)),
    )


def _lengths_of(draw: st.DrawFn, verb: str, size: int) -> tuple[object, ...]:
    if verb == "barrier":
        return (0,) * size
    if verb == "all_to_all" and size <= 5:
        row = st.lists(st.integers(0, 40), min_size=size, max_size=size).map(tuple)
        return tuple(draw(row) for _ in range(size))
    if verb == "all_to_all":  # few draws for many parts
        base = draw(lengths(size))
        more = draw(st.integers(0, 7))
        return tuple(
            tuple(base + more * (src + 2 * dst) for dst in range(size)) for src in range(size)
        )
    if verb in ("gather", "all_gather") and draw(st.booleans()):
        return draw(splits(size))
    return (draw(lengths(size)),) * size


def _takes(dtype: str, values: str) -> bool:
    return values != "rough" or dtype_of(dtype).kind not in "biu"
