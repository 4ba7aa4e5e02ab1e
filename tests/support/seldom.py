"""What the tests of elastic local steps share: a run with changes of membership in one process, on
whole vectors."""

from typing import Any

import numpy as np
from local_steps import alone, new_model, vector_of, write_vector

from minidist.optim import AdamW


class Serial:
    """Every process's model and inner optimizer, and what they have in common.

    Args: every, fragments, delay, mix, lr, momentum: as of streaming DiLoCo; batch(step): the
    global batch.
    """

    def __init__(
        self,
        batch: Any,
        config: Any,
        *,
        every: int,
        fragments: int = 1,
        delay: int = 0,
        mix: float = 0.0,
        lr: float = 0.7,
        momentum: float = 0.9,
        inner_lr: float = 1e-2,
        clip: float | None = 1.0,
    ) -> None:
        self.batch = batch
        self.config = config
        self.inner_lr = inner_lr
        self.clip = clip
        self.between = every // fragments
        self.delay = delay
        self.mix = mix
        self.lr = lr
        self.momentum = momentum
        self.models: dict[int, Any] = {}
        self.inner: dict[int, AdamW] = {}
        self.merged: dict[int, int] = {}
        self.common = vector_of(new_model(config))
        self.speed = np.zeros_like(self.common)
        self.met = 0
        self.losses = dict[int, float]()
        edges = np.cumsum([0, *(len(part) for part in np.array_split(self.common, fragments))])
        self.places = [slice(start, stop) for start, stop in zip(edges, edges[1:], strict=False)]

    def join(self, process: int, teacher: int | None) -> None:
        """A new process: the common weights, and the inner state of another."""
        self.models[process] = new_model(self.config)
        write_vector(self.models[process], self.common)
        self.inner[process] = AdamW(self.models[process].parameters(), self.inner_lr)
        if teacher is not None:
            for slot, had in zip(self.inner[process].slots, self.inner[teacher].slots, strict=True):
                slot.steps = had.steps
                for name, array in slot.state.items():
                    array[...] = had.state[name]

    def meet(self, processes: list[int], shares: list[float]) -> None:
        """The next outer gradient of all: one outer step."""
        place = self.places[self.met % len(self.places)]
        gradient = sum(
            share * (self.common[place] - vector_of(self.models[process])[place])
            for process, share in zip(processes, shares, strict=True)
        )
        self.speed[place] = self.momentum * self.speed[place] + gradient
        self.common[place] -= self.lr * (gradient + self.momentum * self.speed[place])
        self.met += 1

    def mix_in(self, process: int, step: int) -> None:
        """All that is due after so many steps, of the meetings that were held."""
        while self.merged[process] < min(max(0, step - self.delay) // self.between, self.met):
            place = self.places[self.merged[process] % len(self.places)]
            vector = vector_of(self.models[process])
            vector[place] = self.mix * vector[place] + (1 - self.mix) * self.common[place]
            write_vector(self.models[process], vector)
            self.merged[process] += 1

    def part(self, begin: dict[str, Any], end: dict[str, Any]) -> None:
        """One generation: from its record to that of the next; of the last, with `met` of the end
        of the run."""
        processes = begin["processes"]
        step = begin["step"]
        size = len(begin["processes"])
        made = begin.get("made") or [None] * size
        assert self.met == begin.get("met", 0)
        teacher = next(
            (process for process, steps in zip(processes, made, strict=True) if steps is not None),
            None,
        )
        for process, steps in zip(processes, made, strict=True):
            if steps is None:
                self.join(process, teacher)
                self.merged[process] = min(max(0, step - self.delay) // self.between, self.met)
            self.mix_in(process, step)
        rows = [len(part) for part in np.array_split(np.arange(len(self.batch(0)[0])), size)]
        shares = [count / sum(rows) for count in rows]
        ends = {
            process: steps
            for process, steps in zip(end["processes"], end["made"], strict=True)
            if steps is not None
        }
        while self.met < step // self.between and self.met < end["met"]:
            self.meet(processes, shares)
        for process in processes:
            self.mix_in(process, step)
        for now in range(step + 1, end["step"] + 1):
            there = [
                rank
                for rank, process in enumerate(processes)
                if ends.get(process, end["step"]) >= now
            ]
            told = [
                alone(
                    self.models[processes[rank]],
                    self.inner[processes[rank]],
                    self.batch(now - 1),
                    size,
                    rank,
                    self.clip,
                )
                for rank in there
            ]
            self.losses[now] = sum(loss * share for loss, share in told) / sum(
                share for _, share in told
            )
            while self.met < min(now // self.between, end["met"]):
                assert len(there) == size
                self.meet(processes, shares)
            for rank in there:
                self.mix_in(processes[rank], now)


def replay(
    records: list[dict[str, Any]], steps: int, batch: Any, config: Any, **options: Any
) -> Serial:
    """The run whose generations have these records (step, processes, met, made): its common weights
    at the end."""
    run = Serial(batch, config, **options)
    last = {"step": steps, "met": steps // run.between, "processes": [], "made": []}
    for begin, end in zip(records, [*records[1:], last], strict=True):
        run.part(begin, end)
    return run
