"""One message on its way through the server of N4 §1: GPU, PCIe switch, network card, InfiniBand.

The server is the cluster a100-pcie of minidist/simulate/clusters.toml: eight GPUs, four PCIe
switches (PLX) with two GPUs and a card (HCA) each, 4 lanes from a switch up to its CPU. A route is
the simulator's (minidist/simulate/topology.py).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from minidist.lessons.page import Page
from minidist.simulate.cluster import Cluster
from minidist.simulate.topology import Link

NBYTES = 64 << 20
# behind a link, by the end of its name
STOPS = {
    "root-up": "CPU",
    "root-down": "PLX",
    "hca-down": "HCA",
    "nic-out": "IB switch",
    "nic-in": "HCA",
    "hca-up": "PLX",
    "up": "PLX",
    "down": "GPU",
    "out": "NVSwitch",
    "in": "GPU",
}


class Trip(NamedTuple):
    """A message from GPU 0, and the partner of each GPU where all eight send."""

    to: str
    cluster: str
    partner: Callable[[int], int]


TRIPS = (
    Trip("GPU 1, below the same PLX", "a100-pcie:2x8", lambda gpu: gpu ^ 1),
    Trip("GPU 2, below another PLX", "a100-pcie:2x8", lambda gpu: (gpu + 2) % 8),
    Trip("GPU 0 of the next server", "a100-pcie:2x8", lambda gpu: gpu + 8),
    Trip("GPU 1, by NVLink", "a100-80g:1x8", lambda gpu: (gpu + 1) % 8),
)


def route(cluster: Cluster, src: int, dst: int) -> list[Link]:
    """Return the links from one GPU to another, in order."""
    return [cluster.links[number] for number in cluster.route(src, dst)]


def stop(link: Link) -> str:
    """Return what a link leads to: "node0.hca1-down" to the HCA."""
    name = link.name.partition(".")[2]
    kind = "".join(letter for letter in name if not letter.isdigit())
    return STOPS[kind]


def seconds(cluster: Cluster, pairs: Sequence[tuple[int, int]]) -> float:
    """Return seconds until messages of NBYTES between these pairs, sent at once, have arrived: the
    latency and the busiest link."""
    loads: Counter[Link] = Counter()
    for src, dst in pairs:
        loads.update(route(cluster, src, dst))
    latency = cluster.topology.alpha(*pairs[0])
    return latency + max(NBYTES * times / link.bandwidth for link, times in loads.items())


def followed(page: Page) -> None:
    """Show the way of a message of 64 MiB from GPU 0, and its time, alone and beside seven
    others."""
    rows = []
    for trip in TRIPS:
        cluster = Cluster.parse(trip.cluster)
        pairs = [(gpu, trip.partner(gpu)) for gpu in range(8)]
        links = route(cluster, *pairs[0])
        narrowest = min(links, key=lambda link: link.bandwidth)
        rows.append(
            [
                trip.to,
                ", ".join(stop(link) for link in links),
                f"{narrowest.bandwidth / 1e9:.1f} GB/s",
                f"{1e3 * seconds(cluster, pairs[:1]):.2f} ms",
                f"{1e3 * seconds(cluster, pairs):.2f} ms",
            ]
        )
    page.table(
        "64 MiB from GPU 0 of N4's server",
        ["to", "by way of", "narrowest", "alone", "all eight"],
        rows,
        note="all eight: each GPU sends to a partner as far away, at the same time",
    )
