"""Chapter 24 · Columns of seconds of calls and kernels, for each candidate's cell and the places of
its groups.

Many candidates share a cell and a layout, so each pair of cell and layout is computed once.
"""

from collections.abc import Iterator, Mapping
from math import fsum

import numpy as np

from minidist.nn import GPTConfig
from minidist.observe.events import GroupCall
from minidist.parallel.hybrid.plan_checks import AXES
from minidist.plan.candidates import Candidates
from minidist.plan.cells import PHASES, Cells, Cut
from minidist.plan.layouts import Groups, Layouts, cut, strided

ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
"""Bytes of a weight, a gradient or an activation, by precision."""


class CallColumns:
    """The columns of seconds of a set of candidates."""

    def __init__(
        self, found: Candidates, cells: Cells, layouts: Layouts, config: GPTConfig
    ) -> None:
        self.found = found
        self.cells = cells
        self.layouts = layouts
        self.config = config

    def _groups(self) -> tuple[list[dict[str, Groups]], np.ndarray]:
        rows, where = np.unique(self.found.rows(*AXES, "order"), axis=0, return_inverse=True)
        return [
            self.layouts.groups(
                dict(zip(AXES, map(int, row[:-1]), strict=True)), self.found.orders[row[-1]]
            )
            for row in rows
        ], where.reshape(-1)

    def inner(self) -> dict[str, np.ndarray]:
        """Return the seconds of a layer and of the ends (embedding, output, loss): kernels, and
        waits for tp, cp and ep.

        Keys: kernels are "forward" and "backward" of a layer, and "ends"; waits are "forward tp",
        "backward tp", "ends tp", and the same for cp and ep; "launch forward", "launch backward"
        and "launch ends" are seconds of the host.
        """
        groups, layout = self._groups()
        known: dict[Groups, int] = {}
        inside = [
            known.setdefault((*group["tp"], *group["cp"], *group["ep"]), len(known))
            for group in groups
        ]
        keys = np.column_stack(
            [self.found.rows("tp", "cp", "ep", "sequence", "rows"), np.array(inside)[layout]]
        )
        rows, first, where = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        made = [
            self._one_cell(Cut(*map(int, row[:-1])), groups[layout[at]])
            for row, at in zip(rows, first, strict=True)
        ]
        return {name: np.array([one[name] for one in made])[where.reshape(-1)] for name in made[0]}

    def _one_cell(self, cut: Cut, groups: Mapping[str, Groups]) -> dict[str, float]:
        price = self.layouts.price
        cell = self.cells.cell(cut)
        layer, ends = cell.seconds(
            lambda call: price(
                groups[call.axis], call.verb, call.algorithm, call.nbytes, call.blocks
            )
        )
        found = {phase: layer[phase].compute for phase in PHASES}
        found["ends"] = fsum(ends[phase].compute for phase in PHASES)
        found |= cell.launching
        for axis in ("tp", "cp", "ep"):
            found.update({f"{phase} {axis}": layer[phase].waits.get(axis, 0.0) for phase in PHASES})
            found[f"ends {axis}"] = fsum(ends[phase].waits.get(axis, 0.0) for phase in PHASES)
        return found

    def data(self, wider: int = 1) -> dict[str, np.ndarray]:
        """Return the seconds of the data axis's calls of a layer and of the ends.

        These are reductions, gathers (ZeRO-3: of one pass), and sums over the copies of the state
        (hybrid sharding). wider: times the bytes of a gradient that is as wide as its weight.
        """
        groups, layout = self._groups()
        known: dict[Groups, int] = {}
        data = np.array([known.setdefault(group["dp"], len(known)) for group in groups])[layout]
        keys = np.column_stack([self.found.rows("tp", "zero", "shard"), data])
        rows, where = np.unique(keys, axis=0, return_inverse=True)
        by_number = list(known)
        made = [
            dict(self._calls(tp, zero, shard, by_number[number], wider))
            for tp, zero, shard, number in rows.tolist()
        ]
        return {name: np.array([one[name] for one in made])[where.reshape(-1)] for name in made[0]}

    def _calls(
        self, tp: int, zero: int, shard: int, groups: Groups, wider: int
    ) -> Iterator[tuple[str, float]]:
        shards = cut(groups, shard, self.layouts.cluster.per_node) if shard else groups
        replicas = strided(groups, shard, self.layouts.cluster.per_node) if shard else ()
        for part, calls in zip(("", "ends "), self.cells.data_calls(tp, zero), strict=True):
            gather = reduce = copies = 0.0
            for call, times in calls.items() if len(groups[0]) > 1 else ():
                gathers = call.verb == "all_gather"
                if not gathers:
                    call = call._replace(nbytes=wider * call.nbytes)
                spent = times * self._price_of(call, shards, len(shards[0]))
                if gathers:
                    gather += spent / (2 if zero == 3 else 1)
                else:
                    reduce += spent
                    if replicas:
                        copies += times * self.layouts.price(
                            replicas, "all_reduce", call.algorithm, -(-call.nbytes // shard), ()
                        )
            yield f"{part}gather", gather
            yield f"{part}reduce", reduce
            yield f"{part}copies", copies

    def _price_of(self, call: GroupCall, groups: Groups, size: int) -> float:
        """Return the seconds that a recorded call of two ranks takes among `size` ranks; the block
        of an all-gather becomes a smaller part of the whole."""
        nbytes = -(-2 * call.nbytes // size) if call.verb == "all_gather" else call.nbytes
        return self.layouts.price(groups, call.verb, call.algorithm, nbytes, ())

    def hop_bytes(self) -> np.ndarray:
        """Return the bytes of a message between stages."""
        carried = np.where(
            self.found.column("sequence") == 1, self.found.column("tp"), 1
        ) * self.found.column("cp")
        config = self.config
        return np.asarray(
            self.found.column("rows")
            * (config.context * config.width * ITEMSIZE[self.found.precision])
            // carried
        )

    def hop(self) -> np.ndarray:
        """Return the seconds of a message between stages."""
        groups, layout = self._groups()
        rows, where = np.unique(
            np.column_stack([layout, self.hop_bytes()]), axis=0, return_inverse=True
        )
        made = [
            self.layouts.price(groups[at]["pp"], "send", "direct", int(n), ()) for at, n in rows
        ]
        return np.array(made)[where.reshape(-1)]
