"""The rule for a slow link in one direction: its messages take TIMES as long as messages of the
other links in the same steps.

Another program on a core makes a message late, never early. So a window of a link is slow only if
all of WINDOW consecutive messages except one are late, each by at least LEAST seconds. Another
program also ends: a link is named only if, from some window to the end of the records, at least
LASTING of its windows are slow. A late rank makes no link slow: the time of a message counts from
its sending, and only messages for which the receiver waited count (observe/link_times.py).
"""

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable

from minidist.observe.diagnose.fault import CERTAIN, LIKELY, Fault, span
from minidist.observe.diagnose.step_table import StepTable
from minidist.observe.link_times import Link, Message, link_profiles, messages_of, quartile

CAUSE = "slow link"
TIMES = 2.0
LEAST = 0.002
BESIDE = 1.7  # times the quick messages of the slowest other sender
LATE = 1.2  # times the middle message of the others
WINDOW = 12  # messages
SURE = 24  # messages: a link with as many slow ones is certainly slow
STRIDE = 2  # messages between two windows
LASTING = 0.6  # share of the windows that must be slow, and
LEAST_WINDOWS = 4  # their least number
FEW = 4  # messages: fewer do not show what is usual


def slow_links(table: StepTable) -> list[Fault]:
    """Return the finding about the slowest link, if it is much slower than the others."""
    by_link = messages_of(table.ranks)
    usual = _usual(by_link)
    found: dict[Link, list[Message]] = {}
    for link, messages in by_link.items():
        windows = [
            messages[at : at + WINDOW] for at in range(0, len(messages) - WINDOW + 1, STRIDE)
        ]
        slow = [_is_slow(window, usual, by_link) for window in windows]
        first = _lasting_from(slow)
        for window in itertools.compress(windows[first:], slow[first:]):
            found.setdefault(link, []).extend(
                each for each in window if each not in found.get(link, [])[-WINDOW:]
            )
    if not found:
        return []
    return [
        _fault(
            table,
            max(found, key=lambda link: (len(found[link]), _times(found[link], usual))),
            found,
            by_link,
        )
    ]


def _is_slow(
    window: list[Message], usual: dict[int, float], by_link: dict[Link, list[Message]]
) -> bool:
    """Return whether a window is slow compared with the usual times, and with the other senders in
    the same steps."""
    return (
        _times(window, usual) >= TIMES
        and _times(window, _beside(by_link, window)) >= BESIDE
        and _times(window, _beside(by_link, window, 0.5)) >= LATE
    )


def _lasting_from(slow: list[bool]) -> int:
    """Return the first slow window from which to the end at least LASTING of the windows, and
    LEAST_WINDOWS of them, are slow; len(slow) if there is none."""
    late = 0
    first = len(slow)
    for at in reversed(range(len(slow))):
        late += slow[at]
        if slow[at] and late >= max(LEAST_WINDOWS, LASTING * (len(slow) - at)):
            first = at
    return first


def _class(message: Message) -> int:
    """Return the size class of a message; messages of one class have about the same bytes."""
    return max(0, message.nbytes.bit_length() - 10) // 2


def _usual(by_link: dict[Link, list[Message]]) -> dict[int, float]:
    """Return {class: seconds of a message on most links}, for classes of two or more links."""
    seconds: defaultdict[int, list[float]] = defaultdict(list)
    for messages in by_link.values():
        sizes: defaultdict[int, list[float]] = defaultdict(list)
        for message in messages:
            sizes[_class(message)].append(message.seconds)
        for size, values in sizes.items():
            if len(values) >= FEW:
                seconds[size].append(quartile(values))
    return {
        size: statistics.median_low(values) for size, values in seconds.items() if len(values) > 1
    }


def _beside(
    by_link: dict[Link, list[Message]], window: list[Message], part: float = 0.25
) -> dict[int, float]:
    """Return {class: the `part` quantile of message seconds of the slowest other sender} in the
    steps of a window."""
    first = window[0].step
    last = window[-1].step
    sender = window[0].src
    values: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for (src, _), messages in by_link.items():
        for message in messages if src != sender else ():
            if first <= message.step <= last:
                values[_class(message), src].append(message.seconds)
    slowest: dict[int, float] = {}
    for (size, _), seconds in values.items():
        if len(seconds) >= FEW:
            slowest[size] = max(slowest.get(size, 0.0), quartile(seconds, part))
    return slowest


def _times(window: Iterable[Message], usual: dict[int, float]) -> float:
    """Return the smallest ratio message time / usual time in a window, without the quickest
    message; 0.0 if it is not known."""
    times = sorted(
        message.seconds / max(1e-9, usual[_class(message)])
        if message.seconds >= usual[_class(message)] + LEAST
        else 0.0
        for message in window
        if _class(message) in usual
    )
    return times[1] if len(times) >= WINDOW - 1 else 0.0


def _fault(
    table: StepTable,
    link: Link,
    found: dict[Link, list[Message]],
    by_link: dict[Link, list[Message]],
) -> Fault:
    (src, dst) = link
    slow = found[link]
    usual = _usual(by_link)
    largest = max(
        (message for message in slow if _class(message) in usual),
        key=lambda message: message.nbytes,
    )
    seconds = quartile([message.seconds for message in slow if _class(message) == _class(largest)])
    evidence = [
        f"of {largest.nbytes:,} bytes a message takes {span(seconds)}, on the other links "
        f"{span(usual[_class(largest)])}; {len(slow)} messages, first in step {slow[0].step}"
    ]
    back = [
        message.seconds
        for message in by_link.get((dst, src), ())
        if _class(message) == _class(largest)
    ]
    if back:
        evidence.append(
            f"the other way, from rank {dst} to rank {src}, it takes {span(quartile(back))}"
        )
    if profile := link_profiles(table.ranks).get(link):
        evidence.append(
            f"measured: alpha {profile.alpha * 1e6:,.0f} µs, "
            + (f"{1e-6 / profile.beta:,.1f} MB/s, " if profile.beta else "")
            + f"drift {profile.drift:.2f}"
        )
    times = seconds / max(1e-9, usual[_class(largest)])
    return Fault(
        CAUSE,
        link,
        "",
        f"the link from rank {src} to rank {dst} is {times:.1f} times as slow as the others",
        tuple(evidence),
        CERTAIN if len(slow) >= SURE else LIKELY,
        f"look at cable, port and switch between the hosts of ranks {src} and {dst}, and at what "
        "else they carry; a placement that keeps this link out of the busiest axis helps until "
        "then",
        (slow[0].step, max(message.step for message in slow)),
    )
