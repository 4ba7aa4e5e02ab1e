"""A process of an elastic job that the tests start: `python elastic_rank.py FOLDER SETTINGS`, the
settings as JSON.

zero     the ZeRO stage; plan: further axes, as {"tp": 2}
steps    of the training
pause    seconds that each step takes at least
wait     the step at which rank 0 of generation 2 waits until the launcher has more ranks
agree    {process: seconds}: it takes so long to say that it knows the step to stop after
agree_limit  seconds that rank 0 waits for that
deaths   {process: [step, how]}, once: it is killed "before" the step, "within" it, "copying" its
         state after it, or "joining" a generation; or stopped: "stop"; or its connection to a rank
         is "cut"; or to the monitor: "deaf"; or what has started it is killed: "host"
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np

import minidist as md
from minidist.comm.group import Group
from minidist.launch import exits, generations, membership
from minidist.launch.generations import Generations, warm_up
from minidist.launch.template import fork_on_demand
from minidist.nn import GPTConfig
from minidist.survive import peer_copies
from minidist.survive.elastic import Survivor, describe, go_on

CONFIG = GPTConfig(vocabulary=11, context=8, layers=2, width=16, heads=4, dtype="float64")
ROWS = 12
WAIT_LIMIT = 20.0  # seconds until more ranks can take part


def batch_of(step):
    """The global batch of a step."""
    tokens = np.random.default_rng(step).integers(0, CONFIG.vocabulary, (ROWS, CONFIG.context + 1))
    return tokens[:, :-1], tokens[:, 1:]


def make_trainer(world, settings):
    inner = settings.get("plan", {})
    size = world.size // int(np.prod([1, *inner.values()]))
    return md.Trainer(
        md.Plan(dp=size, zero=settings.get("zero", 0), **inner),
        CONFIG,
        world,
        lr=1e-2,
        seed=3,
        clip=1.0,
    )


def die(number=signal.SIGKILL):
    os.kill(os.getpid(), number)
    time.sleep(60)


def cut(file):
    """Shut down a connection of this process, as a broken network would."""
    with socket.socket(fileno=os.dup(file)) as sock:
        sock.shutdown(socket.SHUT_RDWR)


def wait_for_more(job):
    """Wait until more ranks can take part. Raises: RuntimeError after WAIT_LIMIT s."""
    deadline = time.monotonic() + WAIT_LIMIT
    while not job.asked and job.stop_at is None:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"in {WAIT_LIMIT:g} s no process came that could join generation {job.number}"
            )
        time.sleep(0.01)


def agree_late(job, seconds):
    """This process takes so long to say that it knows the step to stop after."""
    tell = job._tell

    def tell_late(kind, **content):
        if kind == "agreed":
            time.sleep(seconds)
        tell(kind, **content)

    job._tell = tell_late


def train(world, job, survivor, settings, folder):
    """All steps; rank 0 writes what came of it."""
    death, when = settings.get("deaths", {}).pop(str(job.process), (-1, ""))  # once
    trainer = make_trainer(world, settings)
    survivor.begin(trainer)
    while trainer.steps_done < settings["steps"]:
        step = trainer.steps_done
        if step == settings.get("wait") and (job.number, world.rank) == (2, 0):
            wait_for_more(job)
        if step == death and when in ("before", "stop"):
            die(signal.SIGSTOP if when == "stop" else signal.SIGKILL)
        if step == death and when == "host":
            os.kill(os.getppid(), signal.SIGKILL)
        if step == death and when in ("cut", "deaf"):
            links = world.transport._polled
            cut(
                links[min(links)].fileno()
                if when == "cut"
                else membership.current().joined.link._sock.fileno()
            )
        if step == death and when == "within":
            Group.all_gather = Group._start = lambda *_, **__: die()
        if step == death and when == "copying":
            peer_copies.pack = lambda *_: die()
        start = time.perf_counter()
        time.sleep(settings.get("pause", 0.0))
        loss = trainer.step(batch_of(step))
        survivor.after_step(trainer, loss, time.perf_counter() - start)
    digest = trainer.weights_sha256()
    if world.rank == 0:
        (folder / "result.json").write_text(
            json.dumps(
                {"losses": survivor.losses, "sha256": digest, "elastic": describe(job.records())}
            )
        )
    left = trainer.survivors()
    trainer.close()
    left.barrier()
    return 0


def replay(folder, settings, changes):
    """Losses and digest of a training on threads that changes its ranks on purpose, through the
    disk.

    Args: changes: (ranks, the first step that they make) of each part.
    """

    def part(world, number):
        trainer = make_trainer(world, settings)
        if number:
            trainer.load(folder / str(number))
        last = changes[number + 1][1] if number + 1 < len(changes) else settings["steps"]
        losses = [trainer.step(batch_of(step)) for step in range(trainer.steps_done, last)]
        trainer.save(folder / str(number + 1))
        return losses, trainer.weights_sha256()

    losses = []
    digest = ""
    for number, (size, _) in enumerate(changes):
        made, digest = md.run(part, number, size=size)[0]
        losses += made
    return losses, digest


def main(folder, settings):
    libraries = warm_up(settings.get("transport"))
    fork_on_demand()
    # a fork looks for nothing that warm_up has found
    membership.ThreadpoolController = exits.ModuleType = None
    job = Generations.from_environment(libraries)
    agree_late(job, settings.get("agree", {}).get(str(job.process), 0.0))
    generations.AGREE_LIMIT = settings.get("agree_limit", generations.AGREE_LIMIT)
    survivor = Survivor(job)
    if settings.get("deaths", {}).get(str(job.process), [0, ""])[1] == "joining":
        survivor.begin = lambda trainer: die()
    return go_on(
        survivor,
        lambda world: train(world, job, survivor, settings, folder),
        transport=settings.get("transport"),
        threads=1,
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), json.loads(sys.argv[2])))
