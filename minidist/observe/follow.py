"""Chapter 25 · The steps of a run, one after the other, for an experiment tracker.

    for step in follow("runs/one"):             # ends when the run has ended
        print(step["step"], step["loss"])

It reads metrics.jsonl of the run's folder, so it costs the ranks nothing and cannot break a run. It
may start before the run has ended, or long after.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minidist.observe.live.looking import Looking
from minidist.observe.live.run_now import OVER
from minidist.observe.step_log import STEP_LOG, LogFollower


def follow(run: str | Path, *, every: float = 1.0) -> Iterator[dict[str, Any]]:
    """Yield each step of a run as soon as it is there, in order.

    A step that a resumed run makes again is yielded again. The keys are those of a line of
    metrics.jsonl: step, loss (None if it was not finite), seconds, tokens_per_second, joules,
    memory, sent_bytes and others.

    Args:    run: a run folder of minidist train; it must be there. every: seconds between looks.
    Raises:  ConfigError, one line, if there is no such folder, or no records of a run in it.
    """
    looking = Looking(run)
    log = LogFollower(Path(run) / STEP_LOG)
    moments: dict[int, float | None] = {}  # {step: when it was made}
    over = False
    while not over:
        over = looking.look().state in OVER  # before the log is read: no line comes after it
        for step in log.poll():
            moment = step.get("time")
            if step["step"] not in moments or moments[step["step"]] != moment:
                moments[step["step"]] = moment
                yield step
        if not over:
            time.sleep(max(every, looking.rest))
