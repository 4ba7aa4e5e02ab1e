"""Control messages of asynchronous servers arrive as they were sent, and cost what they state."""

from typing import Any

import pytest

import minidist as md
from minidist.errors import MismatchError
from minidist.parallel.data.server_messages import (
    LastPull,
    Push,
    Refusal,
    Weights,
    receive_answer,
    receive_request,
    send_message,
)

DIGESTS = (float(2**52 - 1), 3.0)  # a digest is a whole number of 52 bits


@pytest.mark.parametrize(
    ("message", "numbers"),
    [
        (Push(7, (4, 0), 0.1, 0.25, DIGESTS), 9),
        (Push(0, (0, 0), None, 1.0, ()), 7),
        (Push(0, (0, 0), 0.0, 1.0, ()), 7),
        (LastPull(), 1),
        (Weights(12), 2),
        (Weights(12, (0, 3)), 4),
        (Refusal((2, 5), (DIGESTS, (1.0, 3.0))), 7),
    ],
)
def test_a_message_arrives_as_it_was_sent(message: Any, numbers: int) -> None:
    """A rate of 0 is not the optimizer's own."""

    def rank(world: Any) -> Any:
        if world.rank:
            send_message(world, 0, message)
            return world.ledger.sent_bytes()
        if isinstance(message, Push | LastPull):
            return receive_request(world, 1, servers=2)
        return receive_answer(world, 1)

    received, sent = md.run(rank, size=2)
    assert received == message and type(received) is type(message)
    assert sent == {"control": {"send": 8 * numbers}}


def test_a_refusal_names_both_ranks() -> None:
    with pytest.raises(MismatchError, match="rank 5: the batch's inputs .* rank 2's"):
        Refusal((2, 5), (DIGESTS, (1.0, 3.0))).fail()
