"""The numbers of the live figure `offload_lanes`, computed another way."""

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


