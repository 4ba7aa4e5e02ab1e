"""The step diagrams in the docstrings are what the algorithms do: each is parsed and held against
recorded messages."""

import re
import threading
import time
from collections import Counter

import numpy as np
import pytest
from collective_checker import Drawn, bring, call
from helpers import THREADS, run

from minidist.comm.collectives import (
    bruck,
    direct,
    dissemination,
    halving_doubling,
    naive,
    pairwise,
    ring,
    torus,
    torus_both,
    tree,
)

DIAGRAMS = {
    ("all_reduce", "ring"): [ring.reduce_around, ring.gather_around],
    ("reduce_scatter", "ring"): [ring.reduce_around],
    ("all_gather", "ring"): [ring.gather_around],
    ("all_reduce", "direct"): [direct.all_reduce],
    ("all_reduce", "pairwise"): [pairwise.reduce_scatter, pairwise.tell_all],
    ("reduce_scatter", "pairwise"): [pairwise.reduce_scatter],
    ("all_reduce", "halving-doubling"): [halving_doubling.halve, halving_doubling.double],
    ("all_reduce", "doubling"): [halving_doubling.double_whole],
    ("reduce_scatter", "halving-doubling"): [halving_doubling.halve],
    ("all_gather", "halving-doubling"): [halving_doubling.all_gather],
    ("all_to_all", "pairwise"): [pairwise.all_to_all],
    ("barrier", "dissemination"): [dissemination.barrier],
    ("broadcast", "tree"): [tree.broadcast],
    ("reduce", "tree"): [tree.reduce],
    ("all_to_all", "bruck"): [bruck.all_to_all],
    ("all_reduce", "torus"): [torus.all_reduce],
    ("all_reduce", "torus-both"): [torus_both.all_reduce],
    ("reduce_scatter", "torus"): [torus.reduce_scatter],
    ("all_gather", "torus"): [torus.all_gather],
    ("gather", "tree"): [tree.gather],
    ("scatter", "tree"): [tree.scatter],
    ("broadcast", "naive"): [naive.broadcast],
    ("reduce", "naive"): [naive.reduce],
    ("gather", "naive"): [naive.gather],
    ("scatter", "naive"): [naive.scatter],
}


def diagram(function):
    """(P, arrows), an arrow being (step, src, dst, chunk or None). Columns are r0, r1, ... unless a
    source is named."""
    text = function.__doc__
    size = int(re.search(r"P=(\d)", text)[1])
    arrows = set()
    for step, body in re.findall(r"step (\d)((?:(?!step).)*)", text):
        for column, (left, dst) in enumerate(re.findall(r"(\w*) ?-> r(\d)", body)):
            source = int(left[1:]) if left.startswith("r") else column
            chunk = int(left[1:]) if re.fullmatch(r"c\d", left) else None
            arrows.add((int(step), source, int(dst), chunk))
    return size, arrows


def recorded(verb, algorithm, size, transport):
    """The same of a call as the ledger's events tell it."""
    lengths = [[4] * size] * size if verb == "all_to_all" else [4 * size] * size
    case = Drawn(verb, algorithm, size, lengths)

    def ranks(world):
        events = []
        world.ledger.subscribe(events.append)
        call(world, case, bring(case, world.rank), None)
        return [event.details for event in events if event.kind == "message"]

    return [details for rank in run(ranks, size=size, transport=transport) for details in rank]


@pytest.mark.parametrize("transport", THREADS)
@pytest.mark.parametrize(("verb", "algorithm"), DIAGRAMS)
def test_diagram_is_what_happens(verb, algorithm, transport):
    drawn = set()
    steps = 0
    for function in DIAGRAMS[verb, algorithm]:
        size, arrows = diagram(function)
        assert arrows, function.__name__
        drawn |= {(steps + step, *rest) for step, *rest in arrows}
        steps += 1 + max(step for step, *_ in arrows)
    with_chunks = any(chunk is not None for *_, chunk in drawn)
    happened = recorded(verb, algorithm, size, transport)
    assert len(happened) == len(drawn)
    assert {
        (message["step"], message["src"], message["dst"], message["chunk"] if with_chunks else None)
        for message in happened
    } == drawn


@pytest.mark.parametrize("size", range(2, 10))
def test_tree_is_log_deep(size):
    """Each rank's depth is at most ceil(log2 P), and it hears in the step that the docstring's rule
    gives."""
    for root in range(size):
        seen = {root}
        steps = (size - 1).bit_length()
        for step in range(steps):
            for rank in sorted(seen):
                _, children = tree.family(rank, root, size)
                seen |= {child for child in children if tree._step(child, root, size) == step}
        assert seen == set(range(size))


def test_messages_without_subscribers_read_no_clock(monkeypatch):
    """What nobody watches costs nothing: no event is made. Of the four messages of a call the clock
    is not read; of the call it is read twice: by the flight recorder when it begins and when it
    ends."""
    reads = Counter()
    clock = time.perf_counter

    def counted():
        reads[threading.current_thread().name] += 1
        return clock()

    def calls(world):
        name = threading.current_thread().name
        counts = []
        for _ in range(8):
            before = reads[name]
            world.all_reduce(np.ones(9), algorithm="ring")
            counts.append(reads[name] - before)
        return min(counts)  # a wait that lasts is recorded, too

    monkeypatch.setattr("minidist.comm.calls.call.time.perf_counter", counted)
    assert run(calls, size=3) == [2, 2, 2]
