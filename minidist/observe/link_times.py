"""Chapter 25 · Links measured while training: alpha, beta and drift of each, from the messages that
steps record.

    links = link_profiles(read_rank_steps(run))
    links[0, 1].seconds(1 << 20)        # what a message of 1 MiB from rank 0 to rank 1 takes

    seconds of a message    arrived - sent, of those whose receiver had posted its receive before:
                            no late rank counts
    beta, alpha             a line through the quartiles of the smallest and of the largest size
                            that occur often
    drift                   quartile of the newest half of the messages over that of the oldest half

A quarter of the messages is quicker than the quartile. It is what the link can do: a busy core
makes messages late, and never early. Both ends of a message are matched by group, number and bytes
(comm/flight/message_times.py). Clocks of two hosts are aligned by the quickest messages both ways,
as NTP does.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from minidist.observe.rank_steps import RankSteps

FEW = 4  # messages: fewer of a size say nothing
Link = tuple[int, int]


@dataclass(frozen=True)
class Message:
    """One message from `src` to `dst`: when it was sent, its receive was posted, and it had
    arrived, in seconds."""

    src: int
    dst: int
    step: int
    nbytes: int
    sent: float
    posted: float
    arrived: float

    @property
    def seconds(self) -> float:
        return self.arrived - self.sent


@dataclass(frozen=True)
class LinkProfile:
    """What one direction of a link costs.

    Attributes: alpha: seconds a message; beta: seconds a byte; drift: 1.0 if it stays as it was.
                messages: how many were measured; large: bytes of the largest size among them.
    """

    src: int
    dst: int
    alpha: float
    beta: float
    drift: float
    messages: int
    large: int

    def seconds(self, nbytes: float) -> float:
        """Of a message of so many bytes."""
        return self.alpha + nbytes * self.beta


def messages_of(ranks: Mapping[int, RankSteps]) -> dict[Link, list[Message]]:
    """The messages of which both ends are known and the receiver waited, by link, in the order of
    steps."""
    shift = {
        rank: each.clock - next(iter(ranks.values())).clock if _hosts(ranks) > 1 else 0.0
        for rank, each in ranks.items()
    }
    sent = {
        (src, peer, group, number, nbytes): at / 1e6 + shift[src]
        for src, each in ranks.items()
        for line in each.steps
        for peer, group, number, nbytes, at in line.get("out", ())
    }
    found: defaultdict[Link, list[Message]] = defaultdict(list)
    for dst, each in ranks.items():
        for line in each.steps:
            for peer, group, number, nbytes, posted, arrived in line.get("in", ()):
                at = sent.get((peer, dst, group, number, nbytes))
                if at is not None:
                    found[peer, dst].append(
                        Message(
                            peer,
                            dst,
                            line["step"],
                            nbytes,
                            at,
                            posted / 1e6 + shift[dst],
                            arrived / 1e6 + shift[dst],
                        )
                    )
    aligned = _aligned(found, ranks) if _hosts(ranks) > 1 else found
    return {
        link: waited
        for link, messages in aligned.items()
        if (waited := [message for message in messages if message.posted <= message.sent])
    }


def _hosts(ranks: Mapping[int, RankSteps]) -> int:
    return len({each.host for each in ranks.values()})


def _aligned(
    found: Mapping[Link, list[Message]], ranks: Mapping[int, RankSteps]
) -> dict[Link, list[Message]]:
    """Of links between hosts: the receiver's times, so that the quickest messages both ways take
    equally long."""
    aligned = {}
    for (src, dst), messages in found.items():
        back = found.get((dst, src), [])
        if ranks[src].host == ranks[dst].host or not back:
            aligned[src, dst] = list(messages)
            continue
        ahead = (
            min(m.arrived - m.sent for m in messages) - min(m.arrived - m.sent for m in back)
        ) / 2
        aligned[src, dst] = [
            Message(m.src, m.dst, m.step, m.nbytes, m.sent, m.posted - ahead, m.arrived - ahead)
            for m in messages
        ]
    return aligned


def link_profiles(ranks: Mapping[int, RankSteps]) -> dict[Link, LinkProfile]:
    """The profile of each link of which some size has FEW messages or more."""
    found = {}
    for (src, dst), messages in sorted(messages_of(ranks).items()):
        counts = Counter(message.nbytes for message in messages)
        sizes = sorted(size for size, count in counts.items() if count >= FEW)
        if not sizes:
            continue
        small, large = (
            quartile([m.seconds for m in messages if m.nbytes == size])
            for size in (sizes[0], sizes[-1])
        )
        beta = max(0.0, (large - small) / (sizes[-1] - sizes[0])) if len(sizes) > 1 else 0.0
        last = [m.seconds for m in messages if m.nbytes == sizes[-1]]
        half = len(last) // 2
        drift = quartile(last[half:]) / max(1e-9, quartile(last[:half])) if half else 1.0
        alpha = max(0.0, large - beta * sizes[-1])
        found[src, dst] = LinkProfile(src, dst, alpha, beta, drift, len(messages), sizes[-1])
    return found


def quartile(values: list[float], part: float = 0.25) -> float:
    """The value below which a quarter, or another `part`, of the values lies."""
    return sorted(values)[int(part * (len(values) - 1))]
