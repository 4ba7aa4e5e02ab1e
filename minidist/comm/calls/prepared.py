"""The part of a call that stays the same when the program repeats the call: the algorithm, and the
bytes of the header. A training step repeats nearly all of its calls.

    prepared = group.prepared.get(key)      # key: the verb, its options, the line of the program,
                                            # dtype and shape of the arrays
    if prepared is None:
        prepared = prepare(group.id, ...)   # after the arguments are checked
        group.prepared.keep(key, prepared)
    Call(group, prepared, work)             # with the next number; the arrays are in `work`

It holds no array, no number of a call, and nothing about other ranks: the header of each arriving
message is compared in every call.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np

from minidist.comm.signature import Shape, Signature, dtype_code

_MOST = 1000  # maximum number of prepared calls that a group keeps


class PreparedCall(NamedTuple):
    """A call before it has a number and arrays.

    Fields: verb to where   of its signature (signature.py)
            header          its header without the first 8 bytes, which are the call's number
            function        the algorithm
    """

    verb: str
    algorithm: str
    op: str | None
    root: int | None
    dtype: str | None
    shape: Shape | None
    where: str
    header: bytes
    function: Callable[..., Any]


class PreparedCalls(dict[Hashable, PreparedCall]):
    """The prepared calls of one group, at most _MOST."""

    def keep(self, key: Hashable, prepared: PreparedCall) -> None:
        """Add a prepared call. If the group already keeps _MOST calls, remove all of them first."""
        if len(self) >= _MOST:
            self.clear()
        self[key] = prepared


def prepare(
    group: int,
    verb: str,
    algorithm: str,
    function: Callable[..., Any],
    where: str,
    *,
    op: str | None = None,
    root: int | None = None,
    dtype: np.dtype | None = None,
    shape: Shape | None = None,
) -> PreparedCall:
    """Return a prepared call of the group with the id `group`, made at the line `where` of the
    program.

    Raises: DtypeError for a dtype that cannot be sent.
    """
    code = None if dtype is None else dtype_code(dtype)
    key, packed_where = Signature(group, 0, verb, algorithm, op, root, code, shape, where).pack()
    return PreparedCall(
        verb, algorithm, op, root, code, shape, where, key[8:] + packed_where, function
    )
