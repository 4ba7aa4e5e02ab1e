"""Exercise 08: gradient accumulation: cutting passes, sharing the loss, reducing and stepping once.

Copy this file (`minidist lesson 08 --copy DIR`), replace each `hole(...)` by your own code, and grade it:
`minidist check 08 DIR/exercise_08.py`. Every rank runs it with its own replica of the model and its own rows of each
batch; ranks have different numbers of rows. What you may use:

    model.loss(inputs, targets, divisor=d) -> the sum of the losses of these tokens, divided by d
    parameter.grad                         the sum of all gradients since optimizer.zero_grad()
    group.all_reduce(x, out=x)             sums x over all ranks
"""

from minidist.grading import hole


def cut(rows, passes):
    """Where each pass begins and ends: [(begin, end), …], `passes` pairs that cover 0 … rows in order.

    As even as it goes, the first ones one row longer: cut(7, 3) is [(0, 3), (3, 5), (5, 7)].
    """
    each, more = divmod(rows, passes)
    pairs, begin = [], 0
    for number in range(passes):
        end = hole(1, "where does pass `number` end? the first `more` passes get one row more", begin, each, more,
                   number)
        pairs.append((begin, end))
        begin = end
    return pairs


def share(model, inputs, targets, batch):
    """One pass's share of the loss. Summed over all passes of all ranks it must be the mean over ALL tokens.

    batch.targets.size    tokens of this rank, in all its passes
    batch.global_tokens   tokens of all ranks, in all their passes
    """
    return model.loss(inputs, targets, divisor=hole(2, "divide by how many tokens? (section 2)"))


def step(group, model, optimizer, batch, passes):
    """One step on this rank's rows of a batch, in some passes."""
    parameters = list(model.parameters())
    for number, (begin, end) in enumerate(cut(len(batch.inputs), passes), start=1):
        share(model, batch.inputs[begin:end], batch.targets[begin:end], batch).backward()
        if hole(3, "after which passes do gradients go over the ranks? (section 4)", number, passes):
            for parameter in parameters:
                group.all_reduce(parameter.grad, out=parameter.grad, algorithm="ring")
    hole(4, "update the weights, and make ready for the next batch (sections 1 and 8)", optimizer)


def elements_sent(stage, passes, parameters, ranks):
    """Elements that all ranks together send in a step: stage 0 is DDP, 1 to 3 are ZeRO's (section 4)."""
    a, psi = passes, parameters
    return (ranks - 1) * hole(5, "by stage: a list of four terms in a and psi, then [stage]", a, psi)
