"""What Hypothesis draws, for several test modules. Drawn once, in the main thread; the ranks run
inside."""

from collective_checker import LAYOUTS, REDUCING, ROOTED, Drawn
from hypothesis import given
from hypothesis import strategies as st

OPS = ("sum", "mean", "max", "min", "prod")
DTYPES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint64",
    "bool",
    "complex64",
    "complex128",
    "longdouble",
    ">u2",
    ">i4",
    ">f2",
    ">f4",
    ">f8",
    ">c16",
)
FLOATS = ("float32", "float64", "float16", "bfloat16", ">f2", ">f4", ">f8")


def lengths(size: int) -> st.SearchStrategy[int]:
    """Elements of an array: those at which chunks are empty or uneven, primes, and some
    thousands."""
    edges = sorted({0, 1, size - 1, size, size + 1, 2 * size, 7, 31, 127})
    return st.one_of(
        st.sampled_from(edges), st.integers(0, 3 * size), st.sampled_from((1009, 4096, 5003))
    )


@st.composite
def calls(draw: st.DrawFn, verb: str, algorithm: str, transport: str) -> Drawn:
    """One call of `verb`, of any size, lengths, dtype, op, root, layout and way of getting the
    result."""
    size = draw(st.integers(1, 9))
    rough = verb in REDUCING and draw(st.booleans())
    op = draw(st.sampled_from(OPS)) if verb in REDUCING else "sum"
    if rough:
        dtype = draw(st.sampled_from((*FLOATS, "complex64", "complex128")))
    else:
        dtype = draw(
            st.sampled_from(
                DTYPES if op != "mean" else (*FLOATS, "complex64", "complex128", "longdouble")
            )
        )
    how = "new" if verb == "barrier" else draw(st.sampled_from(("new", "out", "start")))
    if verb == "all_reduce" and draw(st.booleans()):
        how = "in place"
    layout = draw(
        st.sampled_from([name for name in LAYOUTS if name != "read-only" or how != "in place"])
    )
    if verb == "all_to_all" and size > 5:
        base = draw(lengths(size))
        more = draw(st.integers(0, 7))
        drawn = [[base + more * (src + 2 * dst) for dst in range(size)] for src in range(size)]
    elif verb == "all_to_all":
        drawn = draw(
            st.lists(
                st.lists(st.integers(0, 40), min_size=size, max_size=size),
                min_size=size,
                max_size=size,
            )
        )
    elif verb in ("gather", "all_gather") and draw(st.booleans()):
        drawn = draw(st.lists(lengths(size), min_size=size, max_size=size))
    else:
        drawn = [draw(lengths(size))] * size
    nodes = (
        draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
        if algorithm == "hierarchical"
        else ()
    )
    root = draw(st.integers(0, size - 1)) if verb in ROOTED else 0
    return Drawn(
        verb, algorithm, size, drawn, dtype, op, root, layout, how, rough, nodes, transport
    )


any_zero_job = given(
    size=st.integers(1, 5),
    accumulate=st.integers(1, 3),
    options=st.fixed_dictionaries(
        {
            "sequences": st.integers(1, 9),
            "bucket_bytes": st.sampled_from([1, 500, 1 << 20]),
            "optimizer": st.sampled_from(["adamw", "adam", "sgd"]),
            "clip": st.sampled_from([None, 0.1]),
            "frozen": st.sampled_from([(), ("tokens.weight", "blocks.0.mlp.up.bias")]),
            "changes": st.fixed_dictionaries({"tied": st.booleans(), "layers": st.just(1)}),
        }
    ),
)
"""Decorates tests of ZeRO-1 and ZeRO-2: uneven parts and shards, ranks without a row, accumulation, tied and frozen
weights."""
