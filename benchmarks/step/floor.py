"""The floor of a training step of a GPT: its least operations and bytes, and their time at measured
rates.

    parts = step_parts(model, itemsize=2)
    floor(parts, copy=4e12, matrix=7e14)    # seconds: each part takes the longer of its two times

Operations are those of products and of causal attention, with half of the scores. Bytes are the
inputs and outputs of each part, once; sums, biases and casts are part of the kernel before them.
The output layer is the embedding's table. There are no caches: an output of one part that is the
input of the next is moved twice.
"""

from dataclasses import dataclass

from minidist.bench.step.ranks import Model
from minidist.nn import GPT

FLOAT = 4  # bytes of a float32 number
STATE = 6 * FLOAT  # bytes of a parameter's master and moments, read and written


@dataclass(frozen=True)
class FloorPart:
    """A kind of work of one step: operations of matrix products, and bytes."""

    name: str
    operations: float
    bytes: float

    def seconds(self, copy: float, matrix: float) -> float:
        """Return the longer of two times: bytes at `copy` bytes per second, operations at `matrix`
        operations per second."""
        return max(self.bytes / copy, self.operations / matrix)


def step_parts(model: Model, itemsize: int) -> list[FloorPart]:
    """Return the parts of a step on one device; activations, weights and gradients have `itemsize`
    bytes per number.

    With N = batch × context tokens, width w, L layers, V words, T tokens per sequence and s =
    itemsize:

        products    3 · 2 N (12 L w² + V w) operations; each of a product's three arrays passes
                    three times
        attention   L (2 + 5) N T w operations: half of 4 forward, and of 10 backward; 4 + 8 arrays
                    N w
        norms       2 L + 1 of them: 2 + 3 arrays N w            gelu   L times 2 + 3 arrays N 4w
        residuals   2 L sums, forward and of gradients: 3 + 3 arrays N w
        loss        logits in, their gradient out: 2 N V
        tables      rows out and in: 4 N w; the gradient of a table: V w
        optimizer   24 + 3 s bytes per parameter: state in and out; the gradient for its norm, the
                    gradient again, the weight
    """
    tokens = model.batch * model.context
    w = model.width
    layers = model.layers
    words = model.vocab
    s = itemsize
    shapes = [
        *((w, wide) for _ in range(layers) for wide in (3 * w, w, 4 * w)),
        *[(4 * w, w)] * layers,
        (w, words),
    ]
    moved = sum(tokens * m + m * n + tokens * n for m, n in shapes)
    row = tokens * w * s
    numbers = parameters(model)
    return [
        FloorPart("products", 6.0 * tokens * sum(m * n for m, n in shapes), 3.0 * moved * s),
        FloorPart("attention", 7.0 * layers * tokens * model.context * w, 12.0 * layers * row),
        FloorPart("norms", 0.0, 5.0 * (2 * layers + 1) * row),
        FloorPart("gelu", 0.0, 20.0 * layers * row),
        FloorPart("residuals", 0.0, 12.0 * layers * row),
        FloorPart("loss", 0.0, 2.0 * tokens * words * s),
        FloorPart("tables", 0.0, 4.0 * row + words * w * s),
        FloorPart("optimizer", 0.0, float(numbers * (STATE + 3 * s))),
    ]


def parameters(model: Model) -> int:
    """Return the number of parameters."""
    return sum(parameter.size for parameter in GPT(model.config(tied=True)).parameters())


def operations(parts: list[FloorPart]) -> float:
    """Return the operations of a step."""
    return sum(part.operations for part in parts)


def floor(parts: list[FloorPart], *, copy: float, matrix: float) -> float:
    """Return the least seconds of a step whose parts run one after another."""
    return sum(part.seconds(copy, matrix) for part in parts)
