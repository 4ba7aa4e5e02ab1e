"""Control messages between workers and asynchronous servers: each is a type, and is sent as float64
numbers; the first number names the type.

    worker -> server    Push        the gradient of a step follows
                        LastPull    the worker has made all its steps
    server -> worker    Weights     new weights follow
                        Refusal     the batches of two workers differ, and the server ends

Cost:    numbers of a message, S servers: Push 5 + S, and 2 more where batches are compared;
         LastPull 1; Weights 2, and 1 per lost worker in the answer to LastPull; Refusal 7. All are
         counted under `control`.
"""

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from minidist.comm.group import Group
from minidist.data.rank_batch import check_digests


class MessageKind(IntEnum):
    """The first number of a message."""

    PUSH = 0
    LAST_PULL = 1
    WEIGHTS = 2
    REFUSAL = 3


class Push(NamedTuple):
    """The message before a worker's gradient of a step.

    Attributes: step      counted from 0, of this worker
                versions  for each server, the number of its updates when the worker read the
                weights of that step
                lr        the learning rate; None: the optimizer's own
                scale     factor of the gradient
                digests   of the step's batch, which a server compares with those of other workers;
                or none
    """

    step: int
    versions: tuple[int, ...]
    lr: float | None
    scale: float
    digests: tuple[float, ...]

    def numbers(self) -> list[float]:
        """Return the numbers to send."""
        has_rate = self.lr is not None
        rate = 0.0 if self.lr is None else self.lr
        return [
            MessageKind.PUSH,
            self.step,
            has_rate,
            rate,
            self.scale,
            *self.versions,
            *self.digests,
        ]


class LastPull(NamedTuple):
    """The message of a worker that has made all its steps, and asks for the last weights."""

    def numbers(self) -> list[float]:
        """Return the numbers to send."""
        return [MessageKind.LAST_PULL]


class Weights(NamedTuple):
    """The message before a server's weights.

    Attributes: version  the number of updates of the weights
                lost     in the answer to LastPull: the workers that were lost
    """

    version: int
    lost: tuple[int, ...] = ()

    def numbers(self) -> list[float]:
        """Return the numbers to send."""
        return [MessageKind.WEIGHTS, self.version, *self.lost]


class Refusal(NamedTuple):
    """The answer if the batches of two workers differ.

    Attributes: ranks    of the two, in the world; digests: of the batch of each
    """

    ranks: tuple[int, int]
    digests: tuple[tuple[float, ...], tuple[float, ...]]

    def numbers(self) -> list[float]:
        """Return the numbers to send."""
        return [MessageKind.REFUSAL, *self.ranks, *self.digests[0], *self.digests[1]]

    def fail(self) -> None:
        """Raise MismatchError, the same on server and workers."""
        check_digests(np.array(self.digests), self.ranks)


def send_message(group: Group, rank: int, message: Push | LastPull | Weights | Refusal) -> None:
    """Send a message to a rank of the group."""
    with group.ledger.control():
        group.send(np.array(message.numbers(), np.float64), rank)


def receive_request(group: Group, worker: int, servers: int) -> Push | LastPull:
    """Return the request of a worker to one of `servers` servers."""
    with group.ledger.control():
        kind, *numbers = group.recv(worker).tolist()
    if kind == MessageKind.LAST_PULL:
        return LastPull()
    step, has_rate, rate, scale, *rest = numbers
    return Push(
        int(step),
        tuple(map(int, rest[:servers])),
        rate if has_rate else None,
        scale,
        tuple(rest[servers:]),
    )


def receive_answer(group: Group, server: int) -> Weights | Refusal:
    """Return the answer of the server, a rank of the group, to a request."""
    with group.ledger.control():
        kind, *numbers = group.recv(server).tolist()
    if kind == MessageKind.WEIGHTS:
        version, *lost = numbers
        return Weights(int(version), tuple(map(int, lost)))
    first, second, *digests = numbers
    half = len(digests) // 2
    return Refusal((int(first), int(second)), (tuple(digests[:half]), tuple(digests[half:])))
