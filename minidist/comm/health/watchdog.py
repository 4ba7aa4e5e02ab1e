"""The monitor's view of the ranks that are there: what they wait for, and whether their processes
run at all.

The states of lasting waits go to the arbiter (deadlock_arbiter.py), and its verdicts to the ranks
concerned. Every process is looked at each LOOK seconds, and a stopped one when it has been so for
the patience (process_state.py): those of this system from here, the others by their node agents
(node_agent.py).
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from minidist.comm.health import deadlock
from minidist.comm.health.acceptor import SILENCE
from minidist.comm.health.deadlock_arbiter import Arbiter
from minidist.comm.health.failure import Failure, listed
from minidist.comm.health.process_state import LOOK, ProcessLooks, this_system
from minidist.comm.health.seats import AgentSeat, Seat
from minidist.comm.health.wait_state import State
from minidist.errors import CommError

# seconds that ranks get to say what they do, when another's wait has reached its limit
TABLE_WAIT = 0.3
# seconds for a node agent to come, after a rank of its host has ended; again, to say how
AGENT_WAIT = 1.0


class Watchdog:
    """Belongs to the monitor's thread that hears the ranks; tables, and methods about node agents,
    are for any thread.

    Args: size: ranks of the job. present() -> the seats of those that are there, by world rank;
    staying() -> the same
          and those that have said goodbye, until their process has ended. lose(loss): end the job
          for this reason.
          patience: seconds that a rank's process may be stopped. awaited() -> the ranks that have
          not come and that others wait for; miss(loss): one of them will not come.
    """

    def __init__(
        self,
        size: int,
        present: Callable[[], dict[int, Seat]],
        staying: Callable[[], dict[int, Seat]],
        lose: Callable[[Failure], bool],
        patience: float,
        *,
        miss: Callable[[Failure], None] = lambda loss: None,
        awaited: Callable[[], set[int]] = set,
    ) -> None:
        self._size = size
        self._present = present
        self._staying = staying
        self._lose = lose
        self._miss = miss
        self._awaited = awaited
        self.arbiter = Arbiter(
            ask=lambda ranks, number: self._send(ranks, "ask", round=number),
            tell=lambda verdict: self._send(
                verdict.ranks, "verdict", error=verdict.error, text=verdict.text
            ),
        )
        self._looks = ProcessLooks(patience)
        self._agents: list[AgentSeat] = []  # of all node agents that ever came
        self._news = threading.Condition()  # of node agents, and what they say
        self._over = False  # every rank has said goodbye
        # of ranks whose wait has reached its limit: as they waited
        self._overdue: dict[int, State] = {}

    def due(self) -> float:
        """Seconds until tick() has something to do."""
        arbiter = self.arbiter.due()
        return min(
            max(0.0, self._looks.next(LOOK) - time.monotonic()),
            LOOK if arbiter is None else arbiter,
        )

    def tick(self) -> None:
        """Do what is due."""
        self.arbiter.tick()
        if time.monotonic() >= self._looks.next(LOOK):
            self._look()

    def table(self) -> str:
        """What every rank waits for, a line each. Takes TABLE_WAIT s, in which idle ranks say where
        they are."""
        states = dict(self.arbiter.states)
        self._send(
            [rank for rank in self._present() if rank not in states or not states[rank].waits],
            "ask",
            round=0,
        )
        time.sleep(TABLE_WAIT)
        return deadlock.table(
            {**self.arbiter.states, **self._overdue}, dict(self.arbiter.ended), self._size
        )

    def send_table(self, seat: Seat, state: State) -> None:
        """To a rank whose wait has reached its limit; `state`: as it waited."""
        self._overdue[seat.world_rank] = state
        seat.send("table", value=self.table())
        self._overdue.pop(seat.world_rank, None)

    def _send(self, ranks: list[int], kind: str, **content: Any) -> None:
        """To those of `ranks` that are there."""
        for rank, seat in self._present().items():
            if rank in ranks:
                seat.send(kind, **content)

    # --- processes
    # ---------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Look at the processes of this system, and ask the node agents of others; a silent agent
        is lost."""
        here = [seat for seat in self._staying().values() if seat.system == this_system()]
        pids = {seat.pid for seat in here}
        self._seen(here, self._looks.frozen(pids), self._looks.ended(pids))
        for agent in self.agents():
            if agent.unanswered * LOOK >= SILENCE:
                self.lose_agent(agent, None)
            else:
                agent.unanswered += 1
                covered = self._covered(agent, self._staying())
                agent.send(
                    "look",
                    pids=[seat.pid for seat in covered],
                    patience=self._looks.patience,
                    awaited=sorted(self._awaited().intersection(agent.ranks)),
                )

    def _seen(self, seats: list[Seat], frozen: set[int], ended: Mapping[int, str]) -> None:
        """Ranks whose processes are in `frozen`, or in `ended` (with how they ended), are lost.

        One that has ended is heard first: its goodbye may wait behind what many other ranks say.
        """
        for seat in seats:
            how = "is frozen (stopped)" if seat.pid in frozen else ended.get(seat.pid)
            if seat.left and seat.pid in ended:
                seat.ended = True
            elif how is not None and (seat.pid in frozen or not seat.unheard()):
                self._lose(Failure(seat.world_rank, seat.pid, seat.host, how))

    # --- node agents of other hosts
    # ----------------------------------------------------------------------------------

    def agents(self) -> list[AgentSeat]:
        """The node agents that are there."""
        return [agent for agent in self._agents if not agent.left]

    def close(self) -> None:
        """Kill what is frozen here, and close the connections of all node agents, which then do so
        there."""
        self._looks.close()
        for agent in self._agents:
            agent.sock.close()

    def add(self, agent: AgentSeat) -> None:
        """A node agent has come."""
        with self._news:
            self._agents.append(agent)
            self._news.notify_all()
        if self._over:
            agent.send("over")

    def release_agents(self) -> None:
        """Tell every node agent, also one that is yet to come, that every rank has said goodbye."""
        self._over = True
        for agent in self.agents():
            agent.send("over")

    def heard_agent(self, agent: AgentSeat, frame: dict[str, Any]) -> None:
        """Take a frame of a node agent (node_agent.py has the list). Raises CommError for a frame
        that is not in it."""
        agent.unanswered = 0
        match frame["kind"]:
            case "seen":
                self._seen(
                    self._covered(agent, self._staying()),
                    set(frame["frozen"]),
                    dict(frame["ended"]),
                )
            case "how":
                self._note(agent, int(frame["rank"]), str(frame["text"]))
            case "ended":
                loss = Failure(**frame["loss"])
                self._note(agent, loss.world_rank, loss.how)
                self._lose(loss)
            case "absent":
                self._miss(Failure(**frame["loss"]))
            case "goodbye":
                self._remove(agent)
            case kind:
                raise CommError(f"unknown frame {kind!r}")

    def lose_agent(self, agent: AgentSeat, error: Exception | None) -> None:
        """A node agent's connection ended with `error`, or it is silent; its ranks are lost, unless
        it said goodbye."""
        covered = self._covered(agent)
        if self._remove(agent) and covered:
            first = covered[0]
            silent = isinstance(error, OSError | None) and not isinstance(error, CommError)
            why = (
                f"nothing was heard of it for {SILENCE:g} s"
                if silent
                else f"its node agent (process {agent.pid}) is gone ({error})"
            )
            self._lose(
                Failure(first.world_rank, first.pid, first.host, _out_of_reach(covered, why))
            )

    def how_it_ended(self, seat: Seat) -> str | None:
        """How the process at this seat ended, as its node agent says; None if there is none, or it
        does not know."""
        # another system's agent is about to come
        limit = 0.0 if seat.system == this_system() else AGENT_WAIT
        with self._news:
            agent = self._news.wait_for(
                lambda: next((one for one in self.agents() if one.covers(seat)), None), limit
            )
        if agent is None:
            return None
        agent.send("how", rank=seat.world_rank, pid=seat.pid)
        with self._news:
            self._news.wait_for(lambda: seat.world_rank in agent.told or agent.left, AGENT_WAIT)
            if seat.world_rank in agent.told:
                return agent.told[seat.world_rank] or None
        return _out_of_reach(self._covered(agent), "its node agent does not answer")

    def _note(self, agent: AgentSeat, rank: int, how: str) -> None:
        with self._news:
            agent.told[rank] = how
            self._news.notify_all()

    def _remove(self, agent: AgentSeat) -> bool:
        """Returns whether it was still there."""
        with self._news:
            if agent.left:
                return False
            agent.left = True
            self._news.notify_all()
            return True

    def _covered(self, agent: AgentSeat, seats: dict[int, Seat] | None = None) -> list[Seat]:
        """Those of `seats`, or of the ranks that are there, that this agent looks after."""
        return [
            seat
            for _, seat in sorted((self._present() if seats is None else seats).items())
            if agent.covers(seat)
        ]


def _out_of_reach(seats: list[Seat], why: str) -> str:
    return (
        "is out of reach with its whole host "
        f"({listed([seat.world_rank for seat in seats])}): {why}"
    )
