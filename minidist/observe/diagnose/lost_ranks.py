"""Rules about ranks that ended: by their own exception, killed, stopped, or without a recorder."""

import re
from collections.abc import Sequence

from minidist.comm.flight.slots import CALL, MESSAGE
from minidist.observe.diagnose.fault import (
    CERTAIN,
    LIKELY,
    POSSIBLE,
    Fault,
    call_text,
    ranks_text,
    span,
)
from minidist.observe.diagnose.flights import GONE, RUNS, STOPPED, UNKNOWN, RankFlight

OF_OTHERS = (
    "CommError",
    "PeerLostError",
    "LinkLostError",
    "MismatchError",
    "DeadlockError",
    "HandshakeError",
    "TimeoutError",
    "KeyboardInterrupt",
)
"""Errors that other ranks cause, or that report a disagreement. Without more evidence, such an
error names no culprit."""


def failed_by_itself(flights: Sequence[RankFlight]) -> list[Fault]:
    """Return the finding about the first rank that raised its own error (not one of OF_OTHERS)."""
    own = [flight for flight in flights if flight.end and not flight.end.startswith(OF_OTHERS)]
    if not own:
        return []
    first = min(own, key=_end_time)
    evidence = [f"{ranks_text([first.rank])} ended with {first.end}", last_words(first)]
    if len(own) > 1:
        evidence.append(
            f"{ranks_text(flight.rank for flight in own if flight is not first)} failed too, later"
        )
    return [
        Fault(
            "exception",
            (first.rank,),
            _raised_at(first) or _last_place(first),
            f"rank {first.rank} failed with {first.end}",
            tuple(evidence),
            CERTAIN if len(own) == 1 else LIKELY,
            "read its traceback on stderr; the other ranks only lost it",
        )
    ]


def stopped(flights: Sequence[RankFlight]) -> list[Fault]:
    """Return a finding for each process that a signal has stopped."""
    return [
        Fault(
            "stopped",
            (flight.rank,),
            _last_place(flight),
            f"the process of rank {flight.rank} ({flight.pid} on {flight.host}) is stopped "
            "(state T)",
            (last_words(flight),),
            CERTAIN,
            f"`kill -CONT {flight.pid}` lets it continue",
        )
        for flight in flights
        if flight.process == STOPPED
    ]


def killed(flights: Sequence[RankFlight]) -> list[Fault]:
    """Return a finding for each rank that recorded no end while others continued: it was killed, or
    exited without Python's exit handlers."""
    silent = [
        flight for flight in flights if flight.end is None and flight.process in (GONE, UNKNOWN)
    ]
    heard = {flight.rank: flight.end for flight in flights if flight.end}
    lives = any(flight.process == RUNS for flight in flights)
    found = []
    for flight in silent:
        says = re.compile(rf"(PeerLostError|LinkLostError): rank {flight.rank}\b")
        naming = [why for why in heard.values() if says.match(why)]
        if not (naming or (flight.process == GONE and (heard or lives))):
            continue
        evidence = [
            f"rank {flight.rank} (process {flight.pid} on {flight.host}) has left no last "
            f"record, and {'is gone' if flight.process == GONE else 'is not of this host'}",
            last_words(flight),
        ]
        evidence += [f"others ended with {naming[0]}"] if naming else []
        found.append(
            Fault(
                "killed",
                (flight.rank,),
                _last_place(flight),
                f"rank {flight.rank} was killed, or exited without a word",
                tuple(evidence),
                CERTAIN if naming else LIKELY,
                "look at the kernel's log for the memory killer (`dmesg`), and at the scheduler's",
            )
        )
    if (
        not found
        and len(silent) == len(flights)
        and all(flight.process == GONE for flight in flights)
    ):
        return _all_killed(flights)
    return found


def _all_killed(flights: Sequence[RankFlight]) -> list[Fault]:
    """Return the finding that no rank recorded its end: the whole job was killed at once, perhaps
    because it hung (see hangs.py)."""
    first = min(flights, key=lambda flight: flight.newest)
    return [
        Fault(
            "all killed",
            (),
            "",
            "all ranks ended without a word: the job was killed from outside",
            (
                "the last records are at most "
                f"{span(max(f.newest for f in flights) - first.newest)} apart",
            ),
            LIKELY,
            "look at what ended the job: a scheduler's time limit, the memory killer, a person",
        )
    ]


def broken_links(flights: Sequence[RankFlight]) -> list[Fault]:
    """Return the finding about a connection that broke between two living ranks."""
    ends = [flight for flight in flights if (flight.end or "").startswith("LinkLostError")]
    if not ends:
        return []
    first = min(ends, key=_end_time)
    return [
        Fault(
            "link lost",
            tuple(flight.rank for flight in ends),
            _last_place(first),
            f"{ranks_text(flight.rank for flight in ends)} lost a connection, and no rank had died",
            tuple(f"rank {flight.rank} ended with {flight.end}" for flight in ends[:4]),
            CERTAIN,
            "look at the network between these ranks' machines",
        )
    ]


def missing(flights: Sequence[RankFlight]) -> list[Fault]:
    """Return the finding about ranks of the job without a recorder."""
    size = max((flight.size for flight in flights), default=0)
    gone = sorted(set(range(size)) - {flight.rank for flight in flights})
    if not gone:
        return []
    return [
        Fault(
            "no recorder",
            tuple(gone),
            "",
            f"there is no flight recorder of {ranks_text(gone)} of {size}",
            (),
            POSSIBLE,
            "these ranks ended before their first step, or wrote on another machine's disk",
        )
    ]


def last_words(flight: RankFlight) -> str:
    """Return a sentence about a rank's last call or message."""
    calls = flight.of_kind(CALL, MESSAGE)
    if not calls:
        return f"rank {flight.rank} has recorded no call"
    last = calls[-1]
    states = {
        "made": "it was queued",
        "begun": "it was in it",
        "ended": "it had ended it",
        "failed": "it failed in it",
    }
    step = "" if last["step"] is None else f" of step {last['step']}"
    return (
        f"the last call of rank {flight.rank}{step} is {call_text(last)}; {states[last['state']]}"
    )


def _last_place(flight: RankFlight) -> str:
    calls = flight.of_kind(CALL, MESSAGE)
    return str(calls[-1]["where"]) if calls else ""


def _raised_at(flight: RankFlight) -> str:
    """Return "file:line" of the error that ended the rank; "" if it is not known."""
    return next((str(entry.get("where", "")) for entry in flight.of_kind("end")), "")


def _end_time(flight: RankFlight) -> float:
    return max((entry["made"] for entry in flight.of_kind("end")), default=0.0)
