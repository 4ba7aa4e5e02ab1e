"""Chapter 21 · Streaming DiLoCo: the weights travel in fragments, behind the steps.

The idea. DiLoCo sends little on the whole, but all of it at once, while every rank waits. So the
weights are cut into F fragments, which travel one after the other over the H steps of a period: the
link needs 1/F of the speed. And no rank waits: the sum of a fragment may be on its way for τ steps
more, and is then mixed into weights that were trained meanwhile.

    H=6, F=3, τ=1     step 1   2   3   4   5   6   7   8   9
    fragment 0 (f=0)         send  mix               send  mix      after steps H·k + (f+1)·H/F, and
                                                                    τ steps later
    fragment 1                       send  mix
    fragment 2                               send  mix

    outer gradient    the common fragment, as its last outer step left it, minus this rank's
    mixed in          own = α · own + (1-α) · common

With F = 1, τ = 0, α = 0 it is DiLoCo. A fragment is a slice of the vector of all weights, so that
all are equal in size to one element; the paper takes whole layers.

Cost: the bytes of DiLoCo, spread over the period; the peak is 1/F. F all-reduces a period in place
of one: on a ring 2(P-1) messages a rank for each stretch of at most 4 MiB of each fragment
(collectives/ring.py). So F fragments take F times the messages of DiLoCo where all weights are at
most 4 MiB, and fewer than that where they are larger. In flight: the fragments that left in the
last τ steps.

notes:   N2 §11.2, §11.4
Source:  Douillard et al. 2025, "Streaming DiLoCo with overlapping communication" (2501.18512).
"""

from typing import Any

from minidist.comm.group import Group
from minidist.errors import ConfigError
from minidist.nn import Module
from minidist.parallel.compress.local_steps import LocalSteps


def fragment_sent(step: int, every: int, fragments: int) -> int | None:
    """Return the fragment that is sent after local step `step` (from 1), or None: f after steps
    H·k + (f+1)·H/F."""
    turn, rest = divmod(step, every // fragments)
    return None if rest or turn < 1 else (turn - 1) % fragments


class StreamingLocalSteps(LocalSteps):
    """LocalSteps whose weights travel in fragments.

    Args:    fragments: F; delay: τ, after how many steps the common weights are mixed in; mix: α,
             how much of a rank's own weights then stays. The others: as LocalSteps.
    Raises:  ConfigError if F does not divide the period, or a fragment would set out again before
             it is mixed in.
    """

    def __init__(
        self,
        model: Module,
        group: Group,
        *,
        every: int,
        fragments: int = 1,
        delay: int = 0,
        mix: float = 0.0,
        **options: Any,
    ) -> None:
        if not 0 <= delay < every:
            raise ConfigError(
                f"delay {delay}: a fragment must be mixed in before it is sent again, {every} "
                f"steps later; choose 0 to {every - 1}"
            )
        if not 0 <= mix < 1:
            raise ConfigError(
                f"mix {mix}: it is the part of a rank's own weights that stays; choose 0 to less "
                "than 1"
            )
        super().__init__(model, group, every=every, fragments=fragments, **options)
        self.delay = delay
        self.mix = mix

    def _meet(self, row_fraction: float) -> None:
        """After a step: send the fragment whose turn it is, and mix in the one that left `delay`
        steps ago."""
        sent = fragment_sent(self.steps, self.every, len(self.fragments))
        if sent is not None:
            self._send(self.fragments[sent], row_fraction)
        landed = fragment_sent(self.steps - self.delay, self.every, len(self.fragments))
        if landed is not None:
            self._merge(self.fragments[landed], self.mix)

    def sends(self, first: int, last: int) -> list[int]:
        count = len(self.fragments)
        between = self.every // count

        def sent(step: int, number: int) -> int:
            """Return how often fragment `number` was sent in steps 1 to `step`."""
            return (step // between + count - 1 - number) // count

        return [sent(last, number) - sent(first, number) for number in range(count)]
