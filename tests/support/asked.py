"""A call as a rank asks for it, for tests that price calls without a trace."""

from typing import NamedTuple


class Asked(NamedTuple):
    """The fields of a GroupCall that its cost depends on."""

    verb: str
    nbytes: int
    algorithm: str = "native"
    blocks: tuple[int, ...] = ()
    itemsize: int = 2
    dims: int = 1
