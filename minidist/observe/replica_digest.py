"""Chapter 25 · Digests of replicated weights, for the records of steps.

No message is sent for them: minidist diagnose compares the digests. Different digests of one step
in a group mean that its replicas differ.
"""

import hashlib
from typing import Any

from minidist.device.backend import digested
from minidist.parallel.hybrid.hybrid import Trainer
from minidist.parallel.step.replicas import sharers


def replica_digests(trainer: Trainer) -> dict[str, str]:
    """Return {short name of a group: digest of the weights of which each of its ranks has a whole
    replica}.

    Empty if there are no replicas that must be equal: ZeRO-3, offload=all, local steps,
    asynchronous workers, parameter servers, a single rank.
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
