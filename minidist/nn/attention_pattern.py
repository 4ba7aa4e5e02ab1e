"""Attention patterns: which blocks of keys a block of queries sees. A block is SIDE = 64 tokens.

With i the number of a query's block, j that of a key's, and N a multiple of 64, a pattern shows
block j to block i:

    local:N      if i - N/64 < j <= i       the last N/64 blocks, the query's own among them: a
                                            window of N tokens
    global:G     if j < G and j <= i        the first G blocks of the sequence
    strided:N    if (i - j) % (N/64) == 0   its own block, and the ones that lie N, 2N, 3N, … tokens
                                            before it
    rows:R/R/…   if bit j of row i is set   any pattern: a hexadecimal number for each block of
                                            queries
    A+B          if A or B shows it

Within a block that is shown, a query sees the keys up to its own token. So a pattern is a causal
mask in steps of 64 tokens, the same for all heads and layers. On the command line `block:FILE`
becomes `rows:…` (read_pattern), so that a checkpoint does not depend on a file.

    local:128     block 0 1 2 3 4      local:64+global:1  0 1 2 3 4      strided:128  0 1 2 3 4
    queries 0           #                                 #                           #
            1           # #                               # #                           #
            2             # #                             #   #                       #   #
            3               # #                           #     #                       #   #
            4                 # #                         #       #                   #   #   #

notes:   N3 §3.2 (N3:52)
Source:  Child et al. 2019, "Generating Long Sequences with Sparse Transformers" (local and
         strided); Beltagy et al. 2020, "Longformer" (local and global).
"""

from functools import lru_cache

import numpy as np

from minidist.autograd.ops.block_sparse import SIDE
from minidist.errors import ConfigError, ShapeError
from minidist.files import read_regular

MOST_BYTES = 64 << 20  # of a file of a pattern
NAMES = ("local", "strided", "global")
DIGITS = 16  # a number of as many is none
SPELLINGS = "local:N, strided:N, global:G, rows:R/R/… or several of them joined by +"


def check_pattern(pattern: str, context: int) -> None:
    """Check the spelling, and that each block of a context of `context` tokens sees a key.

    Raises:  ConfigError, one line.
    """
    for term in pattern.split("+"):
        name, _, value = term.partition(":")
        if name == "rows":
            _check_rows(value, _count(context))
            continue
        if name not in NAMES:
            raise ConfigError(
                f"attention pattern {pattern!r}: {term!r} is not a pattern; write {SPELLINGS}"
            )
        number = int(value) if value.isascii() and value.isdigit() and len(value) < DIGITS else 0
        if name == "global" and number < 1:
            raise ConfigError(
                f"attention pattern {pattern!r}: {term!r} needs a number of blocks, at least 1, "
                "for example global:2"
            )
        if name != "global" and (number < SIDE or number % SIDE):
            near = max(1, round(number / SIDE)) * SIDE
            raise ConfigError(
                f"attention pattern {pattern!r}: {term!r} needs a number of tokens that is a "
                f"multiple of {SIDE}; write {name}:{near}"
            )
    blind = np.flatnonzero(~pattern_blocks(pattern, context).any(axis=1))
    if len(blind):
        raise ConfigError(
            f"attention pattern {pattern!r}: block {blind[0]} of the queries attends to no block "
            "of keys at or before its own; let it attend to at least one"
        )


def _check_rows(value: str, count: int) -> None:
    """Raise ConfigError unless these are `count` hexadecimal numbers, none of them with a bit after
    its own."""
    rows = value.split("/")
    for number, row in enumerate(rows):
        if not row or set(row) - set("0123456789abcdef"):
            raise ConfigError(
                f"attention pattern rows: row {number} is {row!r}; expected a hexadecimal number "
                "in lower case, for example 1f"
            )
        if int(row, 16) >> (number + 1):
            raise ConfigError(
                f"attention pattern rows: row {number} shows a block after block {number}; "
                "attention is causal, so set these bits to 0"
            )
    if len(rows) < count:
        raise ConfigError(
            f"attention pattern rows: {len(rows)} rows, but the context has {count} blocks of "
            f"{SIDE} tokens; give one row per block"
        )


@lru_cache(maxsize=32)
def pattern_blocks(pattern: str, tokens: int) -> np.ndarray:
    """Return which block of queries sees which block of keys in a sequence: (n, n) bool, n =
    ceil(tokens / 64), read-only.

    Args:    pattern: checked (check_pattern). tokens: a shorter sequence sees the top left part of
             the same mask.
    Cost:    n² bytes, kept for the last 32 patterns and lengths.
    Raises:  ShapeError if the sequence is longer than the rows of `rows`.
    """
    count = _count(tokens)
    query = np.arange(count)[:, None]
    key = np.arange(count)
    shown = np.zeros((count, count), bool)
    for term in pattern.split("+"):
        name, _, value = term.partition(":")
        if name == "local":
            shown |= key > query - int(value) // SIDE
        elif name == "strided":
            shown |= (query - key) % (int(value) // SIDE) == 0
        elif name == "global":
            shown |= key < int(value)
        else:
            shown |= _rows(value, count)
    shown &= key <= query
    shown.flags.writeable = False
    return shown


def _rows(value: str, count: int) -> np.ndarray:
    """Return the first `count` rows and columns of a mask in hexadecimal: (count, count) bool."""
    rows = value.split("/")
    if len(rows) < count:
        raise ShapeError(
            f"attention pattern rows: a sequence of {count} blocks of {SIDE} tokens is longer than "
            f"the {len(rows)} rows of the pattern; shorten it, or give a pattern with more rows"
        )
    nbytes = -(-count // 8)
    words = b"".join(
        (int(row, 16) & ((1 << count) - 1)).to_bytes(nbytes, "little") for row in rows[:count]
    )
    bits = np.unpackbits(
        np.frombuffer(words, np.uint8).reshape(count, nbytes), axis=1, bitorder="little"
    )
    return bits[:, :count].astype(bool)


def scores_computed(pattern: str, tokens: int) -> int:
    """Return the number of scores that a head computes in a sequence, in tiles of 64 × 64 cut at
    its end; keys after a query count too."""
    blocks = pattern_blocks(pattern, tokens)
    sizes = np.full(len(blocks), SIDE)
    sizes[-1:] -= len(blocks) * SIDE - tokens
    return int(sizes @ blocks @ sizes)


def shown_pattern(pattern: str) -> str:
    """Return a pattern for people: rows are counted, not listed: "rows (512)+global:2"."""
    return "+".join(
        f"rows ({term.count('/') + 1})" if term.startswith("rows:") else term
        for term in pattern.split("+")
    )


def read_pattern(text: str) -> str:
    """Return the pattern that the command line names: `block:FILE` becomes `rows:…`, all else
    stays.

    A line of the file is a block of queries, from the first on; its k-th character is 1 if these
    queries see block k of the keys, else 0. Characters after the block's own, above the diagonal,
    are 0 or left out. Blanks do not count.
    Raises:  ConfigError if the file cannot be read, or holds something else.
    """
    terms = [
        _from_file(term.removeprefix("block:")) if term.startswith("block:") else term
        for term in text.split("+")
    ]
    return "+".join(terms)


def _from_file(name: str) -> str:
    try:
        lines = read_regular(name, most=MOST_BYTES).decode("ascii").split("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"attention pattern block:{name}: {getattr(error, 'strerror', None) or 'no text'}; "
            f"give a file of the digits 0 and 1, with one line per {SIDE} queries"
        ) from error
    rows = ["".join(line.split()) for line in lines if line.strip()]
    for number, row in enumerate(rows):
        if set(row) - {"0", "1"}:
            raise ConfigError(
                f"attention pattern block:{name}: line {number + 1} is {row[:20]!r}; use only the "
                f"digits 0 and 1, one character per {SIDE} keys"
            )
    if not rows:
        raise ConfigError(
            f"attention pattern block:{name}: the file is empty; write one line per {SIDE} queries"
        )
    return "rows:" + "/".join(f"{int(row[::-1], 2):x}" for row in rows)


def _count(tokens: int) -> int:
    return -(-tokens // SIDE)
