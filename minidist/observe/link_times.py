"""Chapter 25 · Links measured while training: alpha, beta and drift of each link, from the messages
in the records of steps.

    links = link_profiles(read_rank_steps(run))
    links[0, 1].seconds(1 << 20)        # seconds of a message of 1 MiB from rank 0 to rank 1

    seconds of a message    arrived - sent; only if the receiver posted its receive before, so that
                            late ranks do not count
    beta, alpha             a line through the quartiles of the smallest and the largest size that
                            occur often
    drift                   quartile of the newest half of the messages / that of the oldest half

A quarter of the messages is quicker than the quartile. It shows what the link can do: a busy core
makes messages late, never early. Both ends of a message are matched by group, number and bytes
(comm/flight/message_times.py). Clocks of two hosts are aligned by the quickest messages in both
directions, as NTP does.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from minidist.observe.rank_steps import RankSteps

FEW = 4  # messages: fewer of a size say nothing
Link = tuple[int, int]


@dataclass(frozen=True)
class Message:
    """A message from `src` to `dst`; sent, posted (its receive) and arrived are times in
    seconds."""

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
    """The measured cost of one direction of a link.

    Attributes: alpha: seconds per message; beta: seconds per byte; drift: 1.0 if the link does not
                change.
                messages: the number measured; large: bytes of the largest size that occurs often.
    """

    src: int
    dst: int
    alpha: float
    beta: float
    drift: float
    messages: int
    large: int

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of a message of nbytes."""
        return self.alpha + nbytes * self.beta


def messages_of(ranks: Mapping[int, RankSteps]) -> dict[Link, list[Message]]:
    """Return {link: messages in the order of steps}, only messages with both ends recorded for
    which the receiver waited."""
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
    """Return the messages with aligned clocks: the receiver's times on links between hosts are
    shifted so that the quickest messages in both directions take the same time."""
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
    """Return the profile of each link that has FEW or more messages of some size."""
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
    """Return the value below which a quarter, or another `part`, of the values lies."""
    return sorted(values)[int(part * (len(values) - 1))]
