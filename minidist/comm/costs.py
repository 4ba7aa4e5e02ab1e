"""What each algorithm sends, as formulas: messages and bytes, summed over all ranks. The ledger is held against them.

    formula = FORMULAS["all_reduce", "ring"]
    formula.nbytes, formula.bytes_of(Case(size=4, nbytes=4000))       # "2(P-1)n", 24000

They are exact, also where P does not divide n. Letters: P ranks, Q the largest power of two among the numbers up to P;
n the bytes of the array that each rank brings (or the root does); b_r the bytes of rank r's block, N their sum; p_rd
the bytes of the part from rank r for rank d.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minidist.comm.collectives.chunks import bounds


@dataclass(frozen=True)
class Case:
    """One call: what the formulas need to know of it.

    Attributes: size    P
                nbytes  n, for broadcast, reduce, all_reduce, reduce_scatter
                blocks  b_r: what each rank brings to a gather or all_gather, or gets from a scatter or reduce_scatter
                parts   p_rd, a list for each r: for all_to_all
                dims    how many dims each part has
                root    of the verbs that have one
    """

    size: int
    nbytes: int = 0
    blocks: Sequence[int] = ()
    parts: Sequence[Sequence[int]] = ()
    dims: int = 1
    root: int = 0

    @property
    def others(self) -> int:
        """P-1."""
        return self.size - 1

    @property
    def log(self) -> int:
        """ceil(log2 P)."""
        return self.others.bit_length()


    @property
    def core(self) -> int:
        """Q."""
        return 1 << (self.size.bit_length() - 1)

    @property
    def surplus(self) -> list[int]:
        """The ranks that halving and doubling fold into the ones before them."""
        return [2 * pair + 1 for pair in range(self.size - self.core)]


@dataclass(frozen=True)
class Formula:
    """Messages and bytes of one algorithm, to read and to compute; `steps`: how many messages wait for each other."""

    messages: str
    messages_of: Callable[[Case], int]
    nbytes: str
    bytes_of: Callable[[Case], int]
    steps: str


def chunk_bytes(length: int, itemsize: int, size: int) -> list[int]:
    """Bytes of each rank's chunk of an array of `length` elements, as reduce_scatter and scatter cut it."""
    edges = bounds(length, size)
    return [(stop - start) * itemsize for start, stop in zip(edges[:-1], edges[1:], strict=True)]


def _but_root(case: Case) -> int:
    return sum(case.blocks) - case.blocks[case.root]


def _leaving(case: Case) -> int:
    """Parts that do not stay where they are."""
    return sum(part for src, row in enumerate(case.parts) for dst, part in enumerate(row) if src != dst)


def _by_rank_0(case: Case) -> int:
    """Every part that leaves, once to rank 0 unless it is there, once from it unless it is for it."""
    return sum(part * ((src != 0) + (dst != 0))
               for src, row in enumerate(case.parts) for dst, part in enumerate(row) if src != dst)


def _halvings(case: Case) -> int:
    """Messages of the core that halves or doubles once, and of fold and unfold."""
    return case.core * (case.core.bit_length() - 1) + 2 * len(case.surplus)


def _surplus_twice(case: Case, whole: int) -> int:
    """P-1 times the whole, and the surplus ranks' blocks once more: folded in, or handed on."""
    return case.others * whole + sum(case.blocks[rank] for rank in case.surplus)


def _depths(head: int, first: int, behind: int) -> list[int]:
    """How deep each rank is in the tree of halves over ranks first to behind - 1, for which `head` speaks."""
    if behind - first == 1:
        return [0]
    middle = (first + behind + 1) // 2
    left = _depths(head if head < middle else first, first, middle)
    right = _depths(middle if head < middle else head, middle, behind)
    return [*left, *(1 + depth for depth in right)] if head < middle else [*(1 + depth for depth in left), *right]


def _by_depth(case: Case) -> int:
    return sum(block * depth for block, depth in zip(case.blocks, _depths(case.root, 0, case.size), strict=True))


def _jumps(case: Case) -> int:
    """Every part and its label, as often as the way it has to go has binary ones."""
    return sum((part + 8 + 8 * case.dims) * bin((dst - src) % case.size).count("1")
               for src, row in enumerate(case.parts) for dst, part in enumerate(row))


_ONE_EACH = ("P-1", lambda case: case.others)
_TWO_EACH = ("2(P-1)", lambda case: 2 * case.others)
_RING = ("P(P-1)", lambda case: case.size * case.others)
_WHOLE = ("(P-1)n", lambda case: case.others * case.nbytes)
_TWICE = ("2(P-1)n", lambda case: 2 * case.others * case.nbytes)
_BLOCKS = ("N - b_root", _but_root)
_DEEP = ("sum of b_r times r's depth in the tree of halves", _by_depth)
_LOG_EACH = ("P ceil(log2 P)", lambda case: case.size * case.log)
_HALVINGS = ("Q log2 Q + 2(P-Q)", _halvings)
_NO_BYTES = ("0", lambda case: 0)

FORMULAS: dict[tuple[str, str], Formula] = {
    ("broadcast", "naive"): Formula(*_ONE_EACH, *_WHOLE, "P-1"),
    ("broadcast", "tree"): Formula(*_ONE_EACH, *_WHOLE, "ceil(log2 P)"),
    ("broadcast", "ring"): Formula("(P-1)(P+1)", lambda case: case.others * (case.size + 1),
                                   "(P-2)n + b_root + sum of b_r times r's depth in the tree of halves",
                                   lambda case: _WHOLE[1](case) - _but_root(case) + _by_depth(case),
                                   "2 ceil(log2 P) + P-1"),
    ("reduce", "naive"): Formula(*_ONE_EACH, *_WHOLE, "P-1"),
    ("reduce", "tree"): Formula(*_ONE_EACH, *_WHOLE, "ceil(log2 P)"),
    ("all_reduce", "naive"): Formula(*_TWO_EACH, *_TWICE, "2(P-1)"),
    ("all_reduce", "tree"): Formula(*_TWO_EACH, *_TWICE, "2 ceil(log2 P)"),
    ("all_reduce", "ring"): Formula("2P(P-1)", lambda case: 2 * case.size * case.others, *_TWICE, "2(P-1)"),
    ("all_reduce", "direct"): Formula(*_RING, "P(P-1)n", lambda case: case.size * case.others * case.nbytes, "1"),
    ("all_reduce", "pairwise"): Formula("2P(P-1)", lambda case: 2 * case.size * case.others, *_TWICE, "2"),
    ("all_reduce", "doubling"): Formula(*_HALVINGS, "(Q log2 Q + 2(P-Q)) n",
                                        lambda case: _halvings(case) * case.nbytes, "log2 Q, +2 if P != Q"),
    ("all_reduce", "halving-doubling"): Formula(
        "2 Q log2 Q + 2(P-Q)", lambda case: 2 * _halvings(case) - 2 * len(case.surplus), *_TWICE,
        "2 log2 Q, +2 if P != Q"),
    ("gather", "naive"): Formula(*_ONE_EACH, *_BLOCKS, "P-1"),
    ("gather", "tree"): Formula(*_ONE_EACH, *_DEEP, "ceil(log2 P)"),
    ("all_gather", "naive"): Formula(*_TWO_EACH, "P N - b_0",
                                     lambda case: case.size * sum(case.blocks) - case.blocks[0],
                                     "2(P-1)"),
    ("all_gather", "ring"): Formula(*_RING, "(P-1)N", lambda case: case.others * sum(case.blocks), "P-1"),
    ("all_gather", "halving-doubling"): Formula(*_HALVINGS, "(P-1)N + b_r of the surplus ranks",
                                                lambda case: _surplus_twice(case, sum(case.blocks)),
                                                "log2 Q, +2 if P != Q"),
    ("scatter", "naive"): Formula(*_ONE_EACH, *_BLOCKS, "P-1"),
    ("scatter", "tree"): Formula(*_ONE_EACH, *_DEEP, "ceil(log2 P)"),
    ("reduce_scatter", "naive"): Formula(*_TWO_EACH, "P n - b_0", lambda case: case.size * case.nbytes - case.blocks[0],
                                         "2(P-1)"),
    ("reduce_scatter", "ring"): Formula(*_RING, *_WHOLE, "P-1"),
    ("reduce_scatter", "pairwise"): Formula(*_RING, *_WHOLE, "1"),
    ("reduce_scatter", "halving-doubling"): Formula(*_HALVINGS, "(P-1)n + b_r of the surplus ranks",
                                                    lambda case: _surplus_twice(case, case.nbytes),
                                                    "log2 Q, +2 if P != Q"),
    ("all_to_all", "naive"): Formula("2(P-1)^2", lambda case: 2 * case.others ** 2,
                                     "sum of p_rd over r != d, twice where neither is 0", _by_rank_0, "2(P-1)^2"),
    ("all_to_all", "pairwise"): Formula(*_RING, "sum of p_rd over r != d", _leaving, "P-1"),
    ("all_to_all", "bruck"): Formula(
        *_LOG_EACH, "sum of h (p_rd + 8 + 8 dims), h the binary ones of (d - r) mod P", _jumps, "ceil(log2 P)"),
    ("barrier", "naive"): Formula(*_TWO_EACH, *_NO_BYTES, "2(P-1)"),
    ("barrier", "dissemination"): Formula(*_LOG_EACH, *_NO_BYTES, "ceil(log2 P)"),
}
