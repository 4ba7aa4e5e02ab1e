"""What becomes of a model's last hidden states and logits."""

from minidist.autograd import ops
from minidist.autograd.tensor import Tensor
from minidist.device.backend import Array


class Output:
    """The loss of logits, and what generating text needs; a strategy that splits them puts its own in place."""

    def last(self, x: Tensor) -> Tensor:
        """The last token's: (B, T, width) -> (B, 1, width)."""
        return x[:, -1:]

    def loss(self, logits: Tensor, targets: Array, *, divisor: float | None) -> Tensor:
        """(…, vocabulary) and integers (…) -> sum of the cross-entropies over `divisor`, one number."""
        return ops.cross_entropy(logits, targets, divisor=divisor)

    def whole(self, logits: Tensor) -> Tensor:
        """The logits of the whole vocabulary: (…, vocabulary)."""
        return logits
