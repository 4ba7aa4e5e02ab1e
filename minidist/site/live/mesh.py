"""Lesson 17: the mesh of a plan: which ranks are in a rank's groups, and on which machines."""

from functools import cache, partial
from typing import Any

from minidist import lessons
from minidist.console import size_text
from minidist.grading import load_module
from minidist.launch import run
from minidist.nn import GPTConfig
from minidist.parallel.hybrid.mesh import Mesh
from minidist.site.live import Control, Live, Picture, Prediction, Say

lab = load_module(lessons.FOLDER / "17_hybrid" / "experiments.py", "17")
# the lesson's model with a vocabulary that also holds the symbols of `minidist train`
CONFIG = GPTConfig(
    vocabulary=128, context=16, layers=4, width=16, heads=4, tied=True, dtype="float64"
)
AXES = ("dp", "pp", "tp")
SIZES = {"dp": (1, 2), "pp": (1, 2), "tp": (1, 2, 4)}
ORDERS = ("dp,pp,tp", "pp,tp,dp", "tp,dp,pp")
MOST = 16  # ranks
MACHINE = 4  # ranks of a machine
COLORS = {"dp": "c4", "pp": "c0", "tp": "c1"}
BOX = (64, 34)
STEP = (300, 92)  # from a machine to the next

Places = list[tuple[dict[str, int], dict[str, list[int]]]]
"""For each rank: its coordinates, and the ranks of its group along each axis."""


@cache
def meshed(dp: int, pp: int, tp: int) -> dict[str, Places]:
    """Return a mesh of each of ORDERS."""
    ranks = run(partial(_mesh_job, shape={"dp": dp, "pp": pp, "tp": tp}), size=dp * pp * tp)
    return {order: [rank[order] for rank in ranks] for order in ORDERS}


def _mesh_job(world: Any, shape: dict[str, int]) -> dict[str, Any]:
    found = {}
    for order in ORDERS:
        mesh = Mesh(world, ",".join([order, "ep", "cp"]), **shape)
        groups = {axis: sorted(mesh[axis].world_ranks) for axis in AXES}
        found[order] = ({axis: mesh.coordinates[axis] for axis in AXES}, groups)
        mesh.close()
    return found
