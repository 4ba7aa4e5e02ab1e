"""The ranks that share a parameter, and a check that they hold the same weights: a digest of eight
bytes per rank."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from minidist.autograd.tensor import Parameter
from minidist.comm.group import Group
from minidist.device.backend import bytes_view, digested
from minidist.errors import MismatchError


def sharers(run: Sequence[Parameter], group: Group) -> Group:
    """Return the ranks of the data axis that share a run of parameters: `group`, unless `shared_by`
    of the run names others. (Not WeightShard.sharers: ranks of tp that hold the same key head.)"""
    shared: Group | None = run[0].shared_by
    return group if shared is None else shared


def check_equal_replicas(parameters: Iterable[Any], group: Group, *, when: str) -> None:
    """Compare a digest of the weights, or of masters, over the ranks that share them.

    Args:    group: the ranks that share a parameter, unless its `shared_by` names others; when: for
             the error.
    Cost:    one all-gather of 8 bytes per rank and group, counted under `control`; hashing reads
             every weight once.
    Raises:  MismatchError on every rank, naming the ranks whose weights differ from rank 0's.
    """
    hashes = {group.id: (group, hashlib.blake2b(digest_size=8))}
    for parameter in parameters:
        shared = sharers([parameter], group)
        digest = hashes.setdefault(shared.id, (shared, hashlib.blake2b(digest_size=8)))[1]
        digest.update(digested(parameter.data))
    for shared, digest in hashes.values():
        with shared.ledger.control():
            digests = shared.all_gather(np.frombuffer(digest.digest(), dtype=np.uint64))
        others = [rank for rank in range(shared.size) if digests[rank] != digests[0]]
        if others:
            raise MismatchError(
                f"{shared.axis} rank {shared.rank} of {shared.size}: {when}, the weights of "
                f"ranks {others} differ from rank 0's; replicas must start equal (give every "
                "rank the same seed) and reduce every gradient"
            )


def weights_digest(state: dict[str, np.ndarray]) -> str:
    """Return the SHA-256 over weights in the order of their names, as little-endian bytes without
    padding."""
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(
            bytes_view(np.ascontiguousarray(state[name], state[name].dtype.newbyteorder("<"))).data
        )
    return digest.hexdigest()
