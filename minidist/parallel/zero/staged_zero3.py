"""Chapter 17 · ZeRO-3 under a pipeline: each stage of a rank goes forward and backward by itself, a
microbatch at a time.

A stage is a segment of ZeRO-3's units. The schedule says in which order segments run, so the units
of the next one can be read from disk while this one computes; they are gathered in their turn.

    schedule of a rank    F0 | F0 | B0 | F0 | B0 …    gather the stage's units for each of them,
                                                      reduce after each B
    end of the step       the root (a tied table) is reduced once, then shards are summed over copies

In a pipeline the data axis runs the backwards, and sums their gradients. With DDP and ZeRO-1 they
add up in place, over all microbatches, and are reduced once a step. With ZeRO-2 and 3 no rank keeps
a whole gradient. So each microbatch's backward of a stage ends in the reduce-scatters of that
stage, and with ZeRO-3 each of its forwards and backwards begins with gathers:

    compute         F0 | F1 | B0           | F2 | B1           | …
    ZeRO-2                    reduce stage        reduce stage        m microbatches: m times the scatters
    ZeRO-3          gather for each F and each B; reduce               and m times the gathers

A microbatch is a pass of chapters 15 and 16. In elements a step, over all ranks of one group of P
on the data axis that holds Ψ elements, R of them in a tied table, for A passes of m microbatches:

    DDP, ZeRO-1     2 (P-1) Ψ
    ZeRO-2          (A m + 1) (P-1) Ψ
    ZeRO-3          (P-1) (3 A m (Ψ - R) + 2 R)     the table is gathered once a step and held, and
                                                    so is its gradient

Where both ends are on one rank (zb-v, dualpipe-v) two stages give a tied table gradients, and
ZeRO-2 reduces it twice a microbatch.

While a segment's last units compute, the first ones of the schedule's next instruction are read
ahead, where weights lie on disk (chapter 20): they stream in the order of the step.

With keep_gathered a unit stays as long as one of its microbatches is between forward and backward:
gpipe and 1f1b's first stages then gather once a pass, but hold all weights. Where backward is split
in two (zero bubble) gradients are reduced after the second half, and lie whole until then.

All ranks of the data axis must gather and reduce the same, so a microbatch without a row goes
through too, empty.
"""

from collections.abc import Sequence

from minidist.autograd.tensor import is_grad_enabled
from minidist.nn import Module
from minidist.parallel.step.strategy import Collective
from minidist.parallel.zero.fsdp_units import GatherOrder, Unit
from minidist.parallel.zero.zero3 import Zero3


class StageOrder(GatherOrder):
    """A GatherOrder of several segments, whose units are known before the first forward.

    Args:    segments: the units of each, in the order of their calls; schedule: of a pass, (segment,
             whether forward).
    Attributes: following: the units of what the schedule says next.
    """

    def __init__(
        self,
        root: Unit,
        units: Sequence[Unit],
        segments: Sequence[Sequence[Unit]],
        schedule: Sequence[tuple[int, bool]],
    ) -> None:
        super().__init__(root, units)
        self.before_first_backward = False  # no check for a NaN loss here
        self.segments = segments
        self.schedule = [each for each in schedule if segments[each[0]]]
        self._rest: list[tuple[int, bool]] = []  # of the schedule, in this pass
        self.following: list[Unit] = []

    def units_of(self, segment: int) -> Sequence[Unit]:
        return self.segments[segment]

    def begin_pass(self) -> None:
        """Without gradients a pass has only forwards."""
        self._rest = [each for each in self.schedule if each[1] or is_grad_enabled()]

    def enter(self, unit: Unit) -> None:
        """A unit's forward begins; the first unit's is the segment's."""
        number = next(n for n, segment in enumerate(self.segments) if unit in segment)
        segment = list(self.segments[number])
        if unit is segment[0]:
            self._begin(number, True)
        self.coming = segment[segment.index(unit) + 1 :]

    def begin_backward(self, segment: int) -> None:
        self._begin(segment, False)
        self.coming = list(reversed(self.segments[segment]))

    def end_backward(self) -> None:
        """Calls of other microbatches have their backward to come."""

    def _begin(self, segment: int, forward: bool) -> None:
        """A segment's forward or backward begins: note the units of what comes after it."""
        if (segment, forward) in self._rest:
            self._rest = self._rest[self._rest.index((segment, forward)) + 1 :]
        self.following = []
        if self._rest:
            number, ahead = self._rest[0]
            units = self.segments[number]
            self.following = list(units if ahead else reversed(units))


class StagedZero3(Zero3):
    """ZeRO-3 for the stages of a pipeline. Args, Raises: as Zero3."""

    def set_segments(
        self, segments: Sequence[Sequence[Module]], order: Sequence[tuple[int, bool]] = ()
    ) -> None:
        """Gather units in the order of their segments, and read the next one ahead by `order`."""
        units = [
            [unit for module in segment for unit in self.units if unit.module is module]
            for segment in segments
        ]
        self.gather_order: StageOrder = StageOrder(self.root, self.units, units, order)

    def _prefetch(self, unit: Unit) -> int:
        """Begin to gather the units of the segment that come after `unit`; with room left, read
        the next segment's first units from disk, and one more than fits."""
        room = super()._prefetch(unit)
        if room < 0:
            return room
        for other in self.gather_order.following:
            room -= other.nbytes
            other.read_ahead()
            if room < 0 or not self.ahead:
                break
        return room

    def finish_step(self) -> None:
        """Reduce the root, and sum the shards over the copies."""
        self._unreduced = [self.root]
        self._reduce_rest()
        super().finish_step()

    def traffic(self, passes: int, fetches: Sequence[int] = ()) -> list[Collective]:
        """Return gathers and reduce-scatters; `fetches`: how often each segment's units are
        gathered."""
        calls = [
            ("all_gather", flat, times)
            for segment, times in enumerate(fetches)
            for unit in self.gather_order.units_of(segment)
            for flat in unit.flats
        ]
        calls += [("all_gather", flat, 1) for flat in self.root.flats]
        calls += [
            ("reduce_scatter", flat, 1 if flat in self.root.flats else passes)
            for flat in self.flats
        ]
        return self._collectives_of(calls)
