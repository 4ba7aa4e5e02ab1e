"""Exercise 21: top-k with error feedback; DiLoCo; and the density at which top-k saves nothing.

Copy this file (`minidist lesson 21 --copy DIR`), replace each `hole(...)` by your own code, and
grade it: `minidist check 21 DIR/exercise_21.py`. Every rank runs it with its own replica of the
model; batches are global.

    group.all_gather(x)      the arrays of all ranks one after another, in rank order; they may
                             differ in length
    group.all_reduce(x)      their sum, on every rank
    p.grad, p.data           a parameter's gradient and its weights, arrays of its shape
    np.argpartition(x, -k)   positions; its last k are those of the k largest numbers of x
    np.add.at(x, at, values) adds also where a position occurs twice, which x[at] += values does
                             not
"""

import numpy as np

from minidist.grading import hole
from minidist.parallel.step.step import part_of


def plain_compressed_ddp(model, optimizer, group, batches, density):
    """Train by DDP that sends only the largest gradients (top-k), and keeps the others for the next
    step (error feedback)."""
    residuals = [np.zeros(p.size, p.dtype) for p in model.parameters()]
    for inputs, targets in batches:
        part = part_of((inputs, targets), size=group.size, rank=group.rank)
        model.loss(part.inputs, part.targets, divisor=targets.size).backward()
        for p, residual in zip(model.parameters(), residuals, strict=True):
            gradient = p.grad
            hole(
                1,
                "what may be sent: this gradient, and what was not sent before (section 1)",
                gradient,
                residual,
            )
            k = max(1, round(density * p.size))
            chosen = hole(2, "the rising positions of the k largest (section 1)", residual, k)
            places = group.all_gather(chosen, algorithm="ring")
            values = group.all_gather(
                hole(3, "what is sent of them", residual, chosen), algorithm="ring"
            )
            hole(
                4, "what was sent is no longer owed; the others stay (section 1)", residual, chosen
            )
            gradient[...] = 0
            hole(
                5,
                "the sum of all ranks' values, each at its place, into the gradient",
                gradient,
                places,
                values,
            )
        optimizer.step()
        optimizer.zero_grad()


def plain_diloco(model, inner, group, batches, every, *, lr=0.7, momentum=0.9):
    """Train by DiLoCo: `every` steps without a message, then one step of Nesterov's momentum on the
    common weights."""
    common = [
        hole(6, "the weights that all ranks start from, to be kept (section 5)", p)
        for p in model.parameters()
    ]
    speeds = [np.zeros_like(weights) for weights in common]
    for step, (inputs, targets) in enumerate(batches, start=1):
        part = part_of((inputs, targets), size=group.size, rank=group.rank)
        model.loss(part.inputs, part.targets, divisor=part.targets.size).backward()
        inner.step()
        inner.zero_grad()
        if hole(7, "true, if the ranks do not exchange weights after this step", step, every):
            continue
        share = len(part.inputs) / len(inputs)
        for p, weights, speed in zip(model.parameters(), common, speeds, strict=True):
            gradient = group.all_reduce(
                hole(8, "this rank's part of the outer gradient (section 5)", share, weights, p),
                algorithm="ring",
            )
            speed *= momentum
            speed += gradient
            weights -= hole(
                9, "Nesterov's step: look ahead (section 5)", lr, gradient, momentum, speed
            )
            hole(10, "the weights from which this rank continues", p, weights)


def largest_density(ranks, itemsize=4):
    """Return the density at which a rank sends as many bytes by top-k as by a plain ring
    all-reduce.

    Of n numbers, `itemsize` bytes each, a ring sends 2(P-1)/P × itemsize × n; an all-gather of k =
    density × n pairs sends P-1 times all pairs of a rank, each a number and a position of 4 bytes.
    """
    return hole(11, "solve it for k / n (section 2)", ranks, itemsize)
