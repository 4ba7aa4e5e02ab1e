"""The numbers of the live figure `routing`, computed another way."""

import numpy as np
import pytest
from live_figures import figure

from minidist.console import size_text
from minidist.site.live import routing


@pytest.mark.parametrize(
    "place",
    # the start without and with a limit; biases with a limit, on 4 and on 8 ranks
    [(0, 4, 1, 1), (0, 0, 1, 1), (3, 0, 1, 1), (3, 1, 0, 2)],
)
def test_routing_counts_what_real_ranks_exchange(place: tuple[int, ...]) -> None:
    state = routing.STATES[place[0]]
    capacity = routing.CAPACITIES[place[1]]
    k = routing.TOP_K[place[2]]
    ranks = routing.RANKS[place[3]]
    counted = routing.cost(routing.routed(state, k)[capacity], ranks)
    assert counted == routing.measured(ranks, k, capacity, state)
    picture = figure("routing", "en").picture(*place)
    told = " ".join(picture.facts)
    assert f"{counted.away} rows travel" in told and size_text(counted.nbytes) in told
    assert f"e{np.argmax(counted.chosen)}," in told and f"{max(counted.rows)} rows" in told
    labels = [shape[3] for shape in picture.shapes if shape[0] == "t" and " · r" in shape[3]]
    assert labels == [f"e{expert} · r{expert * ranks // 8}" for expert in range(8)]
    crosses = [shape for shape in picture.shapes if shape[5:] == ["wrong", "×"]]
    missing = routing.routed(state, k)[capacity].kept[0]
    assert len(crosses) == (~missing).sum() + 1  # and that of the legend


def test_a_hot_expert_drops_three_quarters() -> None:
    """The prediction by hand: 8 sequences of 32 choices, of which two experts take 4 each."""
    live = figure("routing", "en")
    assert "Dropped: 192 of 256, 75%" in " ".join(live.picture(0, 0, 1, 1).facts)
    assert live.predict.choices[live.predict.right] == "75%"
    busiest = [max(routing.cost(routing.routed(s, 2)[None], 4).chosen) for s in routing.STATES]
    assert busiest[0] == 128 and busiest[1] > max(busiest[2:])  # both remedies help
