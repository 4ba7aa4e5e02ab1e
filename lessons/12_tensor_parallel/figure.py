"""The figure of lesson 12: which numbers of each matrix a rank held, what its steps sent, what
filled its memory.

python lessons/12_tensor_parallel/figure.py [--out DIR]      # figure.png and figure.mmd
"""

from pathlib import Path
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.comm.records import gather_records
from minidist.console import size_text
from minidist.grading import load_module
from minidist.lessons import figures as look
from minidist.lessons.lab import new_model
from minidist.lessons.running import draw_figure
from minidist.nn.weight_shard import WeightShard
from minidist.optim import Adam
from minidist.parallel.tensor.tensor_parallel import elements_sent

HERE = Path(__file__).resolve().parent
lab = load_module(HERE / "experiments.py", "12")
RANKS = 4
CONFIG = lab.CONFIG
PLACES = {  # name -> (left, top) of its corner, in numbers; title
    "tokens.weight": (0, 0, "embedding: V × h"),
    "blocks.0.attention.qkv.weight": (87, 0, "qkv: h × 3h"),
    "blocks.0.attention.out.weight": (258, 0, "out: h × h"),
    "blocks.0.mlp.up.weight": (87, -90, "up: h × 4h"),
    "blocks.0.mlp.down.weight": (333, 0, "down: 4h × h"),
    "head.weight": (408, 0, "output head: h × V"),
}


def record(group: Group) -> dict[str, Any]:
    """Return on rank 0 which rank holds each number, what the steps sent by kind, memory by ranks,
    and a block's calls."""
    model = lab.cut_model(group)
    held = {}
    for name, p in model.named_parameters():
        if isinstance(p, WeightShard) and name in PLACES:
            owner = np.zeros(p.whole, np.int64)
            own = np.zeros(p.whole, np.int64)
            own[
                np.ix_(
                    *(
                        np.arange(n)[
                            p.parts[group.rank][d] if d < len(p.parts[group.rank]) else slice(None)
                        ]
                        for d, n in enumerate(p.whole)
                    )
                )
            ] = group.rank + 1
            group.all_reduce(own, out=owner)
            held[name] = owner - 1
    graph = block_calls(group)
    strategy = lab.cut_strategy(group)
    optimizer = Adam(strategy.parameters, 1e-3)
    sent = []
    end = group.ledger.subscribe(
        lambda event: (
            sent.append(event.details["nbytes"])
            if event.kind == "call" and event.details["axis"] == "tp"
            else None
        )
    )
    strategy.step(lab.batch_of(CONFIG, 0), optimizer)
    end()
    calls = group.all_gather(np.array(sent, np.int64).reshape(1, -1)).sum(axis=0)
    return {"held": held, "calls": calls.tolist(), "memory": memory(group), "graph": graph}


def memory(group: Group) -> dict[int, list[int]]:
    """Return {ranks: [weights, activations inside, activations outside] of a block}, on the rank
    that holds most."""
    result = {}
    outside = lab.ITEM * lab.BATCH * CONFIG.context * (4 * CONFIG.width + 2)
    for size in (1, 2, RANKS):
        part = group.split(0 if group.rank < size else None)
        if part is None:
            continue
        make = new_model if size == 1 else lambda c, part=part: lab.cut_model(part, c)
        weights, activations = lab.block_bytes(CONFIG, make)
        result[size] = [weights, activations - outside, outside]
    return result


def block_calls(group: Group) -> list[list[tuple[str, str]]] | None:
    """Return on rank 0, for each rank: (kind, text) of the layers and all-reduces of one forward of
    block 0, in order."""
    model = lab.cut_model(group)
    block = model.blocks[0]
    seen = []
    inside: list[bool] = []

    def called(event: Any) -> None:
        if inside and event.kind == "call" and event.details["axis"] == group.axis:
            seen.append(("all-reduce", event.details["verb"]))

    def entered(module: Any, args: Any) -> None:
        name = module.path.removeprefix("blocks.0.")
        seen.append(
            (
                "norm" if "norm" in name else "layer",
                f"{name} {' × '.join(map(str, module.weight.shape))}",
            )
        )

    for module in block.modules():
        if hasattr(module, "weight"):
            module.register_forward_pre_hook(entered)
    block.register_forward_pre_hook(lambda module, args: inside.append(True))
    block.register_forward_hook(lambda module, args, result: inside.clear())
    end = group.ledger.subscribe(called)
    model.loss(*lab.batch_of(CONFIG, 0))
    end()
    return gather_records(group, [list(step) for step in seen])


# ------------------------------------------------------------------------------------------ drawing


def draw(recorded: dict[str, Any], folder: Path) -> None:
    """Draw figure.png and figure.mmd from what was recorded."""
    figure = look.new_figure(
        13.5,
        8.6,
        f"Every matrix of a GPT on {RANKS} ranks, as held, sent and stored",
        f"{CONFIG.layers} blocks, width h = {CONFIG.width}, {CONFIG.heads} heads, V = "
        f"{CONFIG.vocabulary} ids: neither heads nor ids divide by {RANKS}. "
        f"{lab.BATCH} sequences of {CONFIG.context} tokens, float64.",
    )
    _matrices(figure.add_axes((0.03, 0.385, 0.95, 0.50)), recorded["held"])
    _traffic(figure.add_axes((0.07, 0.08, 0.44, 0.20)), recorded["calls"])
    _memory(figure.add_axes((0.61, 0.08, 0.36, 0.20)), recorded["memory"])
    look.save(figure, folder)
    look.save_mermaid(mermaid(recorded["graph"]), folder)


def _matrices(ax: Any, held: dict[str, np.ndarray]) -> None:
    """Draw each matrix to scale, with a dot in its holder's colour for each number."""
    look.bare(ax)
    colours = np.array(
        [[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in look.RANKS[:RANKS]], np.uint8
    )
    for name, (left, top, title) in PLACES.items():
        height, width = held[name].shape
        ax.imshow(
            colours[held[name]],
            extent=(left, left + width, top - height, top),
            interpolation="nearest",
        )
        ax.text(left, top + 4, title, fontsize=11, fontweight="bold", color=look.INK)
        if "qkv" in name:
            for third, letter in enumerate("QKV"):
                ax.text(
                    left + (third + 0.5) * width / 3,
                    top - height - 8,
                    letter,
                    fontsize=11,
                    color=look.SOFT,
                    ha="center",
                    va="center",
                )
    ax.set_xlim(-2, 520)
    ax.set_ylim(-196, 14)
    ax.set_anchor("W")
    ax.legend(
        [look.patch(look.RANKS[rank]) for rank in range(RANKS)],
        [f"rank {rank}" for rank in range(RANKS)],
        frameon=False,
        fontsize=11,
        loc="lower right",
    )


def _traffic(ax: Any, calls: list[int]) -> None:
    """Draw one bar per all-reduce of a step, in the order in which they ran; the formula as a
    mark."""
    look.quiet(ax, grid="y")
    tokens = lab.BATCH * CONFIG.context
    each = 2 * (RANKS - 1) * lab.ITEM
    forward = 1 + 2 * CONFIG.layers
    kinds = ["forward"] * forward + ["loss"] * 2 + ["backward"] * (len(calls) - forward - 2)
    colours = {
        "forward": look.PHASES["forward"],
        "backward": look.PHASES["backward"],
        "loss": look.PHASES["all_reduce"],
    }
    formula = [each * tokens * {"loss": 1}.get(kind, CONFIG.width) for kind in kinds]
    formula[forward + 1] *= 2
    ax.bar(
        range(len(calls)),
        np.array(calls) / 1024,
        color=[colours[kind] for kind in kinds],
        width=0.7,
    )
    ax.plot(
        range(len(calls)),
        np.array(formula) / 1024,
        "_",
        color=look.INK,
        markersize=20,
        markeredgewidth=2,
    )
    names = [
        "embed",
        *(f"{part} {i}" for i in range(CONFIG.layers) for part in ("attn", "mlp")),
        "max",
        "sum",
        "head",
        *(f"{part} {i}" for i in reversed(range(CONFIG.layers)) for part in ("mlp", "attn")),
    ]
    ax.set_xticks(range(len(calls)), names, fontsize=9)
    ax.set_ylabel("KiB, all ranks", fontsize=10.5, color=look.SOFT)
    total = elements_sent(CONFIG, ranks=RANKS, tokens=tokens) * lab.ITEM
    look.caption(
        ax,
        f"The all-reduces of a step: {size_text(sum(calls))}, by the formula (marks) "
        f"{size_text(total)}",
    )
    ax.legend(
        [*(look.patch(colour) for colour in colours.values())],
        list(colours),
        frameon=False,
        fontsize=9.5,
        loc="upper left",
        bbox_to_anchor=(0.405, 1.02),
        handlelength=0.8,
        handletextpad=0.5,
    )


def _memory(ax: Any, memory: dict[int, list[int]]) -> None:
    """Draw a block's bytes on one, two and four ranks."""
    look.quiet(ax, grid="x")
    left = np.zeros(len(memory))
    names = ["weights", "activations inside the regions", "outside: whole on every rank"]
    colours = [look.MEMORY["parameters"], look.MEMORY["activations"], "#e3a6a8"]
    for kind, (name, colour) in enumerate(zip(names, colours, strict=True)):
        values = np.array([held[kind] for held in memory.values()]) / 1024
        ax.barh(range(len(memory)), values, 0.6, left, color=colour, label=name)
        left += values
    ax.set_yticks(
        range(len(memory)), [f"{size} rank{'s' * (size > 1)}" for size in memory], fontsize=11
    )
    ax.invert_yaxis()
    ax.set_xlabel("KiB of one block on rank 0, from its account", fontsize=10.5, color=look.SOFT)
    look.caption(ax, "What a rank holds of a block")
    ax.legend(
        frameon=False,
        fontsize=9.5,
        loc="lower right",
        labelspacing=0.2,
        bbox_to_anchor=(1.0, -0.03),
    )


def mermaid(ranks: list[list[tuple[str, str]]]) -> str:
    """Return N2's graph of tensor parallelism for the block that ran: each rank's layers between f
    and g."""
    lines = ["graph TB", '    x["x, whole on every rank"]']
    before = "x"
    region = 0
    layers: list[list[str]] = [[] for _ in ranks]
    for steps in zip(*ranks, strict=True):
        kind, text = steps[0]
        if kind == "norm":
            lines += [
                f'    n{region}["{text.split()[0]}, on every rank"]',
                f"    {before} --> n{region}",
                f'    f{region}["f: as it is (backward: all-reduce)"]',
                f"    n{region} --> f{region}",
            ]
        elif kind == "layer":
            for of_rank, (_, layer) in zip(layers, steps, strict=True):
                of_rank.append(layer.replace(" ", "<br/>", 1))
        else:
            lines.append(f'    g{region}["g: all-reduce (backward: as it is), + bias"]')
            for rank, of_rank in enumerate(layers):
                lines += [
                    f'    r{region}{rank}["rank {rank}<br/>{"<br/>".join(of_rank)}"]',
                    f"    f{region} --> r{region}{rank} --> g{region}",
                ]
            lines += [
                f'    s{region}(("+"))',
                f"    g{region} --> s{region}",
                f"    {before} --> s{region}",
            ]
            before = f"s{region}"
            region = region + 1
            layers = [[] for _ in ranks]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    draw_figure(record, draw, HERE, size=RANKS)
