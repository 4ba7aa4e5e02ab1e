"""The numbers of the live figure `families`, computed another way."""

import pytest

from minidist.comm.cost.critical_path import PATHS
from minidist.comm.cost.link_model import LinkCost
from minidist.comm.cost.volume import FORMULAS, Case
from minidist.site.live.families import CALLS, LENGTHS, messages_of, seconds_of


@pytest.mark.parametrize("size", [2, 4, 8])  # other numbers of ranks overlap in a tree
def test_the_families_take_what_the_critical_path_says(size: int) -> None:
    cost = LinkCost("link", size, 2e-3, 0.0, 2e-3 / 65536, 0.0, 0.0)
    for verb, algorithm in CALLS:
        if (verb, algorithm) in PATHS:
            for nbytes in LENGTHS:
                told = cost.seconds(PATHS[verb, algorithm](size).work(nbytes))
                assert seconds_of(verb, algorithm, size, nbytes) == pytest.approx(told), algorithm


@pytest.mark.parametrize("size", [4, 7])
def test_the_families_send_what_the_formulas_say(size: int) -> None:
    nbytes = 8 * 1001 * size
    for verb, algorithm in CALLS:
        brings = verb in ("gather", "all_gather")
        case = Case(
            size,
            nbytes=0 if verb == "barrier" else nbytes,
            blocks=[nbytes if brings else nbytes // size] * size,
            parts=[[nbytes // size] * size] * size,
            itemsize=8,
        )
        messages = messages_of(verb, algorithm, size, nbytes)
        formula = FORMULAS[verb, algorithm]
        sent = sum(message.nbytes for message in messages)
        assert (len(messages), sent) == (formula.messages_of(case), formula.bytes_of(case)), verb
    eight, seven = (seconds_of("all_reduce", "doubling", count, 512) for count in (8, 7))
    assert round(1e3 * eight) == 6 and round(1e3 * seven) == 8
