"""Exercise 06: a parameter server by hand: keys, push and pull, the sum, and which worker may
continue.

Copy this file (`minidist lesson 06 --copy DIR`), replace each `hole(...)` by your own code, and
grade it: `minidist check 06 DIR/exercise_06.py`. Ranks 0 to workers-1 of the group are workers,
rank `workers` is the server. What you may use:

    group.send(x, dst=rank), group.recv(src=rank)   messages from one rank to another arrive in the
                                                    order they were sent
    group.recv(src=rank, out=array)                 what arrives is written into `array`
    p.data, p.grad                                  arrays of a parameter
"""

from minidist.grading import hole
from minidist.parallel.step.step import part_of


def divide(sizes, servers):
    """Return which server has each key, a list as long as `sizes`; the largest keys are placed
    first."""
    loads = [0] * servers
    owner = [0] * len(sizes)
    for key in sorted(range(len(sizes)), key=lambda key: -sizes[key]):
        owner[key] = hole(1, "which server gets this key? (section 3)", loads)
        loads[owner[key]] += sizes[key]
    return owner


def plain_worker(model, group, workers, batches):
    """Run a worker of one server, which is rank `workers` of the group: push every gradient, pull
    every weight."""
    for inputs, targets in batches:
        part = part_of((inputs, targets), size=workers, rank=group.rank)
        model.loss(part.inputs, part.targets, divisor=targets.size).backward()
        for p in model.parameters():
            hole(2, "push (section 1)", p)
            p.zero_grad()
        for p in model.parameters():
            hole(3, "pull (section 1)", p)


def plain_server(model, optimizer, group, workers, steps):
    """Run the server of plain_worker: add up what all workers push, update, and answer all of
    them."""
    for _ in range(steps):
        for p in model.parameters():
            p.grad = hole(4, "what the optimizer needs, from what every worker pushes (section 2)")
        optimizer.step()
        for p in model.parameters():
            for worker in range(workers):
                hole(5, "which array does each worker wait for?", p, worker)


def may_go_on(worker, done, running, staleness):
    """Return whether `worker` may begin its next step: it may be at most `staleness` steps ahead.

    Args: done: the number of steps that each worker has done; running: the workers that still run,
    neither finished nor lost.
    """
    return hole(
        6,
        "compare its steps with those of the slowest that counts (section 5)",
        worker,
        done,
        running,
    )


def link_bytes(model_bytes, workers, servers):
    """Return (bytes in and out of each server per step if keys divide evenly, bytes in and out of a
    rank of a ring)."""
    return hole(7, "the two formulas of section 3", model_bytes, workers, servers)
