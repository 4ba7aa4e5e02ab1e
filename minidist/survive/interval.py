"""The best save interval: short enough that little work is lost, long enough that saving costs
little.

    a segment:   work for `interval` seconds | save | work | save | …        an interruption loses the segment so far

A save of δ seconds every τ seconds costs the part δ / τ of the time. An interruption every M
seconds on average loses half a segment, τ / 2, so it costs τ / (2 M). The sum is smallest where
both are equal: τ = √(2 δ M), and then it is √(2 δ / M) of the time. More exactly, with
interruptions at random moments (exponential times between them), a segment with its save and R
seconds for each restart takes M exp(R / M) (exp((τ + δ) / M) - 1) seconds on average.

Source:  Young 1974, "A first order approximation to the optimum checkpoint interval"; Daly 2006, "A
         higher order estimate of the optimum checkpoint interval for restart dumps".
"""

import math

from minidist.errors import ConfigError


def best_interval(save: float, between: float) -> float:
    """Return √(2 δ M), in seconds of work between two saves.

    Args:    save: seconds for which a save stops the training (δ); between: mean seconds between
             interruptions (M).
    Raises:  ConfigError unless both are above 0.
    """
    _check(save=save, between=between)
    return math.sqrt(2 * save * between)


def steps_between(save: float, between: float, step: float) -> int:
    """Return the best interval in steps of `step` seconds; at least 1.

    Args and Raises: as in best_interval.
    """
    _check(step=step)
    return max(1, round(best_interval(save, between) / step))


def goodput(interval: float, *, save: float, between: float, restart: float = 0.0) -> float:
    """Return the average part of the time spent on work that is kept: between 0 and 1.

    Args:    interval: seconds of work between two saves; save, between: as in best_interval.
             restart: seconds from an interruption until work continues.
    Raises:  ConfigError unless all are above 0 (restart: at least 0).
    """
    _check(interval=interval, save=save, between=between)
    if not 0 <= restart < math.inf:
        raise ConfigError(f"goodput: restart is {restart!r}; seconds, at least 0")
    exponent = (interval + save) / between
    if exponent + restart / between > 700:  # beyond the range of exp: nothing is ever finished
        return 0.0
    return interval / (between * math.exp(restart / between) * math.expm1(exponent))


def _check(**seconds: float) -> None:
    for name, value in seconds.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"{name} is {value!r}; it must be a number of seconds above 0")
