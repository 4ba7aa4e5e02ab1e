"""Bytes that a rank holds between steps, by category: one formula for a replica and for every ZeRO
stage.

Ψ parameters; w, g, K bytes each for the weight, its gradient and the optimizer's state; S ranks
share one copy (all N of the data axis, or with hybrid sharding those of one group):

                 parameters   gradients   optimizer    together        mixed precision   float32
                                                                       w, g, K = 2,2,12  w, g, K = 4, 4, 8
    baseline     wΨ           gΨ          KΨ           (w+g+K)Ψ        16Ψ               16Ψ
    ZeRO-1       wΨ           gΨ          KΨ/S         (w+g)Ψ + KΨ/S   4Ψ + 12Ψ/S        8Ψ + 8Ψ/S
    ZeRO-2       wΨ           gΨ/S        KΨ/S         wΨ + (g+K)Ψ/S   2Ψ + 14Ψ/S        4Ψ + 12Ψ/S
    ZeRO-3       wΨ/S         gΨ/S        KΨ/S         (w+g+K)Ψ/S      16Ψ/S             16Ψ/S
    at most                               less by                      4, 8, S times     2, 4, S times

Limits are for S → ∞; at S = 4 mixed precision gives 2.3 and 2.9. On top come for a while
`in_flight`, and activations.

notes:   N0 ZeRO, N4 §4–7
Source:  Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
         Models", figure 1.
"""

from typing import NamedTuple

# the account's categories that stay from step to step
STATE = ("parameters", "gradients", "optimizer")


class Each(NamedTuple):
    """Bytes a parameter: its weight, its gradient, and what the optimizer keeps of it (K)."""

    parameters: int
    gradients: int
    optimizer: int

    @classmethod
    def of(cls, itemsize: int, *, moments: int = 2, masters: bool = False) -> "Each":
        """Of weights and gradients of `itemsize` bytes, `moments` arrays like them in the optimizer
        (2: Adam).

        With `masters` the optimizer works in single precision and keeps the weights in it too.
        """
        return cls(itemsize, itemsize, 4 * (moments + 1) if masters else itemsize * moments)

    @property
    def together(self) -> int:
        """Bytes a parameter where nothing is divided."""
        return sum(self)


SINGLE = Each.of(4)  # float32 with Adam: 4 + 4 + 8
# mixed precision with Adam: 2 + 2 + 12, of which 4 are the master weights
MIXED = Each.of(2, masters=True)


def state_bytes(
    parameters: int, each: Each, *, zero: int = 0, ranks: int = 1, shard: int | None = None
) -> dict[str, float]:
    """Bytes that one rank holds between steps, by category and in "total".

    Args:    parameters: of the model, Ψ; zero: the ZeRO stage, 0 for a replica (one process, DDP).
             ranks: of the data axis; shard: of them, how many share one copy (None: all).
    """
    parts = shard or ranks
    divided = {"optimizer": zero >= 1, "gradients": zero >= 2, "parameters": zero >= 3}
    held = {
        name: parameters * getattr(each, name) / (parts if divided[name] else 1) for name in STATE
    }
    return {**held, "total": sum(held.values())}


def saving(each: Each, *, zero: int, ranks: int, shard: int | None = None) -> float:
    """The bytes of a rank without ZeRO over those with it."""
    return each.together / state_bytes(1, each, zero=zero, ranks=ranks, shard=shard)["total"]


def in_flight(zero: int, *, largest: int, root: int = 0, ahead: int = 1) -> dict[str, int]:
    """Bytes by category that come on top at the peak of a step, at most: of buckets or units at
    work and on their way.

    Args:    largest: bytes of the largest bucket (ZeRO-2) or unit (ZeRO-3), its gradients as large
             as its weights.
             root: bytes of what is held all along: a tied weight's bucket, or the root unit.
             ahead: how many units ZeRO-3 gathers before their turn.
    """
    return {
        "parameters": (1 + ahead) * largest + root if zero == 3 else 0,
        "gradients": 2 * largest + root if zero >= 2 else 0,
    }
