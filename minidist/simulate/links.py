"""Chapter 24 · The links that one call uses: their costs, until when each is busy, and the bytes
that they carry.

    links = CallLinks(members, cluster)             # places of the ranks, in the group's order
    routes = links.routes(src, dst)                 # of each message its links, one column a hop
    begins = links.take(routes.hops[:, 0], ready, busy)     # when each message gets its first link
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from minidist.simulate.cluster import Cluster


class Port(NamedTuple):
    """The costs of each rank's own link, for what the rank does without messages.

    Attributes: alpha, beta, gamma   (ranks,), as in comm/cost/link_model.py
    """

    alpha: np.ndarray
    beta: np.ndarray
    gamma: np.ndarray


class Routes(NamedTuple):
    """The links of messages, by the numbers of CallLinks.

    Attributes: hops     (messages, hops): -1 behind a route's last link
                last     of each message the place of its last link
                shared   of each hop True if two messages have the same link there
    """

    hops: np.ndarray
    last: np.ndarray
    shared: tuple[bool, ...]


class CallLinks:
    """The links of one call, numbered here from 0. Times are in seconds since the call began.

    Attributes: alpha, beta, overhead, gamma, crowd   of each link, as in comm/cost/link_model.py
                free      until when each link is busy
                carried   bytes that each link has carried
    """

    def __init__(self, members: Sequence[int], cluster: Cluster) -> None:
        self._members = members
        self._cluster = cluster
        self._numbers: dict[int, int] = {}  # the cluster's number of a link -> the number here
        self._routes: dict[bytes, Routes] = {}
        self._costs = np.zeros((5, 0))
        self.free = np.zeros(0)
        self.carried = np.zeros(0, np.int64)

    @cached_property
    def port(self) -> Port:
        """Return the costs of each rank's link to the rank before it."""
        places = self._members
        routes = [self._cluster.route(place, places[rank - 1]) for rank, place in enumerate(places)]
        links = [self._cluster.links[route[0]] for route in routes]
        return Port(
            np.array([link.alpha for link in links]),
            np.array([1 / link.bandwidth for link in links]),
            np.array([link.gamma for link in links]),
        )

    def routes(self, src: np.ndarray, dst: np.ndarray) -> Routes:
        """Return the links of messages between these ranks. Remembered, because many rounds of a
        call send between the same ranks."""
        pairs = src * len(self._members) + dst
        key = pairs.tobytes()
        if key not in self._routes:
            self._routes[key] = self._routed(pairs)
        return self._routes[key]

    def _routed(self, pairs: np.ndarray) -> Routes:
        size = len(self._members)
        places = self._members
        different, which = np.unique(pairs, return_inverse=True)
        routes = [
            self._cluster.route(places[pair // size], places[pair % size])
            for pair in different.tolist()
        ]
        self._add({link for route in routes for link in route})
        most = max(map(len, routes), default=0)
        numbers = self._numbers
        rows = [
            [*(numbers[link] for link in route), *(-1 for _ in range(most - len(route)))]
            for route in routes
        ]
        hops = np.array(rows, np.int64).reshape(len(rows), most)[which]
        there = hops >= 0
        shared = tuple(
            bool((np.bincount(link[used]) > 1).any())
            for link, used in zip(hops.T, there.T, strict=True)
        )
        return Routes(hops, there.sum(axis=1) - 1, shared)

    def _add(self, used: set[int]) -> None:
        """Number the links that are new, in the cluster's order, and keep their costs."""
        new = sorted(used - self._numbers.keys())
        for link in new:
            self._numbers[link] = len(self._numbers)
        links = [self._cluster.links[link] for link in new]
        costs = [
            (link.alpha, 1 / link.bandwidth, link.overhead, link.gamma, link.crowd)
            for link in links
        ]
        self._costs = np.hstack([self._costs, np.array(costs).reshape(-1, 5).T])
        self.alpha, self.beta, self.overhead, self.gamma, self.crowd = self._costs
        self.free = np.append(self.free, np.zeros(len(new)))
        self.carried = np.append(self.carried, np.zeros(len(new), np.int64))

    def take(self, link: np.ndarray, ready: np.ndarray, busy: np.ndarray) -> np.ndarray:
        """Return when each message gets its link, which is then busy for `busy` seconds. No two
        messages have the same link."""
        begins: np.ndarray = np.maximum(ready, self.free[link])
        self.free[link] = begins + busy
        return begins

    def take_in_turn(
        self,
        link: np.ndarray,
        ready: np.ndarray,
        busy: np.ndarray,
        left: np.ndarray,
        users: np.ndarray,
    ) -> np.ndarray:
        """Do as take, where messages may share a link: they follow each other in the order in which
        they left, and in the order given where they left together. users: of users_of(link)."""
        when = np.where(users < 0, np.inf, left[users])
        order = np.take_along_axis(users, np.argsort(when, axis=1, kind="stable"), axis=1)
        begins = np.empty(len(link))
        for now in order.T:
            now = now[now >= 0]
            begins[now] = self.take(link[now], ready[now], busy[now])
        return begins

    def count(self, hops: np.ndarray, nbytes: np.ndarray) -> None:
        """Add the bytes of messages to each of their links."""
        for link in hops.T:
            there = link >= 0
            np.add.at(self.carried, link[there], nbytes[there])

    def link_bytes(self) -> dict[int, int]:
        """Return the bytes that each link carried, by the cluster's number of the link."""
        return {
            link: int(self.carried[number])
            for link, number in sorted(self._numbers.items())
            if self.carried[number]
        }


def users_of(link: np.ndarray) -> np.ndarray:
    """Return the messages of each link, by their places in `link`: (links, most), -1 behind the
    last."""
    order = np.argsort(link, kind="stable")
    first = np.flatnonzero(np.diff(link[order], prepend=-1))
    count = np.diff(first, append=len(link))
    users = np.full((len(first), int(count.max(initial=0))), -1)
    row = np.repeat(np.arange(len(first)), count)
    users[row, np.arange(len(link)) - first[row]] = order
    return users
