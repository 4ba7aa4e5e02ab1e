"""The last steps of a model: from hidden states and logits to the loss, or to new text."""

from minidist.autograd import ops
from minidist.autograd.tensor import Tensor
from minidist.device.backend import Array


class Output:
    """The loss of logits, and their use in generating text. A strategy that splits logits replaces this object."""

    def last(self, x: Tensor) -> Tensor:
        """The hidden state of the last token: (B, T, width) -> (B, 1, width)."""
        return x[:, -1:]

    def loss(self, logits: Tensor, targets: Array, *, divisor: float | None) -> Tensor:
        """Logits (…, vocabulary), targets (…) -> the sum of the cross-entropies, divided by `divisor`: one number."""
        return ops.cross_entropy(logits, targets, divisor=divisor)

    def whole(self, logits: Tensor) -> Tensor:
        """The logits of the whole vocabulary: (…, vocabulary)."""
        return logits
