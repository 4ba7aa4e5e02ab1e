"""docs/reference/diagnose.md: the causes that `minidist diagnose` names, with the constants of its
rules."""

from typing import NamedTuple

from minidist.observe.diagnose import hangs, laggards, numbers, slow, slow_links, step_table
from minidist.reference.markdown import head, page, table


class Cause(NamedTuple):
    """A cause: its name, what it means, and when the rule names it."""

    name: str
    meaning: str
    rule: str


ENDED = [
    Cause("exception", "a rank raised an error of its own", "the first such error"),
    Cause("killed", "a rank ended without a word", "the first such rank"),
    Cause("all killed", "the whole job ended at once", "no rank recorded its end"),
    Cause("stopped", "a signal has stopped a process (state T)", "at once"),
    Cause("link lost", "a connection broke, and no rank had died", "at once"),
]
CALLS = [
    Cause("wrong …", "a call differs in verb, op, root, dtype, shape or algorithm", "the first"),
    Cause("left out", "a rank left out a call that the others make", "the first"),
    Cause("made too often", "a rank makes a call that the others do not", "the first"),
    Cause("wrong order", "a rank makes two calls in the other order", "the first"),
    Cause("behind", "the others wait for a rank", f"a call is open for {hangs.STUCK:.0f} s"),
    Cause("deadlock", "ranks wait for each other in a circle", f"for {hangs.STUCK:.0f} s"),
    Cause("stuck", "all ranks are in a call, and it does not end", f"for {hangs.STUCK:.0f} s"),
]
SLOW = [
    Cause(
        "slow compute",
        "a rank computes longer than the others",
        f"per target {laggards.SLOW} times the others' processor time in each step and "
        f"{laggards.SLOW_USUALLY} times in the middle one; surely named from 1.5 times",
    ),
    Cause(
        "uneven data",
        "a rank has more to do",
        f"{laggards.MORE} times the others' targets, and {laggards.COSTS} times their processor "
        "time",
    ),
    Cause(
        "late reader",
        "a rank waits for its data",
        f"the wait, beyond twice the others', is {laggards.READS:.0%} of the step",
    ),
    Cause(
        "hogs the interpreter",
        "another thread of the process computes",
        f"the other threads take as much time as the rank's own, {laggards.HOGS:.0%} of the step, "
        "and 3 times what those of the other ranks take",
    ),
    Cause(
        slow_links.CAUSE,
        "messages one way take longer than on the other links",
        f"{slow_links.TIMES:.0f} times the others' time and {slow_links.LEAST * 1e3:.0f} ms, and it "
        "stays so; surely named from 3 times, after "
        f"{slow_links.WINDOW + slow_links.STRIDE * (slow_links.LEAST_WINDOWS - 1)} messages whose "
        "receiver was ready",
    ),
    Cause(
        slow.CAUSE,
        "the others wait for a rank, from an unknown cause",
        f"the wait is {slow.SHARE:.0%} of the step, in {slow.MOST:.0%} of the steps",
    ),
]
NUMBERS = [
    Cause("not finite", "a number is infinite or NaN", "the first: layer, op and step"),
    Cause(
        "replicas differ",
        "weights that should be equal are not",
        "one bit, at the next `--digest-every`",
    ),
    Cause(
        "loss jumps",
        "the loss of one rank, or of all, jumps",
        f"{numbers.JUMP} nats and {numbers.SPREADS:.0f} times its spread, in two steps in a row",
    ),
    Cause(
        "leak",
        "the memory of a rank grows",
        f"{numbers.LEAK / numbers.MIB:.1f} MiB per step, over {numbers.GROWTH} steps",
    ),
    Cause("clock skew", "the clocks of two hosts differ", f"{slow.SKEW:.0f} s"),
    Cause("no recorder", "a rank of the job has no flight recorder", "at once"),
]
CAUSES = {
    "A rank ended": ENDED,
    "Calls": CALLS,
    "Slow": SLOW,
    "Numbers, memory, clocks": NUMBERS,
}


def rules_page() -> str:
    """Return the page."""
    lines = head(
        "Rules of diagnose",
        "After this page you know which causes `minidist diagnose` and `minidist watch` name, and "
        "from which size on. Smaller faults may go unnamed.",
        "Wrong numbers come first. Then the findings of the first rule that finds something: an "
        "exception, calls that do not match, a stopped or killed rank, a broken link, a hang; a "
        "slow rank or link. Then always a leak, clocks that differ, ranks without a recorder. Each "
        "finding has its evidence, and says how sure it is: certain, likely or possible.",
    )
    for title, causes in CAUSES.items():
        lines += ["", f"## {title}"]
        lines += table(["cause", "meaning", "named from"], causes)
        if causes is SLOW:
            lines += [
                "",
                f"A rank must stand out in a streak of {step_table.STREAK} steps, which lasts "
                f"{step_table.LONG} s. Where ranks share their cores with other programs, slow "
                f"compute is named after {step_table.BUSY_STREAK} steps and "
                f"{step_table.BUSY_PART:.0%} of the run. Another program makes a message late for a "
                "while; a slow link stays slow.",
            ]
    return page(lines)
