"""Learning rates as plain functions of the step: `optimizer.step(lr=warmup_cosine(step, peak=3e-4, ...))`."""

import math

from minidist.errors import ConfigError


def constant(step: int, *, peak: float, warmup: int = 0) -> float:
    """Up in a straight line to `peak` over `warmup` steps, then the same rate for ever.

    Args:    step: from 0; the first has rate peak / warmup, the one of number warmup - 1 has `peak`.
    """
    return peak * min(1.0, (step + 1) / max(1, warmup))


def warmup_cosine(step: int, *, peak: float, warmup: int, total: int, floor: float = 0.0) -> float:
    """Up in a straight line to `peak` over `warmup` steps, then down along half a cosine to `floor` at step `total`.

    Args:    step: from 0; the first has rate peak / warmup, the one of number warmup - 1 has `peak`.
             total: number of steps; later ones have rate `floor`.
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
