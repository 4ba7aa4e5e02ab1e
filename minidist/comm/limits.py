"""Byte limits that algorithms, transports and cost formulas share."""

META_LIMIT = 4 << 10
"""Maximum bytes of a message's header (`meta`)."""

SHOWN_BYTES = 2 << 20
"""Maximum bytes that a rank shows at a time on a board (collectives/shared_memory.py)."""

SHOWN_WHOLE_BYTES = 256 << 10
"""Limit of the bytes (P-1)n that a rank reads from a board: up to this limit each rank adds whole
arrays, with one wait instead of two."""

STRETCH_BYTES = 4 << 20
"""Maximum bytes of an array that a ring all-reduce processes at a time: each step finds the sums of
the previous step in the cache."""
