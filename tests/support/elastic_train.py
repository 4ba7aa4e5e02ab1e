"""A process of `minidist train --elastic` that the tests start: `python elastic_train.py DEATHS WORD …`.

DEATHS is JSON, {process: [step, how], …}: before that step it is killed, "kill", or has its launcher stop, "tell".
"""

import json
import os
import signal
import sys
import time

from minidist.cli import main
from minidist.parallel.hybrid.hybrid import Trainer

DEATHS = json.loads(sys.argv[1])
STEP = Trainer.step


def step(trainer, batch):
    """In place of Trainer.step; a process may have got its number after it has loaded this."""
    when, how = DEATHS.get(os.environ["MINIDIST_PROCESS"], (-1, ""))
    if trainer.steps_done == when:
        DEATHS.clear()
        os.kill(os.getppid() if how == "tell" else os.getpid(), signal.SIGTERM if how == "tell" else signal.SIGKILL)
        time.sleep(0.2)         # until the launcher has passed it on
    return STEP(trainer, batch)


if __name__ == "__main__":
    Trainer.step = step
    sys.exit(main(sys.argv[2:]))
