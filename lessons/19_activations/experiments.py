"""Run what lesson 19, its figure and its break-its share: a small model that keeps activations in
three ways."""

import time
from dataclasses import replace
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.device import account
from minidist.lessons.lab import new_model, random_batch
from minidist.nn import GPT, GPTConfig
from minidist.parallel.memory.activations import checkpoint_blocks

CONFIG = GPTConfig(vocabulary=64, context=64, layers=6, width=64, heads=4)
BATCH = 4
WAYS = ("none", "scores", "all")


def batch_of(config: GPTConfig, batch: int = BATCH) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets."""
    return random_batch(config, 0, batch)


def model_of(config: GPTConfig, which: str) -> GPT:
    """Return a model whose blocks keep what `which` says."""
    model = new_model(config)
    checkpoint_blocks(model, which)
    return model


def held(config: GPTConfig, which: str, batch: int = BATCH) -> int:
    """Return the activation bytes alive at the end of forward."""
    with account.use(account.MemoryAccount()) as memory:
        loss = model_of(config, which).loss(*batch_of(config, batch))
        alive = memory.now["activations"]
        del loss
    return alive


def inside(config: GPTConfig, batch: int = BATCH) -> dict[str, int]:
    """Return the bytes that one block keeps, by way: what one more block adds."""
    more = replace(config, layers=config.layers + 1)
    return {which: held(more, which, batch) - held(config, which, batch) for which in WAYS}


def peak(config: GPTConfig, which: str) -> int:
    """Return the largest number of activation bytes at any time of forward and backward."""
    with account.use(account.MemoryAccount()) as memory:
        model_of(config, which).loss(*batch_of(config)).backward()
        return memory.peak["activations"]


def record(group: Group) -> dict[str, Any]:
    """Return one step's curve by way, the quickest of several, and the peaks for k blocks."""
    curves = {
        which: min((one_step(which) for _ in range(7)), key=lambda curve: curve["moments"][-1][0])
        for which in WAYS
    }
    each = inside(CONFIG)
    return {
        "curves": curves,
        "input": each["all"],
        "inside": each["none"],
        "peaks": [
            peak(CONFIG, ",".join(map(str, range(k))) or "none") for k in range(CONFIG.layers + 1)
        ],
    }


def one_step(which: str) -> dict[str, Any]:
    """Return {"moments": (seconds, activation bytes) at every module and gradient of a step,
    "turn": when forward ended}, in seconds of this thread on a processor, so that a busy machine
    shows the same."""
    with account.use(account.MemoryAccount()) as memory:
        model = model_of(CONFIG, which)
        batch = batch_of(CONFIG)
        moments: list[tuple[float, int]] = []
        begin = time.thread_time()

        def note(*_: Any) -> None:
            moments.append((time.thread_time() - begin, memory.now["activations"]))

        for module in model.modules():
            module.register_forward_hook(note)
        for parameter in model.parameters():
            parameter.hooks.append(note)
        note()
        loss = model.loss(*batch)
        turn = time.thread_time() - begin
        loss.backward()
        del loss
        note()
    return {"moments": moments, "turn": turn}
