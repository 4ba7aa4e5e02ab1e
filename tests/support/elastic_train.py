"""A process of `minidist train --elastic` that the tests start: `python elastic_train.py DEATHS
WORD …`.

DEATHS is JSON, {process: [step, how], …}: before that step it is killed, "kill", together with all
others that are to be killed then; or it has its launcher told to stop, "tell", and waits until that
has come back.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from minidist.cli import main
from minidist.parallel.hybrid.hybrid import Trainer

DEATHS = json.loads(sys.argv[1])
STEP = Trainer.start_step


def step(trainer, batch, **options):
    """In place of Trainer.start_step; a process may have got its number after it has loaded
    this."""
    process = os.environ["MINIDIST_PROCESS"]
    when, how = DEATHS.get(process, (-1, ""))
    if trainer.steps_done == when:
        del DEATHS[process]
        if how == "tell":
            tell()
        else:
            meet([other for other in DEATHS if DEATHS[other] == [when, how]], process)
            os.kill(os.getpid(), signal.SIGKILL)
    return STEP(trainer, batch, **options)


def tell():
    """The launcher passes the signal on to all, this process among them."""
    heard = []
    handler = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *args: (heard.append(args), handler(*args)))
    os.kill(os.getppid(), signal.SIGTERM)
    wait(lambda: heard)


def meet(others, process):
    """Wait until the others have come here, too."""
    folder = Path(
        next(word for word in sys.argv if word.startswith("--out=")).removeprefix("--out=")
    )
    (folder / f"dying-{process}").touch()
    wait(lambda: all((folder / f"dying-{other}").exists() for other in others))


def wait(until):
    deadline = time.monotonic() + 20
    while not until() and time.monotonic() < deadline:
        time.sleep(0.01)


if __name__ == "__main__":
    Trainer.start_step = step
    sys.exit(main(sys.argv[2:]))
