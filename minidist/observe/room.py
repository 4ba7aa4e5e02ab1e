"""A lower bound of the memory that training takes, by formula, before any array is made
(console.require_memory).

A job that it refuses cannot run on this machine. A job that it accepts may still be too large: most
activations are not counted.
"""

from minidist.device import backend
from minidist.nn import GPTConfig
from minidist.parallel.hybrid.plan import Plan
from minidist.parallel.zero.memory_formula import Each, state_bytes

BLOCK_BYTES = 8 << 10  # bytes of the Python objects of a block, without its numbers
# bytes per token of the global batch, which every rank draws: its place, input and target
TOKEN_BYTES = 16


def training_bytes(config: GPTConfig, plan: Plan, sequences: int, *, moments: int = 2) -> int:
    """Return the least bytes that all ranks together hold: weights, gradients, optimizer state,
    logits and batches.

    Args:    sequences: per step of the whole job; moments: number of arrays of the weights' size
             that the optimizer keeps.
    """
    itemsize = backend.dtype(config.dtype if plan.precision == "fp32" else "float16").itemsize
    each = Each.of(itemsize, moments=moments, masters=plan.precision != "fp32")
    tokens = sequences * config.context
    # on disk, until the end of the run: then every rank has the weights whole
    if plan.offload == "all":
        each = Each(itemsize, 0, 0)
    elif plan.local_steps is not None:  # the rank's own weights and the common weights
        each = each._replace(parameters=2 * itemsize)
    elif plan.strategy != "ddp":  # servers divide the optimizer's state
        each = each._replace(optimizer=0)
    zero = 0 if plan.offload == "all" else plan.zero
    experts = config.expert_numbers
    state = 0.0
    for numbers, copies in ((config.numbers - experts, plan.copies), (experts, plan.dp * plan.cp)):
        shard = plan.shard if copies == plan.copies else None
        state += copies * state_bytes(numbers, each, zero=zero, ranks=copies, shard=shard)["total"]
    at_once = tokens // (plan.accumulate * plan.pieces)
    kept = at_once * itemsize * (config.vocabulary + config.layers * config.width)
    return int(
        state * plan.replicas
        + kept
        + plan.size * tokens * TOKEN_BYTES
        + config.layers * BLOCK_BYTES
    )
