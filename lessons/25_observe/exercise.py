"""Exercise 25: five sick jobs, and the rule that names the culprit of each.

Copy this file (`minidist lesson 25 --copy DIR`), replace each `hole(...)` by your own code, and
grade it: `minidist check 25 DIR/exercise_25.py`. The check makes jobs that you have not seen, sick
and healthy ones, of two to eight ranks. What you may use:

    np.sort(x, axis=1), x.argmax(axis=1), np.diff(x), np.median(x), np.quantile(x, part)
    np.bincount(ranks, minlength=size)      how often each rank occurs
"""

import numpy as np

from minidist.grading import hole


def plain_behind(calls):
    """Return the ranks that the others wait for; calls: {rank: the number of its last call}."""
    newest = max(calls.values())
    return hole(
        1,
        "30 of 32 ranks are in call 640, two are in 641: which ranks hold up the job?",
        calls,
        newest,
    )


def plain_waited_for(arrivals, share=0.2, most=0.5):
    """Return the rank that is late in most steps; arrivals (steps, ranks): when each rank arrived
    at the call of the step."""
    ordered = np.sort(arrivals, axis=1)
    step = np.median(np.diff(ordered[:, -1]))  # seconds
    delay = hole(
        2, "for how long does only the last rank hold up the others, in each step?", ordered
    )
    last = hole(
        3,
        "in each step held up by more than its share: which rank arrived last?",
        arrivals,
        delay,
        share * step,
    )
    times = np.bincount(last, minlength=arrivals.shape[1])
    return int(times.argmax()) if times.max() > most * len(arrivals) else None


def plain_slow_link(seconds, times=2.0):
    """Return the link whose messages take `times` as long as those of most others; seconds: {(src,
    dst): seconds of its messages}."""
    quick = {
        link: hole(4, "what can this link do? Some messages are late for other reasons", some)
        for link, some in seconds.items()
    }
    slowest = max(quick, key=lambda link: quick[link])
    usual = np.median([value for link, value in quick.items() if link != slowest])
    return slowest if quick[slowest] > times * usual else None


def plain_growth(memory):
    """Return the bytes per step by which a rank's memory grows in most steps; memory (steps,):
    bytes after each step."""
    return hole(5, "a leak, and not one large array", memory)


def plain_first_bad(bad):
    """Return the rank and layer of the first number that is not finite; bad: (step, moment, rank,
    layer) of all ranks."""
    return hole(6, "whose was the first? There may be none", bad)


def joules(frequency, work, rest, static, dynamic):
    """Return the joules of a step at a frequency, as in section 6.

    Args:    work: seconds of computation at frequency 1; rest: other seconds; static, dynamic:
             watts.
    """
    return hole(
        7,
        "static watts for the whole step, dynamic f³ while it computes",
        frequency,
        work,
        rest,
        static,
        dynamic,
    )
