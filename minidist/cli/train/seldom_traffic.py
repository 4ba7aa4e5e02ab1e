"""Traffic of local steps (ranks that synchronize rarely): what all exchanges of a run sent, by
formula."""

from typing import Any, cast

from minidist.comm.cost.volume import FORMULAS, Case
from minidist.parallel.compress.local_steps import LocalSteps
from minidist.parallel.hybrid.hybrid import Trainer


def formula(trainer: Trainer) -> dict[str, Any]:
    """Return bytes and messages of all ranks and steps.

    A compression scheme's messages are those of its two-phase exchange.
    """
    strategy = cast(LocalSteps, trainer.strategy)
    sent = 0
    messages = 0
    times = strategy.sends(trainer.steps_before, trainer.steps_done)
    for call, often, fragment in zip(
        strategy.traffic(trainer.plan.accumulate), times, strategy.fragments, strict=True
    ):
        case = Case(size=call.group.size, nbytes=call.nbytes)
        ranks = call.group.size
        by_ring = FORMULAS[call.verb, trainer.plan.algorithm]
        sent += often * (by_ring.bytes_of(case) if call.sent is None else call.sent)
        messages += often * (
            by_ring.messages_of(case)
            if call.sent is None
            else 2 * ranks * (ranks - 1) * len(fragment.stretches)
        )
    return {"sent_bytes": sent, "messages": messages, "buckets": len(times)}
