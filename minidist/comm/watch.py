"""The monitor's eye on the ranks that are there: what they wait for, and whether their processes run at all.

What ranks say of their lasting waits goes to the arbiter (arbiter.py), whose verdicts go out to the ranks concerned. A
rank whose wait has reached its limit asks for the table of all waits; those that do not wait are then asked where they
are. All processes are looked at now and then (frozen.py).
"""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping

from minidist.comm import deadlock
from minidist.comm.arbiter import Arbiter
from minidist.comm.deadlock import Verdict
from minidist.comm.door import Seat
from minidist.comm.frozen import LOOK, Stopped
from minidist.comm.loss import Loss
from minidist.comm.waits import State

TABLE_WAIT = 0.3          # seconds that ranks get to say what they do, when another's wait has reached its limit


class Watch:
    """Belongs to the monitor's one thread that hears the ranks; final_table() alone is for any.

    Args: size: ranks of the job. present() -> the seats of those that are there, by world rank.
          lose(loss): end the job for this reason.
    """

    def __init__(self, size: int, present: Callable[[], dict[int, Seat]], lose: Callable[[Loss], bool]) -> None:
        self._size, self._present, self._lose = size, present, lose
        self._arbiter = Arbiter(self._ask, self._tell)
        self._stopped, self._looked, self._looks = Stopped(), time.monotonic(), 0
        self._far: dict[str, set[int]] = {}                   # by host: what was stopped there when last looked at
        self._curious: list[tuple[float, Seat, State]] = []   # when to answer whom, and what it waited for

    def heard(self, seat: Seat, state: State, number: int) -> None:
        """A rank has said what it waits for, in answer to question `number`, or unasked (0)."""
        self._arbiter.heard(seat.world_rank, state, number)

    def left(self, seat: Seat, state: State) -> None:
        """A rank has said goodbye."""
        self._arbiter.left(seat.world_rank, state)

    def asked(self, seat: Seat, state: State) -> None:
        """A rank whose wait has reached its limit asks for the table; `state`: as it waited."""
        self._curious.append((time.monotonic() + TABLE_WAIT, seat, state))
        self._ask_idle()

    def due(self) -> float:
        """Seconds until tick() has something to do."""
        now, arbiter = time.monotonic(), self._arbiter.due()
        return min(max(0.0, self._looked + LOOK - now), LOOK if arbiter is None else arbiter,
                   *(max(0.0, when - now) for when, *_ in self._curious[:1]))

    def tick(self) -> None:
        """Do what is due."""
        self._arbiter.tick()
        while self._curious and self._curious[0][0] <= time.monotonic():
            _, seat, state = self._curious.pop(0)
            others = {other.world_rank: waited for _, other, waited in self._curious}   # whose time was up with it
            seat.send("table", value=self._table({**others, seat.world_rank: state}))
        if time.monotonic() - self._looked >= LOOK:
            self._look_for_frozen()

    def final_table(self) -> str:
        """The table, after the ranks that do not wait had time to say what they do."""
        self._ask_idle()
        time.sleep(TABLE_WAIT)
        return self._table({})

    def _table(self, said: Mapping[int, State]) -> str:
        return deadlock.table({**self._arbiter.states, **said}, dict(self._arbiter.ended), self._size)

    def _ask(self, ranks: list[int], number: int) -> None:
        seats = self._present()
        for rank in ranks:
            if rank in seats:
                seats[rank].send("ask", round=number)

    def _ask_idle(self) -> None:
        states = dict(self._arbiter.states)
        self._ask([rank for rank in self._present() if rank not in states or not states[rank].waits], 0)

    def _tell(self, verdict: Verdict) -> None:
        seats = self._present()
        for rank in verdict.ranks:
            if rank in seats:
                seats[rank].send("verdict", error=verdict.error, text=verdict.text)

    def _look_for_frozen(self) -> None:
        """Look at the processes of this host; have one rank of each other host look at its neighbours."""
        self._looked, self._looks = time.monotonic(), self._looks + 1
        hosts: defaultdict[str, list[Seat]] = defaultdict(list)
        for seat in self._present().values():
            hosts[seat.host].append(seat)
        here = hosts.pop(os.uname().nodename, [])
        self._freeze(here, self._stopped.frozen({seat.pid for seat in here}))
        for seats in hosts.values():
            looker = seats[self._looks % len(seats)]
            looker.send("look", pids=[seat.pid for seat in seats if seat is not looker])

    def saw_stopped(self, looker: Seat, pids: set[int]) -> None:
        """A rank of another host has looked: these are stopped. Twice running is frozen."""
        frozen, self._far[looker.host] = pids & self._far.get(looker.host, set()), pids
        self._freeze([seat for seat in self._present().values() if seat.host == looker.host], frozen)

    def _freeze(self, seats: list[Seat], pids: set[int]) -> None:
        """The ranks of these processes are lost."""
        for seat in seats:
            if seat.pid in pids:
                seat.frozen = True
                self._lose(Loss(seat.world_rank, seat.pid, seat.host, "is frozen (stopped)"))
