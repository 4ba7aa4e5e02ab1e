"""Learning rates as plain functions of the step: `optimizer.step(lr=warmup_cosine(step, peak=3e-4,
...))`.

Each rises linearly to `peak` in `warmup` steps. What follows, with T steps in all:

    constant              peak
    warmup_cosine         half a cosine down to `floor` at T
    linear                a line down to `floor` at T
    inverse_square_root   peak · √(warmup / step), counted from 1; it needs no T
    stable_decay          peak, and in the last `decay` steps a line down to `floor`
                          (warm-up-stable-decay, WSD)
    step_decay            peak · factor after `every` steps, peak · factor² after twice as many, …

`LearningRate` is one of them by name, as `Trainer(lr_schedule=…)` and `minidist train
--lr-schedule` take it.

Source:  Goyal et al. 2017 (warm-up); Loshchilov & Hutter 2017 (cosine); Vaswani et al. 2017
         (inverse square root); Hu et al. 2024, "MiniCPM" (warm-up-stable-decay).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from minidist.errors import ConfigError


def constant(step: int, *, peak: float, warmup: int = 0) -> float:
    """Return a learning rate that rises linearly to `peak` over `warmup` steps and then stays.

    Args:    step: from 0; step 0 has the rate peak / warmup, step warmup - 1 has `peak`.
    """
    return peak * min(1.0, (step + 1) / max(1, warmup))


def warmup_cosine(step: int, *, peak: float, warmup: int, total: int, floor: float = 0.0) -> float:
    """Return a learning rate that rises linearly to `peak` over `warmup` steps, then falls along
    half a cosine to `floor`.

    Args:    as constant's; total: the number of steps; later ones have the rate `floor`.
    Raises:  ConfigError if the warm-up is longer than the run.
    """
    if step < _checked(warmup, total):
        return constant(step, peak=peak, warmup=warmup)
    if step >= total:
        return floor
    done = (step - warmup) / (total - warmup)
    return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * done))


def linear(step: int, *, peak: float, warmup: int, total: int, floor: float = 0.0) -> float:
    """Return a learning rate that rises linearly to `peak` over `warmup` steps, then falls along a
    line to `floor`."""
    return stable_decay(
        step,
        peak=peak,
        warmup=warmup,
        total=total,
        decay=total - _checked(warmup, total),
        floor=floor,
    )


def inverse_square_root(step: int, *, peak: float, warmup: int) -> float:
    """Return a learning rate that rises linearly to `peak` over `warmup` steps, then falls as 1 /
    √(step + 1).

    Args:    as constant's; without a warm-up step 0 has `peak`.
    """
    return constant(step, peak=peak, warmup=warmup) * min(
        1.0, math.sqrt(max(1, warmup) / (step + 1))
    )


def stable_decay(
    step: int, *, peak: float, warmup: int, total: int, decay: int, floor: float = 0.0
) -> float:
    """Return a learning rate that rises linearly to `peak`, stays, and falls along a line in the
    last `decay` steps.

    Args:    as warmup_cosine's; step total - decay is the last with `peak`, step `total` has
             `floor`.
    Raises:  ConfigError if warm-up and decay together are longer than the run.
    """
    _checked(warmup, total)
    if not 0 <= decay <= total - warmup:
        raise ConfigError(
            f"learning rate: a decay of {decay} steps does not fit a run of {total} with a "
            f"warm-up of {warmup}; choose between 0 and {total - warmup}"
        )
    if step <= total - decay and step < total:
        return constant(step, peak=peak, warmup=warmup)
    return floor if step >= total else floor + (peak - floor) * (total - step) / decay


def step_decay(
    step: int, *, peak: float, every: int, factor: float = 0.1, warmup: int = 0
) -> float:
    """Return a learning rate that rises linearly to `peak`, and is multiplied by `factor` each
    `every` steps after that.

    Args:    as constant's.
    """
    if step < warmup:
        return constant(step, peak=peak, warmup=warmup)
    return peak * float(factor) ** ((step - warmup) // every)


def _checked(warmup: int, total: int) -> int:
    """Return the warm-up. Raises: ConfigError if it is longer than the run."""
    if not 0 <= warmup <= total:
        raise ConfigError(
            f"learning rate: a warm-up of {warmup} steps does not fit a run of {total}; "
            f"choose between 0 and {total}"
        )
    return warmup


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """The rate of each step, by the name of its schedule: `LearningRate(name="linear", peak=1e-3,
    total=100)(step)`.

    Attributes: name: one of LR_SCHEDULES; peak, warmup: as above; total: steps of the run, needed
    by those of ENDING.
                floor: the rate at the end, as a share of the peak, for those of ENDING.
                decay: of wsd: number of last steps that decay (None: a fifth of all).
                every, factor: of step: number of steps per rate (None: a third of all), and the
                factor between two rates.
    Raises:     ConfigError for an unknown name, and for numbers that do not fit.
    """

    name: str = "constant"
    peak: float
    warmup: int = 0
    total: int | None = None
    floor: float = 0.1
    decay: int | None = None
    every: int | None = None
    factor: float = 0.1

    def __post_init__(self) -> None:
        if self.name not in LR_SCHEDULES:
            raise ConfigError(f"lr_schedule {self.name!r}: choose one of {', '.join(LR_SCHEDULES)}")
        if self.total is None and (
            self.name in ENDING or (self.name == "step" and self.every is None)
        ):
            raise ConfigError(
                f"lr_schedule {self.name!r}: it depends on the number of steps; pass steps="
            )
        if (
            not 0.0 <= self.floor <= 1.0
            or not 0.0 < self.factor <= 1.0
            or (self.every is not None and self.every < 1)
        ):
            raise ConfigError(
                f"lr_schedule {self.name!r}: floor={self.floor}, factor={self.factor}, "
                f"every={self.every}: choose a floor from 0 to 1, a factor above 0 up to 1, "
                "every from 1"
            )
        self(0)

    def __call__(self, step: int) -> float:
        """Return the rate of update number `step`, counted from 0."""
        return LR_SCHEDULES[self.name](self, step)

    def extended(self, total: int) -> "LearningRate":
        """Return the rate of the same training with another number of steps: only the end moves.

        Numbers that followed from the number of steps stay as they were: the warm-up, the last
        steps of wsd, the steps that a rate of `step` lasts. So no step warms up a second time.
        Cosine and linear fall more slowly to the same floor, so the rate of a step after the
        warm-up changes: `minidist train --resume` reports the jump.

        Args:    total: steps of the whole run, not fewer than before.
        """
        changed: dict[str, Any] = {"total": total}
        if self.name == "wsd":
            changed["decay"] = self.last_steps
        if self.name == "step":
            changed["every"] = self.steps_a_rate
        return replace(self, **changed)

    @property
    def ending(self) -> dict[str, Any]:
        """Return the arguments of the schedules that end at a known step."""
        return {
            "peak": self.peak,
            "warmup": self.warmup,
            "total": self.total or 0,
            "floor": self.floor * self.peak,
        }

    @property
    def last_steps(self) -> int:
        """Return the number of steps in which wsd decays."""
        total = self.total or 0
        return (
            min(-(-total // 5), max(0, total - self.warmup)) if self.decay is None else self.decay
        )

    @property
    def steps_a_rate(self) -> int:
        """Return the number of steps that one rate of `step` lasts."""
        return self.every or max(1, (self.total or 0) // 3)


LR_SCHEDULES: dict[str, Callable[[LearningRate, int], float]] = {
    "constant": lambda rate, step: constant(step, peak=rate.peak),
    "cosine": lambda rate, step: warmup_cosine(step, **rate.ending),
    "linear": lambda rate, step: linear(step, **rate.ending),
    "inverse-sqrt": lambda rate, step: inverse_square_root(
        step, peak=rate.peak, warmup=rate.warmup
    ),
    "wsd": lambda rate, step: stable_decay(step, decay=rate.last_steps, **rate.ending),
    "step": lambda rate, step: step_decay(
        step, peak=rate.peak, warmup=rate.warmup, factor=rate.factor, every=rate.steps_a_rate
    ),
}
"""The schedules by name; constant has no warm-up."""

ENDING = ("cosine", "linear", "wsd")
"""Those that end at a known step."""
