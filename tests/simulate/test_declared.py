"""The places outside of simulate/ that know of ranks without data: what a number or another rank
decides is told there.

Everything else runs on such arrays as on any others. What a rank learns from the others (which
ranks make a group, how long blocks are, what an all-to-all brings) stands in simulate/sim_rank.py;
numbers that it reads are 1, and equal.
"""

import re
from collections import Counter

from imports import ROOT

NAMES = re.compile(r"^(?!.*import ).*\b(is_simulated|is_virtual|record_launch)\b")
PLACES = {
    "minidist/device/backend.py": 5,  # definitions; copies to the host; an empty digest
    "minidist/nn/weights.py": 1,  # no weights are drawn
    "minidist/nn/weight_shard.py": 1,  # nor a shard's positions computed
    "minidist/autograd/ops/experts.py": 1,  # which experts tokens choose: evenly
    "minidist/nn/expert_nodes.py": 1,  # nor on which nodes they lie
    "minidist/device/device_copies.py": 1,  # the host's memory for a GPU has no data either
    "minidist/parallel/memory/disk.py": 3,  # files hold nothing, and take no room
    # a move is an event, and no thread carries it out
    "minidist/parallel/memory/transfer_lanes.py": 1,
    "minidist/kernels/loader.py": 2,  # a launch is recorded
}
"""File -> how many lines. A new line is a new special case: think twice, then say here what it
declares."""


def test_few_places_know_of_arrays_without_data() -> None:
    found = Counter[str]()
    for folder, name in (
        ("minidist", "minidist"),
        ("benchmarks", "minidist/bench"),
        ("kernels", "minidist/kernels"),
    ):
        for path in (ROOT / folder).rglob("*.py"):
            place = f"{name}/{path.relative_to(ROOT / folder).as_posix()}"
            if not place.startswith("minidist/simulate/") and place.count("kernels") < 2:
                lines = path.read_text(encoding="utf-8").splitlines()
                found[place] += sum(1 for line in lines if NAMES.search(line))
    assert +found == Counter(PLACES)
