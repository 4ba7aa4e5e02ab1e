"""Exercise 23: the critical path of a recorded step, how short the step could be, why a rank waits,
what goes first.

Copy this file (`minidist lesson 23 --copy DIR`), replace each `hole(...)` by your own code, and
grade it: `minidist check 23 DIR/exercise_23.py`. All ranks share one clock, in seconds. A record
has:

    record.windows[rank]    (begin, end) of its step
    record.waits[rank]      in order: wait.start, wait.stop, and wait.call, or None for what is no
                            collective
    record.calls            call.begin and call.end of the transfer; call.last_rank, the last rank
                            to ask for it
    record.before(call)     the call that held the link until `call` began, or None
"""

from minidist.grading import hole
from minidist.observe.step_bound import PathPart


def plain_critical_path(record):
    """Return the chain of work and transfers that determined a step's length, from its begin to its
    end without a gap."""
    rank = max(
        range(len(record.windows)),
        key=lambda one: hole(1, "the path ends with the step: on which rank?", one),
    )
    now = record.windows[rank][1]
    path = list[PathPart]()
    while now > record.begin:
        held = [
            (min(wait.call.end, wait.stop), wait.call)
            for wait in record.waits[rank]
            if wait.call is not None
            and hole(2, "whether the call ended after the wait began, and by now", wait)
        ]
        if not held:
            return [PathPart("work", rank, record.begin, now), *path]
        ended, call = hole(
            3, "a pair of `held`: which call has the rank stood still for last?", held
        )
        path.insert(0, PathPart("work", rank, ended, now))
        path.insert(0, PathPart(call.name, None, call.begin, ended))
        while (before := record.before(call)) is not None:
            call = before
            path.insert(0, PathPart(call.name, None, call.begin, call.end))
        rank, now = hole(
            4, "nothing held the link: for which rank did this call wait, and until when?", call
        )
    return path


def shortest_step(asked, seconds, backward, after):
    """Return the seconds below which no order of these calls can bring a step.

    All ranks compute equally fast, and share one link.

    Args:    asked: for each call, the work before it is asked for. seconds: of each call on an idle
             link. backward: the work before the rank waits for all of them; after: the work that follows.
    """
    chain = hole(5, "the longest chain of work and one transfer (section 1)", asked, seconds)
    link = hole(6, "the link is never idle from its first call on (section 1)", asked, seconds)
    return max(backward, chain, link) + after


def causes(waited, asked, came, begin):
    """Return how a wait for a call divides: {"slower rank": s, "link busy": s, "late bucket": s}.

    In this order each cause takes what is left of the wait, up to its own amount.

    Args:    waited: seconds of the wait. asked: when this rank asked for the call, came: when the
             last rank did. begin: when its transfer began.
    """
    slower = min(waited, hole(7, "by how much did another rank hold the call up?", asked, came))
    busy = min(
        waited - slower,
        hole(
            8, "all ranks had arrived; how long was the call in the queue of the link?", came, begin
        ),
    )
    return {"slower rank": slower, "link busy": busy, "late bucket": waited - slower - busy}


def soonest_needed_first(came, seconds, urgency):
    """Return when each call has ended, on a link that interrupts none.

    Args:    came: when each call is asked for. seconds: of each on an idle link. urgency: the call
             with the lowest is needed first.
    """
    ends = [0.0] * len(came)
    left = set(range(len(came)))
    now = 0.0
    while left:
        now = max(now, min(came[call] for call in left))
        chosen = hole(
            9,
            "which call of `left` has the link now? Calls that are not yet asked for cannot run "
            "(section 6)",
            now,
        )
        ends[chosen] = now = now + seconds[chosen]
        left.remove(chosen)
    return ends
