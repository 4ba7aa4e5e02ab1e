"""One peer of a rank: the link to it, and the messages on their way there and back."""

from collections import deque
from typing import TypeVar

from minidist.comm.transport import Tag
from minidist.comm.transports.progress.link import ByteLink
from minidist.comm.transports.progress.message import Frame, Receive, Send

Item = TypeVar("Item", Receive, Frame)


class ByTag(dict[Tag, "deque[Item]"]):
    """First in, first out, tag by tag; a tag without items takes no memory."""

    def put(self, tag: Tag, item: Item) -> None:
        self.setdefault(tag, deque()).append(item)

    def take(self, tag: Tag) -> Item | None:
        """The oldest item of `tag`, removed."""
        items = self.get(tag)
        if items is None:
            return None
        item = items.popleft()
        if not items:
            del self[tag]
        return item


class Peer:
    """The link, and the messages each way. The engine's lock guards them, except `frame`, which is the leader's."""

    def __init__(self, rank: int, link: ByteLink) -> None:
        self.rank, self.link = rank, link
        self.outgoing: deque[Send] = deque()
        self.sent = self.taken = 0                  # messages begun, and messages taken whole
        self.posted: ByTag[Receive] = ByTag()
        self.unexpected: ByTag[Frame] = ByTag()
        self.unexpected_bytes = 0
        self.receives: set[Receive] = set()         # asked for and not finished
        self.frame: Frame | None = None             # whose payload is being read
        self.awaited = 0                            # waits for it at a board (shm/exchange_board.py)
        self.deaf: str | None = None                # why nothing more can be sent to it
        self.mute: str | None = None                # why nothing more will come from it

    @property
    def reading(self) -> bool:
        """Whether something is to be read: a message asked for, or the rest of one that was refused."""
        return bool(self.receives) or self.frame is not None
