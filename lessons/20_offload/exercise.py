"""Exercise 20: say what lies where and what moves; then read ahead, and update as gradients arrive.

Copy this file (`minidist lesson 20 --copy DIR`), replace each `hole(...)` by your own code, and
grade it: `minidist check 20 DIR/exercise_20.py`. The check trains small models with both stores and
compares your numbers with what their accounts counted. It runs your loops on moves that record when
they were begun and waited for.
"""

from typing import Any

import numpy as np  # noqa: F401 - you will want it

from minidist.grading import hole


def plain_offload(model, optimizer, batches, host):
    """Train by ZeRO-Offload on one process; return the last loss.

    The optimizer updates `host`, copies of the weights: h.grad is None until you set it.
    """
    for inputs, targets in batches:
        loss = model.loss(inputs, targets, divisor=targets.size)
        loss.backward()
        for p, h in zip(model.parameters(), host, strict=True):
            hole(1, "a copy of the gradient goes to the host; and then? (section 1)", p, h)
        optimizer.step()  # Adam on the host, where m and v are
        for p, h in zip(model.parameters(), host, strict=True):
            hole(
                2,
                "what moves to the device, into an array that stays where it is? (section 1)",
                p,
                h,
            )
    return float(loss.item())


def between_steps(parameters, mixed):
    """Return {"device": ..., "host": ...} in bytes with ZeRO-Offload on one device and Adam
    (section 2).

    Args: parameters: how many numbers the model holds; mixed: False for float32, True for bf16
    weights and gradients.
    """
    if mixed:
        return {
            "device": hole(
                3,
                "mixed precision: bytes on the device, when each gradient leaves once it is final",
            ),
            "host": hole(4, "mixed precision: gradients, and all that the optimizer keeps"),
        }
    return {"device": 4 * parameters, "host": (4 + 4 + 8) * parameters}


def moved_with_the_host(parameters, itemsize, passes):
    """Return {"device to host": ..., "host to device": ...}: bytes per step for `passes` backward
    passes (section 3)."""
    return hole(
        5,
        "a dict: gradients move to the host after each backward, weights to the device after the update",
    )


def read_from_disk(parameters, passes):
    """Return the bytes per step that ZeRO-Infinity reads, in float32 with Adam (section 3)."""
    weights = 2 * passes * 4 * parameters  # before each unit's forward, and before its backward
    gradients = (passes - 1) * 4 * parameters  # what the passes before have added up
    update = hole(6, "what the update of a parameter has to read, times the parameters")
    return weights + gradients + update


def stream(units, start_read, compute):
    """Compute with one unit after the other; while one computes, the next is read (section 4).

    Args: start_read(unit): begins a read, returns a move; move.wait() returns the unit's weights
    when they are there.
          compute(unit, weights): what the unit gives.
    There are two buffers: never more than one unit ahead.
    """
    results = []
    coming = start_read(units[0])
    for index, unit in enumerate(units):
        weights = coming.wait()
        hole(
            7,
            "begin the read of the next unit, if there is one, and remember its move",
            index,
            unit,
        )
        results.append(compute(unit, weights))
    return results


def update(runs, arriving, optimizer_step, start_up):
    """Update by ZeRO-Offload, run by run (section 1).

    Args: arriving[run]: the move that brings the run's gradients to the host; optimizer_step(run):
          Adam on the host; start_up(run): begins to send the run's new weights up, returns a move.

    While one run is updated, the weights of the previous run are on their way.
    """
    going: list[Any] = []
    for run in runs:
        hole(
            8,
            "wait for the run's gradients, update it, begin to send its weights up; keep that "
            "move in going",
            run,
        )
    for move in going:
        move.wait()
