"""The arbiter: it receives every rank's long waits, and decides when they are a deadlock or a
disagreement.

    a rank      reports its state when a wait becomes long, and when it ends           heard(rank, state)
    suspicion   by the reports, some waits wait only for each other; PAUSE, so that every rank has
                reported its waits
    ask twice   every rank among them reports its state; PAUSE; all of them again      ask(ranks, round)
    verdict     both times the same waits, the same counts of messages, and no hope    tell(verdict)

The second round begins after the first has ended. If no wait and no count differs between their
answers, they show all ranks at one moment in between: nothing is missed, and no message in flight
is taken for lost. A disagreement in a call needs no confirmation. If waits are hopeless in both
rounds but not the same, the second round becomes the first of two again. If a rank has continued
meanwhile, the suspicion ends; another begins with the next reported state, or after RETRY.
"""

import time
from collections.abc import Callable, Iterable

from minidist.comm.health import deadlock
from minidist.comm.health.deadlock import Verdict
from minidist.comm.health.wait_state import State

PAUSE = 0.03  # seconds before each of the two rounds
RETRY = 0.5  # seconds after which an unconfirmed suspicion is checked again
# maximum seconds of a round: a rank that computes answers late, and then it does not wait
PATIENCE = 2.0


class Arbiter:
    """The state and rounds of the decision. It belongs to one thread, which calls tick() at least
    every `due()` seconds.

    Args: ask(ranks, round): make these ranks report their state, by heard(rank, state, round), now
          or soon.
          tell(verdict): make the ranks of the verdict raise it. Called once.
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
        self._before: dict[int, State] | None = None  # the answers of the first round
        self._next: float | None = None  # when to begin a round, or to give up this round
        self._news = False  # whether a state was reported since the first round began

    def heard(self, rank: int, state: State, number: int = 0) -> None:
        """Take a rank's state: unasked (0), or as the answer to round `number`. Ignored after the
        rank's goodbye."""
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
        """Note that a rank has ended well, with its last state."""
        self.states.pop(rank, None)
        self.ended[rank] = state
        if rank in self._asked or rank in (self._before or ()):  # it will not answer
            self._asked = set()
            self._before = None
        self._look()

    def decide(self, found: Verdict) -> None:
        """Pass on the verdict, if it is the first: found here, or by a rank in a message's
        header."""
        if not self.told:
            self.told = True
            self._asked = set()
            self._before = None
            self._next = None
            self._tell(found)

    def due(self) -> float | None:
        """Return the seconds until tick() has something to do; None if nothing is due before the
        next state."""
        return None if self._next is None else max(0.0, self._next - time.monotonic())

    def tick(self) -> None:
        """Do the work that is due."""
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
        """Decide a disagreement, or plan a round if the reported states are suspicious."""
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
        """Begin a round: ask every rank that is, or was, part of the suspicion."""
        self._round += 1
        self._asked = set(ranks)
        self._answers = {}
        self._next = time.monotonic() + PATIENCE
        self._ask(sorted(self._asked), self._round)

    def _judge(self) -> None:
        """Judge a complete round."""
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
