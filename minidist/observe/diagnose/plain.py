"""Chapter 25 · Diagnosis, plainly: five rules, each for one kind of faulty job. A rule names the
rank, link or growth that is at fault.

The idea. Faulty jobs look the same from outside: all ranks wait in the same call. The records of
the ranks show the difference, if a rule looks for the cause and not for the symptom:

    a hang          the ranks that have not entered the newest call; the ranks in it only wait for
                    them
    a slow rank     the rank that enters calls last; it waits least, so the longest waits are on the
                    other ranks
    a slow link     the time of a message after both ends were ready, by the fastest messages
    a leak          growth in most steps; a large amount of memory is not a fault
    a NaN           the first one; the others follow from it

The other modules of this folder have the same rules, with more that real jobs need: groups and
messages, rings with overwritten records, ranks that were killed, busy cores, clocks of several
hosts, and how certain each finding is.

notes: N2 §12.3
"""

import numpy as np

Link = tuple[int, int]


def plain_behind(calls: dict[int, int]) -> list[int]:
    """Return the ranks that the others wait for; calls: {rank: the number of its last call}."""
    newest = max(calls.values())
    return [rank for rank, last in calls.items() if last < newest]


def plain_waited_for(arrivals: np.ndarray, share: float = 0.2, most: float = 0.5) -> int | None:
    """Return the rank that is late in most steps; arrivals (steps, ranks): when each rank arrived
    at the call of the step."""
    ordered = np.sort(arrivals, axis=1)
    step = np.median(np.diff(ordered[:, -1]))  # seconds
    delay = ordered[:, -1] - ordered[:, -2]  # how long only the last rank delays the others
    last = arrivals.argmax(axis=1)[delay > share * step]
    times = np.bincount(last, minlength=arrivals.shape[1])
    return int(times.argmax()) if times.max() > most * len(arrivals) else None


def plain_slow_link(seconds: dict[Link, list[float]], times: float = 2.0) -> Link | None:
    """Return the link whose messages take `times` as long as those of most others; seconds: {(src,
    dst): seconds of its messages}."""
    # a busy core is never early
    quick = {link: float(np.quantile(some, 0.25)) for link, some in seconds.items()}
    slowest = max(quick, key=lambda link: quick[link])
    usual = np.median([value for link, value in quick.items() if link != slowest])
    return slowest if quick[slowest] > times * usual else None


def plain_growth(memory: np.ndarray) -> float:
    """Return the bytes per step by which a rank's memory grows in most steps; memory (steps,):
    bytes after each step."""
    return float(np.median(np.diff(memory)))  # one large array is one step of many


def plain_first_bad(bad: list[tuple[int, float, int, str]]) -> tuple[int, str] | None:
    """Return the rank and layer of the first number that is not finite; bad: (step, moment, rank,
    layer) of all ranks."""
    return min(bad)[2:] if bad else None  # sums over ranks carry it to all others
