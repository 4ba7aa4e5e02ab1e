"""Exercise 08: gradient accumulation: cutting passes, sharing the loss, reducing and stepping once.

Copy this file (`minidist lesson 08 --copy DIR`), replace each `hole(...)` by your own code, and
grade it: `minidist check 08 DIR/exercise_08.py`. Every rank runs it with its own replica of the
model; batches are global, and ranks have different numbers of rows. What you may use:

    model.loss(inputs, targets, divisor) -> the sum of the losses of these tokens, over divisor
    p.grad, p of model.parameters()        the sum of all gradients since optimizer.zero_grad()
    group.all_reduce(x, out=x)             sums x over all ranks
"""

from minidist.grading import hole
from minidist.parallel.step.step import micro_parts, part_of


def cut(rows, passes):
    """Return where each pass begins and ends: [(begin, end), …], `passes` pairs that cover 0 … rows
    in order.

    Sizes differ by at most one row, and the longer passes are first: cut(7, 3) is [(0, 3), (3, 5),
    (5, 7)].
    """
    each, more = divmod(rows, passes)
    pairs = []
    begin = 0
    for number in range(passes):
        end = hole(
            1,
            "where does pass `number` end? the first `more` passes get one row more",
            begin,
            each,
            more,
            number,
        )
        pairs.append((begin, end))
        begin = end
    return pairs


def plain_accumulation(model, optimizer, group, batches, passes):
    """Train on each global batch in several passes, on any number of ranks."""
    for inputs, targets in batches:
        # this rank's rows of the batch
        mine = part_of((inputs, targets), size=group.size, rank=group.rank)
        for micro in micro_parts(mine, passes):  # cut once more
            loss = model.loss(
                micro.inputs,
                micro.targets,
                hole(2, "over how many tokens? (section 2)", mine, micro),
            )
            hole(3, "what happens in every pass? (sections 1 and 4)", loss)
        hole(4, "and what once a batch? (sections 1, 4 and 8)", optimizer)


def elements_sent(stage, passes, parameters, ranks):
    """Return the elements that all ranks together send in a step; stage 0 is DDP, 1 to 3 are ZeRO's
    (section 4)."""
    a = passes
    psi = parameters
    return (ranks - 1) * hole(
        5, "by stage: a list of four terms in a and psi, then [stage]", a, psi
    )
