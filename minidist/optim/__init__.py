"""Optimizers, clipping, and learning-rate schedules.

optimizer = AdamW(model.parameters(), lr=3e-4)
...                                                     # backward
norm = global_norm(p.grad for p in model.parameters())
lr = warmup_cosine(step, peak=3e-4, warmup=100, total=1000)
optimizer.step(lr=lr, scale=clip_scale(norm, 1.0))
optimizer.zero_grad()
"""

from minidist.optim.adam import Adam, AdamW, RMSProp
from minidist.optim.clip import (
    clip_by_global_norm,
    clip_scale,
    global_norm,
    norm_of,
    squares_of,
    sum_of_squares,
)
from minidist.optim.optimizer import Optimizable, Optimizer, WholeParameter, at_least_two_dims
from minidist.optim.schedules import LR_SCHEDULES, LearningRate, constant, warmup_cosine
from minidist.optim.sgd import SGD

__all__ = [
    "LR_SCHEDULES",
    "SGD",
    "Adam",
    "AdamW",
    "LearningRate",
    "Optimizable",
    "Optimizer",
    "RMSProp",
    "WholeParameter",
    "at_least_two_dims",
    "clip_by_global_norm",
    "clip_scale",
    "constant",
    "global_norm",
    "norm_of",
    "squares_of",
    "sum_of_squares",
    "warmup_cosine",
]
