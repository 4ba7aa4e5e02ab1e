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
# the lesson's model, with a vocabulary that has room for the symbols of `minidist train`
CONFIG = GPTConfig(
    vocabulary=128, context=16, layers=4, width=16, heads=4, tied=True, dtype="float64"
)
SIZES = {"dp": (1, 2), "pp": (1, 2), "tp": (1, 2, 4)}
ORDERS = ("dp,pp,tp", "pp,tp,dp", "tp,dp,pp")
MOST = 16  # ranks
MACHINE = 4  # ranks of a machine
COLORS = {"dp": "c4", "pp": "c0", "tp": "c1"}
RANK = 4  # the place of the control that chooses a rank
BOX = (66, 34)
MACHINE_BOX = (300, 96)  # from a machine to the next

Places = list[tuple[dict[str, int], dict[str, list[int]]]]
"""For each rank: its coordinates, and the ranks of its group along each axis."""


@cache
def meshed(dp: int, pp: int, tp: int) -> dict[str, Places]:
    """Return the ranks' places on a mesh, for each of ORDERS."""
    ranks = run(partial(_mesh_job, shape={"dp": dp, "pp": pp, "tp": tp}), size=dp * pp * tp)
    return {order: [rank[order] for rank in ranks] for order in ORDERS}


def _mesh_job(world: Any, shape: dict[str, int]) -> dict[str, Any]:
    found = {}
    for order in ORDERS:
        mesh = Mesh(world, order, **shape)
        groups = {axis: sorted(mesh[axis].world_ranks) for axis in shape}
        found[order] = ({axis: mesh.coordinates[axis] for axis in shape}, groups)
        mesh.close()
    return found


@cache
def sent(dp: int, pp: int, tp: int) -> dict[str, int]:
    """Return the bytes that all ranks send in a step along each axis."""
    plan = lab.plan_of({"dp": dp, "pp": pp, "tp": tp})
    counted: dict[str, int] = lab.formula(plan, CONFIG)
    return counted


def figure(say: Say) -> Live:
    """Return the figure in a language."""
    return Live(
        name="mesh",
        lesson="17",
        section="2",
        title=say("A rank and its groups on the mesh", "进程网格上的一个 rank 和它的各个组"),
        predict=Prediction(
            say(
                "dp=2, pp=2, tp=4: 16 ranks on machines of four. With tp innermost, the four ranks "
                "of a tp group share a machine. If tp becomes outermost (order tp, dp, pp), how "
                "many ranks of rank 0's tp group are on its machine, itself included?",
                "dp=2、pp=2、tp=4：16 个 rank，每台机器 4 个。tp 在最内层时，一个 tp 组的 4 个 rank "
                "在同一台机器上。如果 tp 在最外层（顺序 tp, dp, pp），rank 0 所在的机器上，有几个 "
                "rank 属于它的 tp 组（算上它自己）？",
            ),
            ("1", "2", "4"),
            0,
            say(
                "One, itself: neighbours along the outermost axis are 4 ranks apart, so each of "
                "the four is on another machine, and the sums of every layer leave it.",
                "1 个，就是它自己：在最外层的维度上，相邻两个的编号相差 4，所以 4 个 rank 分别在 4 "
                "台机器上，每一层的求和都要离开机器。",
            ),
        ),
        controls=(
            *(Control(axis, tuple(map(str, sizes))) for axis, sizes in SIZES.items()),
            Control(say("order, innermost last", "顺序，最内层在最后"), ORDERS),
            Control(say("chosen rank (or click)", "选中的 rank（也可点击）"), _numbers(MOST)),
        ),
        size=(2 * MACHINE_BOX[0] + 12, 2 * MACHINE_BOX[1] + 40),
        picture=partial(_picture, say),
        start=(1, 1, 1, 0, 5),
    )


def _numbers(count: int) -> tuple[str, ...]:
    return tuple(str(number) for number in range(count))


def _picture(say: Say, dp_at: int, pp_at: int, tp_at: int, order_at: int, rank: int) -> Picture:
    shape = {axis: SIZES[axis][at] for axis, at in zip(SIZES, (dp_at, pp_at, tp_at), strict=True)}
    order = ORDERS[order_at]
    places = meshed(**shape)[order]
    chosen = min(rank, len(places) - 1)
    picture = Picture(_command(shape, order))
    for machine in range(0, len(places), MACHINE):
        _draw_machine(say, picture, places, machine, chosen)
    y = 2 * MACHINE_BOX[1] + 14
    for place, (color, text) in enumerate(
        [("c2", say("chosen", "选中的 rank"))]
        + [(COLORS[axis], say(f"its {axis} group", f"它的 {axis} 组")) for axis in shape]
    ):
        picture.box(10 + 140 * place, y, 16, 14, color)
        picture.text(32 + 140 * place, y + 12, text)
    picture.facts += _facts(say, shape, places, chosen)
    return picture


def _command(shape: dict[str, int], order: str) -> str:
    """Return the training that prints the bytes of each axis."""
    plan = ",".join(f"{axis}={size}" for axis, size in shape.items())
    ranks = shape["dp"] * shape["pp"] * shape["tp"]
    pieces = f" --microbatches {lab.MICROBATCHES}" if shape["pp"] > 1 else ""
    return (
        f"minidist train -n {ranks} --plan {plan} --order {order}{pieces} --batch {lab.SEQUENCES}"
        f" --context {CONFIG.context} --layers {CONFIG.layers} --width {CONFIG.width}"
        f" --heads {CONFIG.heads} --vocab {CONFIG.vocabulary} --tied --positions learned"
        " --dtype float64 --steps 2"
    )


def _draw_machine(say: Say, picture: Picture, places: Places, first: int, chosen: int) -> None:
    """Draw the ranks of a machine, those of the chosen rank's groups in colour."""
    number = first // MACHINE
    left = 10 + MACHINE_BOX[0] * (number % 2)
    top = 24 + MACHINE_BOX[1] * (number // 2)
    groups = places[chosen][1]
    picture.text(left, top - 8, say(f"machine {number}", f"机器 {number}"), "soft small")
    for rank in range(first, min(first + MACHINE, len(places))):
        axes = [axis for axis, ranks in groups.items() if rank in ranks]
        color = "c2" if rank == chosen else COLORS[axes[0]] if axes else "free"
        x = left + (BOX[0] + 6) * (rank - first)
        picture.box(x, top, *BOX, color, str(rank), sets=(RANK, rank))
        told = " ".join(f"{axis}{place}" for axis, place in places[rank][0].items())
        picture.text(x + BOX[0] / 2, top + BOX[1] + 14, told, "middle soft small")


def _facts(say: Say, shape: dict[str, int], places: Places, chosen: int) -> list[str]:
    """Return the chosen rank's coordinates, and for each of its groups what it sends."""
    coordinates, groups = places[chosen]
    told = ", ".join(f"{axis}={place}" for axis, place in coordinates.items())
    facts = [
        say(
            f"Rank {chosen} of {len(places)}: coordinates {told}.",
            f"rank {chosen}，共 {len(places)} 个 rank：坐标是 {told}。",
        )
    ]
    work = {
        "dp": say("gradients are added up, once a step", "每步一次，把梯度相加"),
        "pp": say(
            "each microbatch's activations go on, its gradients come back (and the tied table's "
            "gradient is added up)",
            "每个微批次的激活值向前传，梯度向后传（还要把共享嵌入矩阵的梯度相加）",
        ),
        "tp": say(
            "partial sums are added up in each layer, forward and backward",
            "在每一层把部分和相加，前向和反向都有",
        ),
    }
    for axis, ranks in groups.items():
        if len(ranks) == 1:
            facts.append(say(f"{axis}: no other rank.", f"{axis}：没有其他 rank。"))
            continue
        listed = " ".join(map(str, ranks))
        machines = len({rank // MACHINE for rank in ranks})
        total = size_text(sent(**shape)[axis])
        where = "on one machine" if machines == 1 else f"on {machines} machines"
        facts.append(
            say(
                f"{axis}: ranks {listed}, {where}: {work[axis]}. "
                f"All {axis} groups together send {total} a step.",
                f"{axis}：rank {listed}，在 {machines} 台机器上：{work[axis]}。"
                f"所有 {axis} 组一步合计发送 {total}。",
            )
        )
    return facts
