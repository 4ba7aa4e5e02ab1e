"""Chapter 25 · A power cap: its cost in time and its saving in energy.

    watts of a processor at frequency f     static + dynamic f³             f = 1: without a cap
    seconds of a step                       work / f + rest                 rest: communication, which f does not change
    joules of a step                        static (work / f + rest) + dynamic f² work

Voltage falls with frequency, so the power of switching falls with f³, and the energy of an
operation with f². Static power (leakage, memory, fans) is used as long as the step lasts: too low a
frequency wastes it.

notes: N2 §10.7    Source: the classic CMOS power model, as in Mudge 2001, "Power: A First-Class
                   Architectural Design Constraint".
"""

from minidist.errors import ConfigError


def frequency_under(cap: float, *, static: float, dynamic: float) -> float:
    """Return the frequency at which a busy processor uses `cap` watts; at most 1.

    Raises:  ConfigError for a cap that is not above the static power.
    """
    if cap <= static:
        raise ConfigError(
            f"a cap of {cap:g} W: the processor uses {static:g} W even at rest; choose a larger cap"
        )
    return min(1.0, float(((cap - static) / dynamic) ** (1 / 3)))


def step_seconds(frequency: float, *, work: float, rest: float) -> float:
    """Return the seconds of a step; work: seconds of computation at frequency 1; rest: other
    seconds."""
    return work / frequency + rest


def step_joules(
    frequency: float, *, work: float, rest: float, static: float, dynamic: float
) -> float:
    """Return the joules of a step of one processor."""
    return static * step_seconds(frequency, work=work, rest=rest) + dynamic * frequency**2 * work


def best_frequency(*, static: float, dynamic: float) -> float:
    """Return the frequency of the least energy, at most 1: there a lower frequency wastes as much
    static energy as it saves."""
    return min(1.0, float((static / (2 * dynamic)) ** (1 / 3)))
