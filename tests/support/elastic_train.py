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


def act(step, how):
    """Replace Trainer.step by one that does so once."""
    make = Trainer.step

    def make_step(trainer, batch):
        if trainer.steps_done == step:
            Trainer.step = make
            if how == "tell":
                os.kill(os.getppid(), signal.SIGTERM)
                time.sleep(0.2)         # until the launcher has passed it on
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return make(trainer, batch)

    Trainer.step = make_step


if __name__ == "__main__":
    for process, (step, how) in json.loads(sys.argv[1]).items():
        if process == os.environ["MINIDIST_PROCESS"]:
            act(step, how)
    sys.exit(main(sys.argv[2:]))
