"""Units: parameters that are gathered and freed together, of which this rank keeps its chunks
(shards.py), and the order in which a pass needs them.

A freed parameter keeps only its shape and dtype. It takes one element, and reads as NaN, so that a
use outside its unit is noticed.
"""

from collections.abc import Sequence
from typing import Any

from minidist.autograd.tensor import Parameter
from minidist.comm.calls.async_call import Pending
from minidist.device import account
from minidist.device.backend import Array, module_for
from minidist.errors import ConfigError
from minidist.nn import Module
from minidist.nn.weights import Weight
from minidist.parallel.step.flat import Flat, empty_like, forget
from minidist.parallel.step.replicas import sharers
from minidist.parallel.zero.shards import ZeroAxis


class Unit:
    """Some parameters, whole only between wait_for_weights and free.

    Args:    module: whose calls need them, or None for the root; parameters: not empty unless it is
             the root.
             axis: the strategy, whose store gets this rank's chunks: drawn, where weights were not
             yet, else cut out.
    Attributes: flats     the parameters by dtype, by whether they learn, by the ranks that share
                          them, by layout
                learning  those that do
                nbytes    of the whole unit
                calls     calls of the module whose backward is still to come
    """

    def __init__(
        self,
        name: str,
        module: Module | None,
        parameters: Sequence[Parameter],
        axis: ZeroAxis,
        *,
        seed: int | None,
        device: str,
    ) -> None:
        self.name = name
        self.module = module
        self.store = axis.store
        self.xp = module_for(device)
        self.algorithm = axis.algorithm
        self.recorder = axis.recorder
        group = axis.sharing.shard_group
        kinds: dict[tuple[Any, ...], list[Parameter]] = {}
        for parameter in parameters:
            kind = (
                parameter.dtype.name,
                parameter.requires_grad,
                sharers([parameter], group).id,
                parameter.layout,
            )
            kinds.setdefault(kind, []).append(parameter)
        self.flats = [Flat(run, group) for run in kinds.values()]
        self.learning = [flat for flat in self.flats if flat.parameters[0].requires_grad]
        self.nbytes = sum(flat.nbytes for flat in self.flats)
        self.calls = 0
        self._pending: list[tuple[Flat, Array, Pending]] = []
        self._whole = True
        for number, flat in enumerate(self.flats):
            chunk = self._chunk_of(flat, seed, device)
            self.store.keep(flat, chunk, f"{name} {number}" if number else name)
        self.free()
        for parameter in parameters:
            parameter.keep_by("ZeRO-3's shards")

    def _chunk_of(self, flat: Flat, seed: int | None, device: str) -> Array:
        """Return this rank's chunk: drawn, or cut from the weights."""
        chunk = account.current().hold(self.xp.empty(flat.chunk_size, flat.dtype), "parameters")
        for parameter, place, positions in flat.chunk_spans():
            if seed is not None and isinstance(parameter, Weight) and not parameter.drawn:
                chunk[place] = parameter.draw(seed, positions, device=device)
                parameter.seed = seed
            else:
                chunk[place] = parameter.data.reshape(-1)[positions.start : positions.stop]
        return chunk

    def read_ahead(self) -> None:
        """Tell the store that `start_gather` comes soon; only chapter 20's disk store reads."""
        if not self._whole and not self._pending:
            for flat in self.flats:
                self.store.read_ahead(flat)

    def start_gather(self) -> None:
        """Start to gather the weights, unless that has begun: one all-gather per flat.

        With chapter 20's OnDisk it returns when this rank's chunks have been read from the disk
        (`read_ahead` may have begun that).
        """
        if self._whole or self._pending:
            return
        for flat in self.flats:
            vector = empty_like(flat.parameters[0].data, flat.size, "parameters")
            chunk = self.store.weights(flat, vector[flat.chunk])
            self.recorder.announce(flat.group.axis, f"all_gather {self.name}")
            self._pending.append(
                (
                    flat,
                    vector,
                    flat.group.start_all_gather(chunk, out=vector, algorithm=self.algorithm),
                )
            )

    def wait_for_weights(self) -> None:
        """Wait for the all-gathers, and place the weights."""
        while self._pending:
            flat, vector, pending = self._pending.pop(0)
            with self.recorder.span(f"wait for {self.name}"):
                pending.wait()
            for parameter, view in flat.views(vector):
                parameter.place(view)
        self._whole = True

    def free(self) -> None:
        """Forget the whole parameters; what is still on its way is waited for."""
        while self._pending:
            self._pending.pop()[2].wait()
        for flat in self.flats:
            forget(flat.parameters, self.xp)
        self._whole = False


class GatherOrder:
    """The units of a pass in the order in which it needs them.

        forward    expects the units of the last forward that had a backward (a shorter one than
                   before does not count); the first forward expects nothing
        backward   expects the units of its own forward, the last first

    A unit that is called twice stands there twice, so its gradients are final when it is not among
    those to come. The whole model is one segment, number 0; a pipeline's stages are several
    (staged_zero3.py).

    Attributes: coming: units still to come in this forward or backward, the nearest first;
                before_first_backward: True until the first backward.
    """

    def __init__(self, root: Unit, units: Sequence[Unit]) -> None:
        self.root = root
        self.units = units
        self.coming: list[Unit] = []
        self.before_first_backward = True
        self._met: list[Unit] = []  # by this pass's forward
        self._expected: list[Unit] = []  # by the next one

    def units_of(self, segment: int) -> Sequence[Unit]:
        """Return the units whose gradients a backward of the segment reduces."""
        # the root first, so that _reduce_rest reduces it last
        return [self.root, *self.units]

    def begin_pass(self) -> None:
        """Begin a forward: no unit has been met."""
        self._met = []

    def enter(self, unit: Unit) -> None:
        """Note that a unit's forward begins; `coming` are then the units expected after it."""
        self._met.append(unit)
        self.coming = self._expected[len(self._met) :]

    def begin_backward(self, segment: int) -> None:
        """Begin a segment's backward: expect the units of this forward in the next one; `coming`
        are those with a backward to come."""
        self.before_first_backward = False
        # a shorter forward does not forget the rest
        if len(self._met) >= len(self._expected):
            self._expected = list(self._met)
        self.coming = [unit for unit in reversed(self._met) if unit.calls]

    def enter_backward(self, unit: Unit) -> None:
        """Note that a unit's backward begins; `coming` are then the units after it."""
        self.coming = self.coming[self.coming.index(unit) + 1 :]

    def end_backward(self) -> None:
        """End a backward: forget the calls that it has not reached, and free all units."""
        for unit in self.units:
            unit.calls = 0
            unit.free()


def make_units(
    axis: ZeroAxis, modules: Sequence[Module] | None, ahead: int, *, seed: int | None, device: str
) -> tuple[list[Unit], Unit]:
    """The units of `modules` (None: the model's children) and the root with the rest, each cut down
    to its shards.

    Parameters that stay whole are in none of them.
    Raises:  ConfigError if two units share a parameter, a module is not the model's, or ahead is
             negative.
    """
    if ahead < 0:
        raise ConfigError(
            f"ahead={ahead}: it is how many units are gathered before their turn; choose 0 or more"
        )
    model = axis.model
    paths = {module: path for path, module in model.named_modules()}
    taken = set[Parameter]()
    chosen: list[tuple[str, Module, list[Parameter]]] = []
    model.assign_names()
    for module in [child for _, child in model.children()] if modules is None else modules:
        if module not in paths:
            raise ConfigError(
                f"units: a {type(module).__name__} is no part of the model; name modules of the "
                "model"
            )
        parameters = [p for p in module.parameters() if not p.stays_whole]
        twice = [p.name for p in parameters if p in taken]
        if twice:
            raise ConfigError(
                f"units: {twice[0]!r} belongs to two units; leave the modules that share it to "
                "the root"
            )
        taken.update(parameters)
        if parameters:
            chosen.append((paths[module], module, parameters))
    for p in model.parameters():
        if p.stays_whole and seed is not None and isinstance(p, Weight) and not p.drawn:
            p.data = p.draw(seed, device=device)
            p.seed = seed
    units = [Unit(*unit, axis, seed=seed, device=device) for unit in chosen]
    rest = [p for p in model.parameters() if not p.stays_whole and p not in taken]
    return units, Unit("root", None, rest, axis, seed=seed, device=device)
