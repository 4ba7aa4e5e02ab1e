"""The numbers of the live figure `ring_attention`, computed another way."""

import gzip
import json
import shlex
from typing import Any
import numpy as np
import pytest
import minidist as md
from minidist import lessons
from minidist.grading import load_module
from minidist.observe.events import Await, Transfer
from minidist.parallel.context.ring_attention import visible
from minidist.parallel.memory.disk import Disk
from minidist.simulate.models import model
from minidist.simulate.timelines import timelines
from minidist.simulate.trace import RankTrace
from minidist.site.live import NAMES, Live, data_of, every
from minidist.site.live.offload_lanes import phase_begins, remembered, simulated
from minidist.site.live.ring_attention import TOKENS, walked
from minidist.site.live.sawtooth import CONFIG, SIZES, step_of, turning_points
from minidist.site.live.zero_memory import MODELS
from minidist.site.pages import LANGUAGES, say
from figures_of import figure


def test_the_ring_attention_of_the_figure_multiplies_what_the_real_one_does() -> None:
    """Scores of each rank as in the lesson's table; at each hop as the real ring's blocks say."""
    assert walked(4, False).scores.sum(axis=1).tolist() == [78, 222, 366, 510]
    assert walked(4, True).scores.sum(axis=1).tolist() == [294] * 4
    for size in (2, 5, 8):
        length = TOKENS * size
        for (rank, hop), scores in np.ndenumerate(walked(size, True).scores):
            pairs = visible(length, rank, (rank - hop) % size, size)
            sides = [(queries.stop - queries.start, causal) for queries, _, causal in pairs]
            assert scores == sum(n * (n + 1) // 2 if causal else n * n for n, causal in sides)
