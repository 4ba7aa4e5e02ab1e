"""Chapter 08 · Gradient accumulation: a batch in A passes, and one step.

The idea. The memory of a batch is mostly activations, and gradients of parts can be added. So a
rank cuts its rows in A microbatches, runs forward and backward for one after the other, adds the
gradients in place, and steps once. The weights are those of one pass; the activations at the peak
are those of one microbatch:

    compute       forward 1 | backward 1 | forward 2 | backward 2 | … | backward A | optimizer
    gradients     = g1                   | += g2                  | … | += gA, reduced meanwhile
    activations   up        | down       | up        | down       | … | down

It is needed for long sequences, if only few fit at once. A pass takes at least one sequence; if one
does not fit, activations must be recomputed (chapter 19) or the sequence cut over ranks (chapter
13).

The mean must be of the whole batch. Each pass divides its sum of losses by the targets of *all*
passes and all ranks, so that gradients add up to the gradient of the mean. A mean of the passes'
means is another number if passes have different sizes:

    passes of 3 rows and 1 row, losses 1, 1, 1 and 5:   mean 8/4 = 2;   mean of means (1 + 5)/2 = 3

The pass in which each strategy reduces, and the cost, in elements per step over all ranks, Ψ
parameters on P ranks:

                       reduced              elements over all ranks
    DDP, ZeRO-1        in the last pass     2Ψ(P-1)        for any A: a rank keeps its own sum
                                                           until then
    ZeRO-2             in each              (A+1)Ψ(P-1)    no rank keeps a whole gradient: that is
                                                           the stage
    ZeRO-3             in each              3AΨ(P-1)       and weights, fetched twice a pass, are
                                                           freed in between

So with stages 2 and 3 accumulation saves activations and costs traffic; with DDP and stage 1 it is
free of charge.

notes:   N1 §2.1, N2 §10.4 (N2:419)
"""

from collections.abc import Iterable

from minidist.comm.group import Group
from minidist.nn import GPT
from minidist.optim import Optimizer
from minidist.parallel.step.step import Batch, micro_parts, part_of


def plain_accumulation(
    model: GPT, optimizer: Optimizer, group: Group, batches: Iterable[Batch], passes: int
) -> None:
    """Train on each global batch in several passes, on any number of ranks."""
    for inputs, targets in batches:
        # this rank's rows of the batch
        mine = part_of((inputs, targets), size=group.size, rank=group.rank)
        for micro in micro_parts(mine, passes):  # cut once more
            # over the tokens of all passes, ranks
            loss = model.loss(micro.inputs, micro.targets, targets.size)
            loss.backward()  # p.grad += …; activations are freed
        for p in model.parameters():  # once, after the last pass
            group.all_reduce(p.grad, out=p.grad, algorithm="ring")
        optimizer.step()  # once
        optimizer.zero_grad()  # or the next batch adds to this one


# The real one has no module of its own: it is `accumulate=` of every strategy's step. There each
# strategy decides after which pass it reduces gradients, and starts while the pass still computes.


def passes_until(tokens: int, *, sequences: int, length: int) -> int:
    """Return the number of passes, of `sequences` sequences of `length` tokens, that make at least
    `tokens`; at least one."""
    return max(1, -(-tokens // (sequences * length)))


def elements_sent(
    parameters: int,
    *,
    ranks: int,
    zero: int = 0,
    accumulate: int = 1,
    root: int = 0,
    free_after_forward: bool = True,
) -> int:
    """Return the count of elements that all ranks together send in a step for gradients and
    weights, without scalars.

    Args:    parameters: that learn; zero: the stage (0: DDP); accumulate: backward passes per step.
             root: with stage 3, those of the parameters that belong to no unit and are held from
             first to last pass.
             free_after_forward: with stage 3, or whether units stay until their backward.
    """
    fetched = accumulate * (2 if free_after_forward else 1) * (parameters - root) + root
    gathered_and_reduced = {
        0: 2 * parameters,
        1: 2 * parameters,
        2: (accumulate + 1) * parameters,
        3: fetched + accumulate * parameters,
    }[zero]
    return gathered_and_reduced * (ranks - 1)
