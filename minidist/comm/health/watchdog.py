"""The monitor's watch over the connected ranks: their waits, and whether their processes run.

The states of long waits go to the arbiter (deadlock_arbiter.py), and its verdicts to the ranks of
the verdict. Every process is checked each LOOK seconds; a stopped process also when it has been
stopped for the patience (process_state.py). The monitor checks processes of its own system, node
agents the others (node_agent.py).
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

# seconds in which ranks report what they do, when another's wait has reached its limit
TABLE_WAIT = 0.3
# seconds for a node agent to connect after a rank of its host has ended; again, to say how it ended
AGENT_WAIT = 1.0


class Watchdog:
    """The watchdog of the monitor. It belongs to the thread that reads from the ranks; any thread
    may use table() and the methods about node agents.

    Args: size: ranks of the job. present() -> the seats of the connected ranks, by world rank;
          staying() -> also the ranks that have said goodbye, until their process has ended.
          lose(loss): end the job for this reason. patience: seconds that a rank's process may be
          stopped. awaited() -> the ranks that have not connected and for which others wait;
          miss(loss): one of them will not connect.
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
        self._agents: list[AgentSeat] = []  # all node agents that ever connected
        self._news = threading.Condition()  # about node agents and their messages
        self._over = False  # every rank has said goodbye
        # by rank whose wait has reached its limit: its state then
        self._overdue: dict[int, State] = {}

    def due(self) -> float:
        """Return the seconds until tick() has something to do."""
        arbiter = self.arbiter.due()
        return min(
            max(0.0, self._looks.next(LOOK) - time.monotonic()),
            LOOK if arbiter is None else arbiter,
        )

    def tick(self) -> None:
        """Do the work that is due."""
        self.arbiter.tick()
        if time.monotonic() >= self._looks.next(LOOK):
            self._look()

    def table(self) -> str:
        """Return what every rank waits for, one line each. Takes TABLE_WAIT s, in which ranks
        without a wait report their place."""
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
        """Send the table to a rank whose wait has reached its limit; `state`: its state then."""
        self._overdue[seat.world_rank] = state
        seat.send("table", value=self.table())
        self._overdue.pop(seat.world_rank, None)

    def _send(self, ranks: list[int], kind: str, **content: Any) -> None:
        """Send a frame to the connected ranks in `ranks`."""
        for rank, seat in self._present().items():
            if rank in ranks:
                seat.send(kind, **content)

    # --- processes
    # ---------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Check the processes of this system, and ask the node agents for the others; lose an agent
        that is silent."""
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
        """Lose the ranks whose processes are in `frozen` or in `ended` (with how they ended).

        If a process has ended, its frames are read first: its goodbye may be queued behind frames
        of many other ranks.
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
        """Return the connected node agents."""
        return [agent for agent in self._agents if not agent.left]

    def close(self) -> None:
        """Kill the frozen processes here, and close the connections of all node agents, which then
        do the same there."""
        self._looks.close()
        for agent in self._agents:
            agent.sock.close()

    def add(self, agent: AgentSeat) -> None:
        """Add a node agent that has connected."""
        with self._news:
            self._agents.append(agent)
            self._news.notify_all()
        if self._over:
            agent.send("over")

    def release_agents(self) -> None:
        """Notify every node agent, also a later one, that every rank has said goodbye."""
        self._over = True
        for agent in self.agents():
            agent.send("over")

    def heard_agent(self, agent: AgentSeat, frame: dict[str, Any]) -> None:
        """Handle a frame of a node agent (node_agent.py lists them). Raises CommError for an
        unknown frame."""
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
        """Remove a node agent whose connection ended with `error`, or that is silent; lose its
        ranks, unless it said goodbye."""
        covered = self._covered(agent)
        if self._remove(agent) and covered:
            first = covered[0]
            silent = isinstance(error, OSError | None) and not isinstance(error, CommError)
            why = (
                f"it sent nothing for {SILENCE:g} s"
                if silent
                else f"its node agent (process {agent.pid}) is gone ({error})"
            )
            self._lose(
                Failure(first.world_rank, first.pid, first.host, _out_of_reach(covered, why))
            )

    def how_it_ended(self, seat: Seat) -> str | None:
        """Return how the process at this seat ended, from its node agent; None if there is no
        agent, or it does not know."""
        # another system's agent may still be connecting
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
        """Mark the agent as left; return whether it was connected."""
        with self._news:
            if agent.left:
                return False
            agent.left = True
            self._news.notify_all()
            return True

    def _covered(self, agent: AgentSeat, seats: dict[int, Seat] | None = None) -> list[Seat]:
        """Return those of `seats` (default: the connected ranks) that this agent watches."""
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
