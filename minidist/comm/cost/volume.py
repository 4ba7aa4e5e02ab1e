"""The messages and bytes of each algorithm as formulas, summed over all ranks. Tests compare the
ledger with them.

    formula = FORMULAS["all_reduce", "ring"]
    formula.nbytes, formula.bytes_of(Case(size=4, nbytes=4000))       # "2(P-1)n", 24000

They are exact, also where P does not divide n. Letters: P ranks, Q the largest power of two up to
P; n the bytes of the array that each rank (or the root) brings; b_r the bytes of rank r's block, N
their sum; p_rd the bytes of the part from rank r for rank d; M nodes, L the ranks of the largest,
R x C the grid of a torus; D dims of the box of torus-both, S the sum of its sides.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from minidist.comm.chunks import bounds
from minidist.comm.limits import SHOWN_BYTES, SHOWN_WHOLE_BYTES, STRETCH_BYTES


@dataclass(frozen=True)
class Case:
    """The values of one call in the formulas."""

    size: int  # P
    nbytes: int = 0  # n, for broadcast, reduce, all_reduce, reduce_scatter
    # b_r: the bytes that rank r brings to a gather, or gets from a (reduce_)scatter
    blocks: Sequence[int] = ()
    parts: Sequence[Sequence[int]] = ()  # p_rd, a list for each r: for all_to_all
    dims: int = 1  # of each part
    itemsize: int = 1  # bytes of an element: chunks are cut between elements (torus)
    nodes: Sequence[int] = ()  # the machine of each rank; empty: one machine
    root: int = 0
    lends: bool = False  # whether the ranks may read each other's memory (shared_memory.py)

    @property
    def others(self) -> int:
        """P-1."""
        return self.size - 1

    @property
    def core(self) -> int:
        """Q."""
        return 1 << (self.size.bit_length() - 1)

    @property
    def total(self) -> int:
        """N."""
        return sum(self.blocks)

    @property
    def leaders(self) -> list[int]:
        """The first rank of each node."""
        nodes = list(self.nodes or [0] * self.size)
        return [nodes.index(node) for node in sorted(set(nodes))]

    @property
    def grid(self) -> tuple[int, int]:
        """R, C."""
        rows = max(
            rows
            for rows in range(1, self.size + 1)
            if self.size % rows == 0 and rows * rows <= self.size
        )
        return rows, self.size // rows

    @property
    def box(self) -> tuple[int, int]:
        """D, S - D."""
        sides = box(self.size)
        return len(sides), sum(sides) - len(sides)

    @property
    def folded(self) -> int:
        """Bytes of the P-Q surplus ranks, which halving and doubling fold into the ranks before
        them: 1, 3, 5, ..."""
        return sum(self.blocks[1 : 2 * (self.size - self.core) : 2])


@dataclass(frozen=True)
class Formula:
    """The messages and bytes of one algorithm for at least two ranks, as text and as functions; a
    single rank sends nothing."""

    messages: str
    count: Callable[[Case], int]
    nbytes: str
    volume: Callable[[Case], int]
    steps: str  # number of messages that wait for each other

    def messages_of(self, case: Case) -> int:
        """Return the number of messages of all ranks."""
        return 0 if case.size == 1 else self.count(case)

    def bytes_of(self, case: Case) -> int:
        """Return the bytes that all ranks send."""
        return 0 if case.size == 1 else self.volume(case)


def chunk_bytes(length: int, itemsize: int, size: int) -> list[int]:
    """Return the bytes of each rank's chunk of an array of `length` elements, cut as in
    reduce_scatter and scatter."""
    edges = bounds(length, size)
    return [(stop - start) * itemsize for start, stop in pairwise(edges)]


def box(size: int) -> tuple[int, ...]:
    """Return the sides of torus-both's box, the largest last: the prime factors of `size`, two 2s
    as a 4; (3, 4) for 12."""
    sides: list[int] = []
    factor = 2
    while size > 1:
        if size % factor:
            factor += 1
            continue
        size //= factor
        if factor == 2 and sides[-1:] == [2]:
            sides[-1] = 4
        else:
            sides.append(factor)
    return tuple(sorted(sides))


def _travelling(case: Case) -> list[tuple[int, int, int]]:
    """Return (src, dst, bytes) of the parts that go to another rank."""
    return [
        (src, dst, part)
        for src, row in enumerate(case.parts)
        for dst, part in enumerate(row)
        if src != dst
    ]


def _leaving(case: Case) -> int:
    return sum(part for _, _, part in _travelling(case))


def _by_rank_0(case: Case) -> int:
    """Return the bytes of every part that leaves: once to rank 0 unless it is from rank 0, once
    from rank 0 unless it is for it."""
    return sum(part * ((src != 0) + (dst != 0)) for src, dst, part in _travelling(case))


def _halvings(case: Case) -> int:
    """Return the messages of the core for one halving or doubling, and of fold and unfold."""
    return case.core * (case.core.bit_length() - 1) + 2 * (case.size - case.core)


def _depths(head: int, first: int, behind: int) -> list[int]:
    """Return the depth of each rank in the tree of halves over ranks first to behind - 1, whose
    root is `head`."""
    if behind - first == 1:
        return [0]
    middle = (first + behind + 1) // 2
    left = _depths(head if head < middle else first, first, middle)
    right = _depths(middle if head < middle else head, middle, behind)
    return (
        [*left, *(1 + depth for depth in right)]
        if head < middle
        else [*(1 + depth for depth in left), *right]
    )


def _by_depth(case: Case) -> int:
    return sum(
        block * depth
        for block, depth in zip(case.blocks, _depths(case.root, 0, case.size), strict=True)
    )


def _jumps(case: Case) -> int:
    """Return the bytes of every part with its label, once per binary one of its distance."""
    return sum(
        (part + 8 + 8 * case.dims) * ((dst - src) % case.size).bit_count()
        for src, dst, part in _travelling(case)
    )


def _not_leaders(case: Case) -> int:
    return case.total - sum(case.blocks[leader] for leader in case.leaders)


_ONE_EACH = ("P-1", lambda case: case.others)
_TWO_EACH = ("2(P-1)", lambda case: 2 * case.others)
_RING = ("P(P-1)", lambda case: case.size * case.others)
_WHOLE = ("(P-1)n", lambda case: case.others * case.nbytes)
_TWICE = ("2(P-1)n", lambda case: 2 * case.others * case.nbytes)
_BLOCKS = ("N - b_root", lambda case: case.total - case.blocks[case.root])
_TO_ALL = ("(P-1)N", lambda case: case.others * case.total)
_LEADERS = (
    "2(P-M) + P(M-1)",
    lambda case: 2 * (case.size - len(case.leaders)) + case.size * (len(case.leaders) - 1),
)
_GRID = ("P(R+C-2)", lambda case: case.size * (sum(case.grid) - 2))
_DEEP = ("sum of b_r times r's depth in the tree of halves", _by_depth)
_LOG_EACH = ("P ceil(log2 P)", lambda case: case.size * case.others.bit_length())
_HALVINGS = ("Q log2 Q + 2(P-Q)", _halvings)
_NO_BYTES = ("0", lambda case: 0)


def _stretches(nbytes: int) -> int:
    """Return the number of stretches in which a ring all-reduce sends `nbytes` bytes."""
    return max(1, -(-nbytes // STRETCH_BYTES))


def _torus(case: Case) -> int:
    """Return the messages of reduce-scatter and all-gather in each row, and of the all-reduce of a
    row's chunk in each column."""
    rows, columns = case.grid
    chunks = chunk_bytes(case.nbytes // case.itemsize, case.itemsize, columns)
    return 2 * case.size * (columns - 1) + sum(
        2 * rows * (rows - 1) * _stretches(chunk) for chunk in chunks
    )


def _piece(case: Case) -> int:
    return SHOWN_BYTES // case.others & -64


def _shown(case: Case, nbytes: int, piece: int | None = None) -> int:
    """Return the messages of all ranks that show `nbytes` in pieces (default SHOWN_BYTES), at least
    one per rank."""
    return case.size * max(1, -(-nbytes // (piece or SHOWN_BYTES)))


def _shown_blocks(case: Case) -> int:
    longest = max(case.blocks, default=0)
    return _shown(case, min(longest, 2 * SHOWN_BYTES) if case.lends else longest)


def _shown_parts(case: Case) -> int:
    """Return the messages that show all parts: with their labels, if they fit; else separately."""
    leaving = [
        [part for dst, part in enumerate(row) if dst != src] for src, row in enumerate(case.parts)
    ]
    longest = max(
        (
            max(parts)
            for parts in leaving
            if sum(parts) + case.others * (8 + 8 * case.dims) > SHOWN_BYTES
        ),
        default=0,
    )
    return case.size * (1 + (min(longest, 1) if case.lends else -(-longest // _piece(case))))


def _native(
    messages: str,
    count: Callable[[Case], int],
    nbytes: str,
    volume: Callable[[Case], int],
    steps: str = "ceil(log2 P) + 1",
) -> Formula:
    """Return the formula of a native algorithm: A = P ceil(log2 P) messages to agree, and the
    messages and bytes handed to the library."""
    return Formula(
        f"A + {messages}, A = P ceil(log2 P)",
        lambda case: _LOG_EACH[1](case) + count(case),
        nbytes,
        volume,
        steps,
    )


_FROM_EACH = ("P", lambda case: case.size, "P n", lambda case: case.size * case.nbytes)
_TOLD = ("P", lambda case: case.size)
_JOINED = ("2P", lambda case: 2 * case.size, "8P + N", lambda case: 8 * case.size + case.total)

FORMULAS: dict[tuple[str, str], Formula] = {
    ("broadcast", "naive"): Formula(*_ONE_EACH, *_WHOLE, "P-1"),
    ("broadcast", "tree"): Formula(*_ONE_EACH, *_WHOLE, "ceil(log2 P)"),
    ("broadcast", "ring"): Formula(
        "(P-1)(P+1)",
        lambda case: case.others * (case.size + 1),
        "(P-2)n + b_root + sum of b_r times r's depth in the tree of halves",
        lambda case: _WHOLE[1](case) - _BLOCKS[1](case) + _by_depth(case),
        "2 ceil(log2 P) + P-1",
    ),
    ("broadcast", "hierarchical"): Formula(*_ONE_EACH, *_WHOLE, "ceil(log2 M) + ceil(log2 L)"),
    ("reduce", "naive"): Formula(*_ONE_EACH, *_WHOLE, "P-1"),
    ("reduce", "tree"): Formula(*_ONE_EACH, *_WHOLE, "ceil(log2 P)"),
    ("reduce", "hierarchical"): Formula(*_ONE_EACH, *_WHOLE, "ceil(log2 L) + ceil(log2 M)"),
    ("all_reduce", "naive"): Formula(*_TWO_EACH, *_TWICE, "2(P-1)"),
    ("all_reduce", "tree"): Formula(*_TWO_EACH, *_TWICE, "2 ceil(log2 P)"),
    ("all_reduce", "ring"): Formula(
        "2P(P-1) ceil(n / 4 MiB)",
        lambda case: 2 * case.size * case.others * _stretches(case.nbytes),
        *_TWICE,
        "2(P-1) ceil(n / 4 MiB)",
    ),
    ("all_reduce", "direct"): Formula(
        *_RING, "P(P-1)n", lambda case: case.size * case.others * case.nbytes, "1"
    ),
    ("all_reduce", "pairwise"): Formula(
        "2P(P-1)", lambda case: 2 * case.size * case.others, *_TWICE, "2"
    ),
    ("all_reduce", "doubling"): Formula(
        *_HALVINGS,
        "(Q log2 Q + 2(P-Q)) n",
        lambda case: _halvings(case) * case.nbytes,
        "log2 Q, +2 if P != Q",
    ),
    ("all_reduce", "halving-doubling"): Formula(
        "2 Q log2 Q + 2(P-Q)",
        lambda case: 2 * _halvings(case) - 2 * (case.size - case.core),
        *_TWICE,
        "2 log2 Q, +2 if P != Q",
    ),
    ("all_reduce", "hierarchical"): Formula(
        "2(P-M) + 2M(M-1) ceil(n / 4 MiB)",
        lambda case: (
            2 * (case.size - len(case.leaders))
            + 2 * len(case.leaders) * (len(case.leaders) - 1) * _stretches(case.nbytes)
        ),
        *_TWICE,
        "2 ceil(log2 L) + 2(M-1) ceil(n / 4 MiB)",
    ),
    ("all_reduce", "torus"): Formula(
        "2P(C-1) + 2P(R-1) ceil(n/C / 4 MiB)", _torus, *_TWICE, "2(C-1) + 2(R-1) ceil(n/C / 4 MiB)"
    ),
    ("all_reduce", "torus-both"): Formula(
        "4 P D (S-D)", lambda case: 4 * case.size * case.box[0] * case.box[1], *_TWICE, "2(S-D)"
    ),
    ("gather", "naive"): Formula(*_ONE_EACH, *_BLOCKS, "P-1"),
    ("gather", "tree"): Formula(*_ONE_EACH, *_DEEP, "ceil(log2 P)"),
    ("all_gather", "naive"): Formula(
        *_TWO_EACH, "P N - b_0", lambda case: case.size * case.total - case.blocks[0], "2(P-1)"
    ),
    ("all_gather", "ring"): Formula(*_RING, *_TO_ALL, "P-1"),
    ("all_gather", "halving-doubling"): Formula(
        *_HALVINGS,
        "(P-1)N + b_r of the surplus ranks",
        lambda case: case.others * case.total + case.folded,
        "log2 Q, +2 if P != Q",
    ),
    ("all_gather", "hierarchical"): Formula(
        *_LEADERS,
        "(P-1)N + b_r of all but leaders",
        lambda case: case.others * case.total + _not_leaders(case),
        "L-1 + P - P/M + ceil(log2 L)",
    ),
    ("all_gather", "torus"): Formula(*_GRID, *_TO_ALL, "R+C-2"),
    ("scatter", "naive"): Formula(*_ONE_EACH, *_BLOCKS, "P-1"),
    ("scatter", "tree"): Formula(*_ONE_EACH, *_DEEP, "ceil(log2 P)"),
    ("reduce_scatter", "naive"): Formula(
        *_TWO_EACH, "P n - b_0", lambda case: case.size * case.nbytes - case.blocks[0], "2(P-1)"
    ),
    ("reduce_scatter", "ring"): Formula(*_RING, *_WHOLE, "P-1"),
    ("reduce_scatter", "pairwise"): Formula(*_RING, *_WHOLE, "1"),
    ("reduce_scatter", "halving-doubling"): Formula(
        *_HALVINGS,
        "(P-1)n + b_r of the surplus ranks",
        lambda case: case.others * case.nbytes + case.folded,
        "log2 Q, +2 if P != Q",
    ),
    ("reduce_scatter", "hierarchical"): Formula(
        *_LEADERS,
        "(P-1)n + b_r of all but leaders",
        lambda case: case.others * case.nbytes + _not_leaders(case),
        "ceil(log2 L) + 2",
    ),
    ("reduce_scatter", "torus"): Formula(*_GRID, *_WHOLE, "R+C-2"),
    ("all_to_all", "naive"): Formula(
        "2(P-1)^2",
        lambda case: 2 * case.others**2,
        "sum of p_rd over r != d, twice where neither is 0",
        _by_rank_0,
        "2(P-1)^2",
    ),
    ("all_to_all", "pairwise"): Formula(*_RING, "sum of p_rd over r != d", _leaving, "1"),
    ("all_to_all", "bruck"): Formula(
        *_LOG_EACH,
        "sum of h (p_rd + 8 + 8 dims), h the binary ones of (d - r) mod P",
        _jumps,
        "ceil(log2 P)",
    ),
    ("barrier", "naive"): Formula(*_TWO_EACH, *_NO_BYTES, "2(P-1)"),
    ("barrier", "dissemination"): Formula(*_LOG_EACH, *_NO_BYTES, "ceil(log2 P)"),
    ("broadcast", "native"): _native(*_TOLD, "n", lambda case: case.nbytes, "2 ceil(log2 P) + 1"),
    ("reduce", "native"): _native(*_FROM_EACH),
    ("all_reduce", "native"): _native(*_FROM_EACH),
    ("gather", "native"): _native(*_JOINED, "ceil(log2 P) + 2"),
    ("all_gather", "native"): _native(*_JOINED, "ceil(log2 P) + 2"),
    ("scatter", "native"): _native(*_TOLD, "n", lambda case: case.total, "2 ceil(log2 P) + 1"),
    ("reduce_scatter", "native"): _native(*_FROM_EACH),
    ("all_to_all", "native"): _native(
        "2P",
        lambda case: 2 * case.size,
        "8P^2 + sum of p_rd + 8 + 8 dims over r != d",
        lambda case: (
            _leaving(case) + 8 * case.size**2 + case.size * case.others * (8 + 8 * case.dims)
        ),
        "ceil(log2 P) + 2",
    ),
    ("all_reduce", "shared"): Formula(
        "P ceil(n / 2 MiB), or 2P ceil(n / 2 MiB) if (P-1)n > 256 KiB",
        lambda case: (
            (1 + (case.others * case.nbytes > SHOWN_WHOLE_BYTES)) * _shown(case, case.nbytes)
        ),
        "Pn",
        lambda case: case.size * case.nbytes,
        "2 ceil(n / 2 MiB)",
    ),
    ("reduce_scatter", "shared"): Formula(
        "P ceil(ceil(n/P) / (2 MiB / (P-1)))",
        lambda case: _shown(case, max(case.blocks), _piece(case)),
        "(P-1)n",
        lambda case: case.others * case.nbytes,
        "ceil(ceil(n/P) / (2 MiB / (P-1)))",
    ),
    ("all_gather", "shared"): Formula(
        "P ceil(max b_r / 2 MiB), at most 2P if ranks lend",
        _shown_blocks,
        "N",
        lambda case: case.total,
        "ceil(max b_r / 2 MiB), at most 2 if ranks lend",
    ),
    ("broadcast", "shared"): Formula(
        "P ceil(n / 2 MiB)",
        lambda case: _shown(case, case.nbytes),
        "n",
        lambda case: case.nbytes,
        "ceil(n / 2 MiB)",
    ),
    ("all_to_all", "shared"): Formula(
        "P; if any rank's parts exceed 2 MiB: 2P if ranks lend, else P + P ceil(max p_rd / (2 "
        "MiB / (P-1)))",
        _shown_parts,
        "sum of p_rd + 8 + 8 dims over r != d",
        lambda case: _leaving(case) + case.size * case.others * (8 + 8 * case.dims),
        "1; 2; 1 + ceil(...)",
    ),
    ("barrier", "shared"): Formula("P", lambda case: case.size, *_NO_BYTES, "1"),
    ("barrier", "native"): _native("P", lambda case: case.size, *_NO_BYTES),
}
