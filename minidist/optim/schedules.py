"""Learning rates as plain functions of the step: `optimizer.step(lr=warmup_cosine(step, peak=3e-4, ...))`."""

import math

from minidist.errors import ConfigError


def constant(step: int, *, peak: float, warmup: int = 0) -> float:
    """A learning rate that rises linearly to `peak` over `warmup` steps and then stays.

    Args:    step: from 0; step 0 has the rate peak / warmup, step warmup - 1 has `peak`.
    """
    return peak * min(1.0, (step + 1) / max(1, warmup))


def warmup_cosine(step: int, *, peak: float, warmup: int, total: int, floor: float = 0.0) -> float:
    """A learning rate that rises linearly to `peak` over `warmup` steps, then falls along half a cosine to `floor`.

    Args:    as constant's; total: the number of steps; later ones have the rate `floor`.
    Raises:  ConfigError if the warm-up is longer than the run.
    Source:  Loshchilov & Hutter 2017 (cosine), Goyal et al. 2017 (warm-up).
    """
    if not 0 <= warmup <= total:
        raise ConfigError(f"learning rate: a warm-up of {warmup} steps does not fit a run of {total}; "
                          f"choose between 0 and {total}")
    if step < warmup:
        return constant(step, peak=peak, warmup=warmup)
    if step >= total:
        return floor
    done = (step - warmup) / (total - warmup)
    return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * done))
