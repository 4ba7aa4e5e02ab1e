"""Chapter 24 · Scaling curves: the best plan for growing numbers of nodes, and its efficiency.

    strong(config, "h100:8x8", batch=512)           # the same batch on more devices
    weak(config, "h100:8x8", a_device=8)            # a batch that grows with the devices

The notes say "near-linear" of data parallelism (N2:86), of DDP (N0:430) and of small scales
(N1:100). The efficiency of each point shows how near to linear it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from minidist.errors import ConfigError
from minidist.nn import GPTConfig
from minidist.plan.ranking import Ranking, plan_for
from minidist.simulate.cluster import Cluster

NEAR_LINEAR = 0.9  # least efficiency that counts as near-linear: assumed, the notes give no number


@dataclass(frozen=True)
class ScalingPoint:
    """A point of a scaling curve.

    Attributes: efficiency: sequences per second and device / the same of the first point.
    """

    nodes: int
    devices: int
    batch: int
    plan: str
    step_seconds: float
    efficiency: float

    @property
    def near_linear(self) -> bool:
        """True if the notes' claim, near-linear, holds at this point."""
        return self.efficiency >= NEAR_LINEAR


def strong(
    config: GPTConfig,
    cluster: Cluster | str,
    *,
    batch: int,
    nodes: Sequence[int] = (),
    precision: str = "bf16",
) -> list[ScalingPoint]:
    """Return the curve of the same batch on more nodes."""
    return _curve(config, cluster, nodes, lambda devices: batch, precision)


def weak(
    config: GPTConfig,
    cluster: Cluster | str,
    *,
    a_device: int,
    nodes: Sequence[int] = (),
    precision: str = "bf16",
) -> list[ScalingPoint]:
    """Return the curve of a batch of `a_device` sequences per device."""
    return _curve(config, cluster, nodes, lambda devices: a_device * devices, precision)


def scaling_curves(ranking: Ranking) -> dict[str, list[ScalingPoint]]:
    """Return strong and weak scaling up to the ranking's own cluster and batch; both curves end
    there, if the batch divides.

    Raises: ConfigError as weak and strong do.
    """
    cluster = ranking.cluster
    precision = ranking.best.plan.precision
    return {
        "strong": strong(ranking.config, cluster, batch=ranking.batch, precision=precision),
        "weak": weak(
            ranking.config,
            cluster,
            a_device=max(1, ranking.batch // cluster.size),
            precision=precision,
        ),
    }


def _curve(
    config: GPTConfig,
    cluster: Cluster | str,
    nodes: Sequence[int],
    batch_of: Callable[[int], int],
    precision: str,
) -> list[ScalingPoint]:
    """Return the points where the model fits and the batch divides. Raises: ConfigError if there is
    none."""
    cluster = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    if cluster.topology.torus:
        raise ConfigError(
            f"{cluster.spec} is a torus; curves are drawn over nodes: choose a cluster of nodes"
        )
    found: list[ScalingPoint] = []
    first = 0.0
    refused = ""
    for count in nodes or _powers(cluster.nodes):
        part = replace(cluster, nodes=count, spec=f"{cluster.name}:{count}x{cluster.per_node}")
        batch = batch_of(part.size)
        try:
            best = plan_for(config, part, batch=batch, precision=precision).best
        except ConfigError as error:
            refused = str(error)
            continue
        speed = batch / best.step_seconds / part.size
        first = first or speed
        found.append(
            ScalingPoint(count, part.size, batch, best.text, best.step_seconds, speed / first)
        )
    if not found:
        raise ConfigError(refused)
    return found


def _powers(most: int) -> list[int]:
    return [count for count in (1 << bit for bit in range(most.bit_length())) if count <= most]
