"""Byte limits that algorithms, transports and cost formulas share."""

META_LIMIT = 4 << 10
"""Most bytes of a message's header (`meta`)."""

SHOWN_BYTES = 2 << 20
"""Most bytes that a rank shows at a time on a board (collectives/shared_memory.py)."""

SHOWN_WHOLE_BYTES = 256 << 10
"""While a rank reads no more than this, (P-1)n, of a board, it adds whole arrays: one wait instead
of two."""

STRETCH_BYTES = 4 << 20
"""Most bytes of an array that a ring all-reduce sends round at a time: each step finds the last
one's sums in cache."""
