"""Exercise 18: a mixture with one expert on each rank: where tokens go, there and back, and what
keeps the load even.

Copy this file (`minidist lesson 18 --copy DIR`), replace each `hole(...)` by your own code, and
grade it: `minidist check 18 DIR/exercise_18.py`. What you may use:

    group.rank, group.size
    group.all_to_all(pieces)   pieces: a list, one array for each rank; returns a list, what each
                               rank had for this one
"""

import math

import numpy as np

from minidist.grading import hole


def choose(chances, k):
    """Return the experts of each token: (N, E) probabilities -> (N, k) integers, the likeliest
    first."""
    return hole(1, "the k likeliest of each row, the likeliest first (np.argsort)", chances, k)


def places(capacity, k, tokens, experts):
    """Return how many of a sequence's tokens an expert takes: `capacity` times its even share of
    the choices, rounded up."""
    return math.ceil(hole(2, "capacity times the even share", capacity, k, tokens, experts))


def keep(chosen, room, experts):
    """Return which choices of one sequence are taken: (T, k) integers -> (T, k) bools. Earlier
    tokens have priority."""
    taken = [0] * experts
    kept = np.zeros(chosen.shape, bool)
    for token in range(len(chosen)):
        for choice, expert in enumerate(chosen[token]):
            kept[token, choice] = hole(
                3, "is there a place left at this expert?", taken[expert], room
            )
            taken[expert] += 1
    return kept


def plain_experts(x, chosen, weight, my_expert, group):
    """Run one expert per rank, one expert per token: rows x (N, h), chosen (N,), weight (N,) -> (N,
    h).

    my_expert(rows) computes this rank's expert.
    """
    order = hole(4, "the positions of x's rows, sorted by expert (section 1)", chosen)
    ends = np.cumsum(np.bincount(chosen, minlength=group.size))
    came = group.all_to_all(hole(5, "a list: the rows for each rank (section 1)", x[order], ends))
    results = my_expert(np.concatenate(came))
    ends = np.cumsum([len(rows) for rows in came])
    back = group.all_to_all(np.split(results, ends[:-1]))  # and return
    y = np.zeros_like(x)
    hole(6, "put the rows that returned at their tokens' places in y (section 1)", y, order, back)
    return weight[:, None] * y


def balance_loss(chosen, chances):
    """Return E Σ_e f_e p_e of one sequence: 1 if all is even. chosen (T, k), chances (T, E)."""
    tokens, experts = chances.shape
    f = np.bincount(chosen.reshape(-1), minlength=experts) / chosen.size
    return hole(7, "from f, the experts' shares of the choices, and the mean chances", f, chances)


def move_biases(bias, load, rate):
    """Return the biases after a step: bias (E,); load (E,) is how many tokens of the whole batch
    chose each expert."""
    return bias + hole(
        8, "rate up for an expert with less than the mean, rate down for one with more", load, rate
    )
