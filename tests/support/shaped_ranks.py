"""Ranks of `minidist bench compress` without processes: a virtual clock, and losses by a
formula."""

from typing import Any

from minidist.bench.compress.advise import LocalStep

PLAIN_STEP = LocalStep(0.10, 3.2e6, 8, [0.06, 0.08], [3, 1])
SIGN_STEP = LocalStep(0.13, 1e5, 8, [0.07, 0.10], [3, 1])


class ShapedRanks:
    """Two ranks, the second a little faster. Args: steps: of each way over a link of no time, by
    its name."""

    def __init__(self, steps: dict[str, LocalStep], losses: dict[str, float] | None = None) -> None:
        self.steps = steps
        self.losses = losses or {}
        self.opened: list[tuple[str, bool]] = []
        self.done = 0

    def ask(self, what: str, **question: Any) -> list[Any]:
        """The answers of both."""
        if what == "open":
            self.way = question["way"].partition(":")[0]
            self.done = 0
            self.opened.append((question["way"], question.get("timed", False)))
            return [{"parameters": 1000}] * 2
        if what == "loss":
            return [4.0 - self.losses[self.way] * self.done] * 2
        return [self._steps(**question), {**self._steps(**question, faster=0.9), "moments": []}]

    def _steps(
        self, steps: int, alpha: float = 0.0, beta: float = 0.0, faster: float = 1.0
    ) -> dict[str, Any]:
        """Return what Training.run returns: bucket i leaves when it is ready and the port is
        free."""
        step = self.steps[self.way]
        self.done += steps if faster == 1.0 else 0
        free = 0.0
        for ready, size in zip(step.moments, step.sizes, strict=True):
            part = size / sum(step.sizes)
            free = max(free, ready) + part * (step.messages * alpha + step.nbytes * beta)
        seconds = step.seconds + free - max(step.moments, default=0.0)
        return {
            "seconds": [faster * seconds] * steps,
            "nbytes": steps * step.nbytes,
            "messages": steps * step.messages,
            "moments": list(step.moments),
            "sizes": list(step.sizes),
        }
