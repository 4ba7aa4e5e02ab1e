"""Grades exercise 20: formulas beside the accounts of real steps, loops by the order of what they
began and awaited."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

import minidist as md
from minidist.autograd.tensor import Parameter
from minidist.grading import Mistake, Result, TaskFailed, expect, judge, load_module
from minidist.nn import GPT
from minidist.optim import Adam
from minidist.parallel.memory.offload import plain_offload

lab = load_module(Path(__file__).resolve().with_name("experiments.py"), "20")
SMALL = lab.GPTConfig(vocabulary=20, context=4, layers=2, width=16, heads=2)
UNITS = ("a", "b", "c", "d")

CUT_FROM = (plain_offload,)
ANSWERS = {
    3: "2 * parameters",
    4: "(2 + 4 + 4 + 4) * parameters",
    5: '{"device to host": passes * itemsize * parameters, "host to device": itemsize * '
    "parameters}",
    6: "(4 + 4 + 8) * parameters",
    7: """
        if index + 1 < len(units):
            coming = start_read(units[index + 1])
       """,
    8: """
        arriving[run].wait()
        optimizer_step(run)
        going.append(start_up(run))
       """,
}
"""The right code of the holes beyond the plain version."""


def grade(exercise: ModuleType) -> Iterator[Result]:
    """The plain loop, what lies where, what moves, reading ahead, updating in time."""
    yield from _plain(exercise)
    yield from _between_steps(exercise)
    yield from _moved(exercise)
    yield from _read(exercise)
    yield from _stream(exercise)
    yield from _update(exercise)


def _run(plan: dict[str, Any]) -> dict[str, Any]:
    """Train two steps on one rank; return what its accounts say."""
    return md.run(lambda world: lab.train(world, plan, steps=2, config=SMALL), size=1, limit=60.0)[
        0
    ]


class _Model(GPT):
    """A model that keeps the arrays of its last gradients, so that a copy can be told from the
    array itself."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.last: list[Any] = []

    def loss(self, *given: Any, **options: Any) -> Any:
        """Compute the loss; note each gradient once it is final."""
        self.last = []
        for p in self.parameters():
            p.hooks[:] = [self._final]
        return super().loss(*given, **options)

    def _final(self, p: Parameter) -> None:
        self.last.append(p.grad)


class _HostAdam(Adam):
    """Adam that counts, in `shared`, the gradients it is given that are arrays of the device."""

    def __init__(self, host: list[Parameter], model: _Model) -> None:
        super().__init__(host, 0.01)
        self.host = host
        self.model = model
        self.shared = 0
        self.given = 0  # gradients

    def step(self, *given: Any, **options: Any) -> Any:
        """Count, then update. Raises TaskFailed if a gradient is None in an array."""
        if any(h.grad is not None and np.asarray(h.grad).dtype == object for h in self.host):
            raise TaskFailed(
                Result(
                    "gradients on the host",
                    False,
                    "copies of the device's",
                    "None",
                    "the gradient is freed before it is copied",
                    "copy first, then p.zero_grad(): section 1 (hole 1)",
                )
            )
        self.given += sum(h.grad is not None for h in self.host)
        self.shared += sum(
            h.grad is not None and np.shares_memory(h.grad, gradient)
            for h in self.host
            for gradient in self.model.last
        )
        return super().step(*given, **options)


class _Trained(NamedTuple):
    """What some steps of a loop leave on both sides."""

    device: np.ndarray  # weights
    host: np.ndarray  # weights
    gradients: int  # parameters of the device that still have one
    shared_weights: int  # weights of the device in the host's arrays
    shared_gradients: int  # gradients of the host in the device's arrays
    replaced: int  # arrays of the device that were replaced by new ones
    given: int  # gradients that the updates were given


def _trained(loop: Any) -> _Trained:
    """Return what three steps of `loop(model, optimizer, batches, host)` leave."""
    ids = np.random.default_rng(0).integers(0, SMALL.vocabulary, (3, 2, SMALL.context + 1))
    model = _Model(SMALL)
    model.initialize(0)
    host = [Parameter(p.data.copy(), name=p.name) for p in model.parameters()]
    arrays = [p.data for p in model.parameters()]
    optimizer = _HostAdam(host, model)
    with np.errstate(all="ignore"):
        loop(model, optimizer, [(part[:, :-1], part[:, 1:]) for part in ids], host)
    parameters = list(model.parameters())
    return _Trained(
        device=np.concatenate([p.data.ravel() for p in parameters]),
        host=np.concatenate([h.data.ravel() for h in host]),
        gradients=sum(p.grad is not None for p in parameters),
        shared_weights=sum(
            np.shares_memory(p.data, h.data) for p, h in zip(parameters, host, strict=True)
        ),
        shared_gradients=optimizer.shared,
        replaced=sum(p.data is not x for p, x in zip(parameters, arrays, strict=True)),
        given=optimizer.given,
    )


def _plain(exercise: ModuleType) -> Iterator[Result]:
    """Compare the weights on both sides, and the gradients on the device, with the plain
    version's."""
    target, found, start = (
        _trained(loop) for loop in (plain_offload, exercise.plain_offload, lambda *_: None)
    )
    yield expect(
        "gradients on the device after a step",
        0,
        found.gradients,
        "they stay on the device",
        "p.zero_grad() once the copy is down, or the next step adds to them: section 1 (hole 1)",
    )
    yield expect(
        "gradients of the host that are the device's own arrays",
        0,
        found.shared_gradients,
        "the host reads device memory",
        "the gradient goes down: the host gets a copy of it: section 1 (hole 1)",
    )
    yield from _weights(found, target, start)


def _weights(found: _Trained, target: _Trained, start: _Trained) -> Iterator[Result]:
    """Check the weights on the device, then on the host."""
    right = np.array_equal(found.device, found.host)
    yield judge(
        "weights on the device",
        right,
        "the host's",
        "the host's" if right else "others",
        "other weights",
        "after the update each weight is the host's, number for number: section 1 (hole 2)",
        signs={
            "the new weights never reach the device": np.array_equal(found.device, start.device)
        },
    )
    yield expect(
        "weights on the device that are the host's own arrays",
        0,
        found.shared_weights,
        "the device reads host memory",
        "copy the numbers into the device's array: section 1 (hole 2)",
    )
    yield expect(
        "arrays of the device that were replaced by new ones",
        0,
        found.replaced,
        "the weights are another array",
        "buckets and collectives keep the old array: write into it: section 1 (hole 2)",
    )
    moved = not np.array_equal(found.host, start.host)
    same = np.allclose(found.host, target.host, rtol=1e-5)
    yield judge(
        "weights on the host",
        same,
        "the plain version's",
        "the plain version's" if same else "others" if moved else "as drawn",
        "other gradients" if moved else "the gradients did not go down",
        "the host's gradient is a copy of the device's: section 1 (hole 1)",
        signs={
            "the gradient is written over the host's weights": moved and not found.given,
            "the old weights go down to the host": Mistake(
                not moved and found.given,
                "the host has the new weights, the device the old ones: they move up: section 1 "
                "(hole 2)",
            ),
        },
    )


def _between_steps(exercise: ModuleType) -> Iterator[Result]:
    """Bytes on the device and on the host beside the accounts."""
    for precision in ("fp32", "bf16"):
        seen = _run({"offload": "optimizer", "precision": precision})
        count = seen["parameters"]
        mine = exercise.between_steps(count, precision != "fp32")
        device = {
            0: "that is one parameter's, and not all parameters'",
            4: "gradients do not stay: the bucket is freed when it is down",
            14: "the masters lie on the host",
            16: "nothing left the device",
            6: "masters lie on the host",
        }
        yield expect(
            f"{precision}: bytes on the device",
            seen["device"]["total"]["now"],
            mine["device"],
            device.get(mine["device"] // count, "wrong bytes"),
            "only weights stay, 2 bytes each in mixed precision: section 2 (hole 3)",
        )
        host = {
            0: "that is one parameter's, and not all parameters'",
            12: "the gradients lie there too",
            8: "the masters are missing",
            10: "the masters are missing",
            16: "two bytes too many: gradients take 2, and weights of 2 bytes stay on the device",
        }
        held = sum(seen["host"][kind]["now"] for kind in ("parameters", "gradients", "optimizer"))
        yield expect(
            f"{precision}: bytes on the host",
            held,
            mine["host"],
            host.get(mine["host"] // count, "wrong bytes"),
            "gradients 2, masters 4, m 4, v 4: section 2 (hole 4)",
        )


def _moved(exercise: ModuleType) -> Iterator[Result]:
    """Check the bytes of each direction, for one pass and for three."""
    for precision, itemsize, passes in (("fp32", 4, 1), ("bf16", 2, 1), ("fp32", 4, 2)):
        seen = _run({"offload": "optimizer", "precision": precision, "accumulate": passes})
        mine = exercise.moved_with_the_host(seen["parameters"], itemsize, passes)
        if not isinstance(mine, dict):
            yield Result(
                "bytes moved",
                False,
                "a dict",
                type(mine).__name__,
                "a direction is missing",
                'return {"device to host": ..., "host to device": ...}: section 3 (hole 5)',
            )
            return
        for way, target in seen["moved"].items():
            down = way == "device to host"
            came = mine.get(way, 0)
            yield expect(
                f"{precision}, {passes} pass{'es' * (passes > 1)}, {way}",
                target,
                came,
                "wrong bytes",
                "gradients A times, weights once: section 3 (hole 5)",
                signs={
                    "a direction is missing": way not in mine,
                    "weights come up once a step": way == "host to device"
                    and came == passes * target,
                    "each pass sends its gradients": came * passes == target,
                    "the bytes of a number are missing": came * itemsize == target,
                    "weights travel in the device's precision, not as masters": not down
                    and came in (2 * target, 4 * target // itemsize),
                    "gradients travel in the device's precision": itemsize != 4
                    and came == 4 * target // itemsize,
                    "gradients travel once, not twice": came == 2 * target,
                },
            )


def _read(exercise: ModuleType) -> Iterator[Result]:
    """Reads of ZeRO-Infinity in float32."""
    for passes in (1, 2):
        seen = _run({"offload": "all", "zero": 3, "accumulate": passes})
        count = seen["parameters"]
        target = seen["moved"]["disk to host"]
        mine = exercise.read_from_disk(count, passes)
        known = {
            0: "that is one parameter's, and not all parameters'",
            12: "the gradients are on disk too",
            8: "gradients and weights are on disk too",
            20: "in float32 weights are their own masters",
            16 * passes: "the update is once a step, and not once a pass",
        }
        yield expect(
            f"all on disk, {passes} pass{'es' * (passes > 1)}: bytes read",
            target,
            mine,
            known.get(16 + (mine - target) // count, "wrong bytes"),
            "the update reads the gradient, the weight, m and v: section 3 (hole 6)",
        )


class _Move:
    """A move that tells when it is waited for."""

    def __init__(self, events: list[tuple[str, str]], unit: str, value: Any = None) -> None:
        self.events = events
        self.unit = unit
        self.value = value

    def wait(self) -> Any:
        """Return its value."""
        self.events.append(("arrived", self.unit))
        return self.value


def _stream(exercise: ModuleType) -> Iterator[Result]:
    """Reads begin before the computation that hides them, one unit ahead."""
    events: list[tuple[str, str]] = []

    def start_read(unit: str) -> _Move:
        events.append(("read", unit))
        return _Move(events, unit, unit.upper())

    def compute(unit: str, weights: str) -> str:
        events.append(("compute", unit))
        return unit + weights

    results = exercise.stream(list(UNITS), start_read, compute)
    advice = "start_read the next one before you compute: section 4 (hole 7)"
    reads = [unit for what, unit in events if what == "read"]
    yield expect(
        "stream: results",
        [unit + unit.upper() for unit in UNITS],
        results,
        "a unit computed with another's weights, or one was left out",
        advice,
        signs={
            "the next unit is never read": len(reads) == 1,
            "the move is not remembered: each unit gets the first one's weights": reads
            == list(UNITS)
            and results == [unit + UNITS[0].upper() for unit in UNITS],
            "a unit is read again, and not the next": reads == [UNITS[0], *UNITS[:-1]],
        },
    )
    yield expect(
        "stream: reads",
        list(UNITS),
        reads,
        "a unit is read twice, or not at all",
        advice,
    )
    for unit, following in zip(UNITS, UNITS[1:], strict=False):
        begun = events.index(("read", following))
        computed = events.index(("compute", unit))
        yield Result(
            f"stream: {following} is read while {unit} computes",
            begun < computed,
            "begun before",
            "begun before" if begun < computed else "begun after",
            "nothing hides behind the computation",
            advice,
        )
        waited = ("arrived", following) in events[:computed]
        yield Result(
            f"stream: the wait for {following}",
            not waited,
            f"after {unit} has computed",
            f"before {unit} computes" if waited else f"after {unit} has computed",
            "nothing hides behind the computation",
            "begin the read, keep its move, and wait for it at the next turn: section 4 (hole 7)",
        )
        early = begun > events.index(("arrived", unit))
        yield Result(
            f"stream: buffers while {unit} computes",
            early,
            "2",
            "2" if early else "3",
            "more than one unit ahead",
            "a third buffer is not there: section 4 (hole 7)",
        )


def _update(exercise: ModuleType) -> Iterator[Result]:
    """Gradients before the update, weights after it, no wait for weights in between."""
    events: list[tuple[str, str]] = []

    def start_up(run: str) -> _Move:
        events.append(("up", run))
        return _Move(events, f"{run}'s weights")

    exercise.update(
        list(UNITS),
        {run: _Move(events, run) for run in UNITS},
        lambda run: events.append(("adam", run)),
        start_up,
    )
    advice = (
        "each run waits for its own gradients, then Adam updates it, then its weights go up: "
        "section 1 (hole 8)"
    )
    for run in UNITS:
        order = [what for what, whose in events if whose == run]
        sent_up = "up" in order
        yield expect(
            f"update of {run}",
            ["arrived", "adam", "up"],
            order,
            "the update did not wait for its gradients",
            advice,
            signs={
                "the run is not updated": "adam" not in order,
                "the new weights never reach the device": not sent_up,
                "a run waits for the gradients of other runs, too": order.count("arrived") > 1,
                "weights go up before they are new": sent_up
                and "adam" in order
                and order.index("up") < order.index("adam"),
            },
        )
    last = events.index(("adam", UNITS[-1]))
    first = ("arrived", f"{UNITS[0]}'s weights")
    hidden = first in events and events.index(first) > last
    yield Result(
        "weights go up while the next run is updated",
        hidden,
        "waited for at the end",
        "waited for at the end"
        if hidden
        else "waited for at once"
        if first in events
        else "never waited for",
        "nothing hides behind Adam"
        if first in events
        else "the step ended before its weights were up",
        "keep the moves in going: section 1 (hole 8)",
    )


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "20", *sys.argv[1:]]))
