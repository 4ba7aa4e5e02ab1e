"""The header of a call's messages: its content, and the check against headers of other calls."""

import warnings

from minidist.comm.calls.members import Members
from minidist.comm.signature import BlockHeader, Signature, behind_key, mismatch, unpack
from minidist.errors import MismatchError


class CallHeader:
    """The header of one call, `meta`: its key, which is the same on all ranks, and its line in the
    program."""

    def __init__(self, signature: Signature, group: Members, key: bytes, meta: bytes) -> None:
        """Args: key, meta: the first part of signature.pack(), and both parts joined."""
        self.signature = signature
        self._group = group
        self._key = key
        self.meta = meta

    def block_in(self, meta: bytes, src: int) -> BlockHeader | None:
        """Return the block that a message's header describes, if any. Raises: as compare()."""
        if not meta.startswith(self.meta):
            self.compare(meta, src)
        return (
            behind_key(meta[len(self._key) :])[1] if meta.startswith(self._key) else unpack(meta)[1]
        )

    def compare(self, meta: bytes, src: int) -> None:
        """Raise MismatchError for the header of another call. Warn if two calls differ only in
        their lines in the program and their order differs between ranks."""
        here = self.signature.where
        group = self._group
        if meta.startswith(self._key):
            there = behind_key(meta[len(self._key) :])[0]
        else:
            theirs = unpack(meta)[0]
            if not theirs.agrees(self.signature):
                raise self.mismatch(meta, src)
            there = theirs.where
        if here != there and group.guard.crossed(self._key[8:], src, here, there):
            warnings.warn(
                f"rank {group.world_rank} at {here} is paired with rank {group.world_ranks[src]} "
                "at "
                f"{there} in {self.signature.verb}, but an earlier call paired these places the "
                "other way round: if the ranks make these two calls in different orders, their "
                "values are mixed; give each call its own group (split), or make both calls in "
                "one place",
                RuntimeWarning,
                stacklevel=2,
            )

    def mismatch(self, meta: bytes, src: int) -> MismatchError:
        """Return the error for a header of another call, sent by rank `src`."""
        group = self._group
        return self.refusal(
            mismatch(self.signature, group.world_rank, unpack(meta)[0], group.world_ranks[src])
        )

    def refusal(self, error: MismatchError) -> MismatchError:
        """Return `error`, after a report to all ranks of the group: some may receive from no rank
        that disagrees."""
        self._group.transport.waits.disagree(str(error), self._group.world_ranks)
        return error
