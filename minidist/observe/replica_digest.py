"""Chapter 25 · Digests of the weights that ranks hold alike, for the records of steps; no message
is sent for them.

Ranks of a group whose digests of one step differ have drifted apart: minidist diagnose compares
them.
"""

import hashlib
from typing import Any

from minidist.device.backend import digested
from minidist.parallel.hybrid.hybrid import Trainer
from minidist.parallel.step.replicas import sharers


def replica_digests(trainer: Trainer) -> dict[str, str]:
    """{group, as a few letters: digest of the weights that its ranks hold whole and alike}.

    Empty where ranks hold none alike: ZeRO-3, workers that meet seldom or are asynchronous,
    servers, one rank alone.
    Cost:    reads every weight of this rank once.
    """
    plan = trainer.plan
    strategy = trainer.strategy
    if (
        plan.zero == 3
        or plan.offload == "all"
        or plan.local_steps is not None
        or strategy.asynchronous
        or plan.strategy != "ddp"
    ):
        return {}
    axis: Any = strategy.data_axis
    group = getattr(axis, "group", None)
    if group is None:
        return {}
    hashes: dict[str, Any] = {}
    for parameter in trainer.model.parameters():
        shared = sharers([parameter], group)
        if shared.size > 1 and (parameter.size <= 1 or any(parameter.data.strides)):
            key = f"{shared.axis}.{shared.id & 0xFFFF:x}"
            hashes.setdefault(key, hashlib.blake2b(digest_size=6)).update(digested(parameter.data))
    return {key: digest.hexdigest() for key, digest in hashes.items()}
