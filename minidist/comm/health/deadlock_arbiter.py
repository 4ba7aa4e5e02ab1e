"""The arbiter hears of every rank's lasting waits, and decides when they are a deadlock or a
disagreement.

    a rank      tells its state when a wait begins to last, and when it ends           heard(rank, state)
    suspicion   by what was told, some waits only wait for each other; PAUSE, so that every rank has
                told its waits
    ask twice   every rank among them says its state; PAUSE; all of them once more     ask(ranks, round)
    verdict     both times the same waits, the same counts of messages, and no hope    tell(verdict)

Two rounds, the second begun after the first has ended, at whose ends no wait and no count has
changed, show all ranks as they were at one moment in between: nothing is missed, and nothing in
flight is taken for lost. A disagreement in a call needs no confirmation. Where waits are hopeless
in both rounds but not the same, the second is the first of two again. A rank that has moved on
meanwhile ends the suspicion; another begins with the next state told, or after RETRY.
"""

import time
from collections.abc import Callable, Iterable

from minidist.comm.health import deadlock
from minidist.comm.health.deadlock import Verdict
from minidist.comm.health.wait_state import State

PAUSE = 0.03  # seconds before each of the two rounds
RETRY = 0.5  # seconds after which a suspicion that was not confirmed is looked at again
# seconds that a round may take: a rank that computes answers late, and then it does not wait
PATIENCE = 2.0


class Arbiter:
    """Belongs to one thread, which calls tick() at least every `due()` seconds.

    Args: ask(ranks, round): have these ranks say their state, by heard(rank, state, round), now or
    soon.
          tell(verdict): have the ranks of the verdict raise it. Called once.
    """

    def __init__(
        self, ask: Callable[[list[int], int], None], tell: Callable[[Verdict], None]
    ) -> None:
        self.states: dict[int, State] = {}
        self.ended: dict[int, State] = {}
        self.told = False
        self._ask = ask
        self._tell = tell
        self._round = 0
        self._asked: set[int] = set()
        self._answers: dict[int, State] = {}
        self._before: dict[int, State] | None = None  # what the first round brought
        self._next: float | None = None  # when to begin a round, or to give this one up
        self._news = False  # whether a state was told since the first round began

    def heard(self, rank: int, state: State, number: int = 0) -> None:
        """A rank's state: unasked (0), or in answer to round `number`. Ignored after the rank's
        goodbye."""
        if rank in self.ended:
            return
        self.states[rank] = state
        if number and number == self._round and rank in self._asked:
            self._answers[rank] = state
            if len(self._answers) == len(self._asked):
                self._judge()
        elif not number:
            self._news = True
            self._look()

    def left(self, rank: int, state: State) -> None:
        """A rank has ended well, and said this at last."""
        self.states.pop(rank, None)
        self.ended[rank] = state
        if rank in self._asked or rank in (self._before or ()):  # it will not answer
            self._asked = set()
            self._before = None
        self._look()

    def decide(self, found: Verdict) -> None:
        """Tell the verdict, if it is the first: found here, or by a rank in a message's header."""
        if not self.told:
            self.told = True
            self._asked = set()
            self._before = None
            self._next = None
            self._tell(found)

    def due(self) -> float | None:
        """Seconds until tick() has something to do; None if nothing is to be done before the next
        state is heard."""
        return None if self._next is None else max(0.0, self._next - time.monotonic())

    def tick(self) -> None:
        """Do what is due."""
        if self._next is None or time.monotonic() < self._next:
            return
        if self._asked:  # a rank has not answered
            self._give_up()
        elif self._before is not None:
            self._begin(self._before)
        elif suspects := self._suspects():
            self._news = False
            self._begin(suspects)
        else:
            self._next = None

    def _look(self) -> None:
        """Whether what was told gives reason to ask."""
        if self.told:
            return
        found = deadlock.disagreement(self.states)
        if found is not None:
            self.decide(found)
        elif not self._asked and self._before is None:
            soon = time.monotonic() + PAUSE
            self._next = min(self._next or soon, soon) if self._suspects() else None

    def _suspects(self) -> set[int]:
        return {node.rank for node in deadlock.hopeless(self.states, self.ended, strict=False)}

    def _begin(self, ranks: Iterable[int]) -> None:
        """Ask every rank that is, or was, part of the suspicion."""
        self._round += 1
        self._asked = set(ranks)
        self._answers = {}
        self._next = time.monotonic() + PATIENCE
        self._ask(sorted(self._asked), self._round)

    def _judge(self) -> None:
        """A round is complete."""
        answers = self._answers
        before = self._before
        self._asked = set()
        nodes = deadlock.hopeless(answers, self.ended, strict=True)
        if not nodes:
            self._give_up()
        elif before is None or not all(before[rank].same(answers[rank]) for rank in answers):
            self._before = dict(answers)
            self._next = time.monotonic() + PAUSE
        else:
            self.decide(deadlock.verdict(nodes, answers, self.ended))

    def _give_up(self) -> None:
        self._asked = set()
        self._before = None
        self._next = time.monotonic() + (PAUSE if self._news else RETRY)
