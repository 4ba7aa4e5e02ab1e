"""Exercise 06: a parameter server by hand: keys, push and pull, the sum, and which worker may go on.

Copy this file (`minidist lesson 06 --copy DIR`), replace each `hole(...)` by your own code, and grade it:
`minidist check 06 DIR/exercise_06.py`. Ranks 0 to workers-1 of the group are workers, the others are servers; every
rank has the whole model; a server uses its keys alone. What you may use:

    group.send(x, rank), group.recv(rank)       messages from one rank to another arrive in the order they were sent
    parameter.data, parameter.grad              arrays; write to data in place: parameter.data[...] = new
"""

from minidist.grading import hole


def divide(sizes, servers):
    """Which server has each key: a list as long as `sizes`. The largest keys are placed first."""
    loads, owner = [0] * servers, [0] * len(sizes)
    for key in sorted(range(len(sizes)), key=lambda key: -sizes[key]):
        owner[key] = hole(1, "which server gets this key? (section 3)", loads)
        loads[owner[key]] += sizes[key]
    return owner


def worker_step(group, workers, owner, parameters):
    """After backward: push every gradient to the server of its key, then pull every weight from there."""
    for key, parameter in enumerate(parameters):
        hole(2, "push the gradient of this key; servers are the ranks behind the workers (section 1)", key, parameter)
    for key, parameter in enumerate(parameters):
        hole(3, "pull the weights of this key (section 1)", key, parameter)


def server_step(group, workers, mine, optimizer):
    """One synchronous step of a server, whose keys are the parameters `mine`, in the order of the model.

    The workers divide their losses by the targets of *all* of them.
    """
    for parameter in mine:
        parameter.grad = hole(4, "what the optimizer needs: from what every worker pushes (section 2)", parameter)
    optimizer.step()
    for parameter in mine:
        for worker in range(workers):
            group.send(parameter.data, worker)


def may_go_on(worker, done, running, staleness):
    """Whether `worker` may begin its next step: it may be at most `staleness` steps ahead.

    Args: done: steps that each worker has done; running: the workers that are still at work, neither finished nor lost.
    """
    return hole(5, "compare its steps with those of the slowest that counts (section 5)", worker, done, running)


def link_bytes(model_bytes, workers, servers):
    """(bytes in and out of each server in a step if keys divide evenly, bytes in and out of a rank of a ring)."""
    return hole(6, "the two formulas of section 3", model_bytes, workers, servers)
