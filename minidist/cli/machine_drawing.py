"""Draw the machine for `minidist doctor`: nested boxes for its parts, and a table of measured
links.

┌ vm: 23.5 GiB of memory, 21.8 GiB free ─────┐
│ ┌ socket 0: L3 260 MiB ──────────────────┐ │
│ │ ┌ core 0 ────┐ ┌ core 1 ────┐          │ │
│ │ │ L1d 48 KiB │ │ L1d 48 KiB │          │ │
│ │ │ L2 2 MiB   │ │ L2 2 MiB   │          │ │
│ │ └────────────┘ └────────────┘          │ │
│ └────────────────────────────────────────┘ │
└────────────────────────────────────────────┘
"""

from collections.abc import Iterable, Sequence

from minidist.comm.cost.link_model import LinkCost, Profile
from minidist.console import plural, size_text
from minidist.device.cores import in_words
from minidist.observe.machine_parts import (
    InstalledGpu,
    MachineParts,
    ProcessorCore,
    ProcessorSocket,
)

ASCII = str.maketrans(
    {
        "┌": "+",
        "┐": "+",
        "└": "+",
        "┘": "+",
        "─": "-",
        "│": "|",
        "…": ".",
        "α": "a",
        "β": "b",
        "µ": "u",
        "×": "x",
    }
)
MOST = 8  # a socket with more cores shows only the first ones as boxes
CALIBRATE = "minidist bench calibrate"


def drawing(
    parts: MachineParts, profile: Profile | None, *, width: int, encoding: str = "utf-8"
) -> list[str]:
    """Return the machine as lines of at most `width` (at least 40) columns.

    They are in ASCII if the encoding needs it.
    """
    width = max(40, width)
    inside = [line for socket in parts.sockets for line in _socket(socket, parts, width - 4)]
    lines = box(
        f"{parts.host}: {size_text(parts.memory)} of memory, {size_text(parts.free)} free",
        [parts.processor, *inside],
        width,
    )
    lines += row([_gpu(number, gpu) for number, gpu in enumerate(parts.gpus)], width)
    lines += ["", *links(profile, width)]
    try:
        "┌─│…αβµ×".encode(encoding)
    except (UnicodeEncodeError, LookupError):
        lines = [line.translate(ASCII) for line in lines]
    return lines


def box(title: str, inside: Iterable[str], width: int | None = None) -> list[str]:
    """Return a frame around lines; as wide as they are, or `width`.

    Text that does not fit is cut.
    """
    lines = [*inside]
    width = (
        max((len(line) for line in (f"{title} ", *lines)), default=0) + 4
        if width is None
        else width
    )
    title = title if len(title) <= width - 4 else f"{title[: width - 5]}…"
    return [
        f"┌ {title} {'─' * (width - 4 - len(title))}┐",
        *(
            f"│ {line if len(line) <= width - 4 else line[: width - 5] + '…':<{width - 4}} │"
            for line in lines
        ),
        f"└{'─' * (width - 2)}┘",
    ]


def row(boxes: Sequence[list[str]], width: int) -> list[str]:
    """Return boxes side by side, in the number of rows that the width requires."""
    lines: list[str] = []
    waiting = [*boxes]
    while waiting:
        count = 1
        while (
            count < len(waiting)
            and sum(len(each[0]) + 1 for each in waiting[: count + 1]) - 1 <= width
        ):
            count += 1
        beside = waiting[:count]
        waiting = waiting[count:]
        height = max(map(len, beside))
        beside = [[*each, *[" " * len(each[0])] * (height - len(each))] for each in beside]
        lines += [" ".join(parts) for parts in zip(*beside, strict=True)]
    return lines


def _socket(socket: ProcessorSocket, parts: MachineParts, width: int) -> list[str]:
    """Return a socket with its cores: of many cores, the first ones and the number of the
    others."""
    shared = ", ".join(
        f"{name} {size_text(nbytes)}" if count == 1 else f"{name} {count} × {size_text(nbytes)}"
        for name, nbytes, count in socket.shared
    )
    title = f"socket {socket.number}: {plural(len(socket.cores), 'core')}" + (
        f", {shared}" if shared else ""
    )
    if socket.memory and len(parts.sockets) > 1:
        title += f", {size_text(socket.memory)} beside it"
    boxes = [_core(core, parts) for core in socket.cores[:MOST]]
    if len(socket.cores) > MOST:
        boxes = boxes[:3]
        more = len(socket.cores) - len(boxes)
        boxes.append(
            box(f"{more} more", ["like these" if _alike(socket.cores) else "not all like these"])
        )
    return box(title, row(boxes, width - 4), width)


def _core(core: ProcessorCore, parts: MachineParts) -> list[str]:
    caches = [f"{name} {size_text(nbytes)}" for name, nbytes in core.caches]
    if len(core.threads) > 1:
        caches.append(f"threads {in_words(core.threads)}")
    if not set(core.threads) & set(parts.usable):
        caches.append("not ours")
    return box(f"core {core.threads[0]}", caches or ["caches: unknown"])


def _alike(cores: Sequence[ProcessorCore]) -> bool:
    return len({(core.caches, len(core.threads)) for core in cores}) == 1


def _gpu(number: int, gpu: InstalledGpu) -> list[str]:
    return box(f"GPU {number}", [gpu.name, f"{size_text(gpu.memory)} of memory"])


def links(profile: Profile | None, width: int) -> list[str]:
    """Return a table of the measured costs of messages between ranks."""
    if profile is None or not profile.links:
        return ["links between ranks: not measured yet", f"  {CALIBRATE}"]
    lines = [f"{'links':<10}{'ranks':>6}{'α':>12}{'1/β':>12}"]
    if width >= 60:
        lines[0] += "   what a message costs: α + bytes × β"
    lines += [
        _link(link) for link in sorted(profile.links, key=lambda link: (link.link, link.ranks))
    ]
    return [*lines, f"  measured {profile.machine.get('date', 'at an unknown date')}"]


def _link(link: LinkCost) -> str:
    rate = "-" if link.beta <= 0 else f"{1e-9 / link.beta:.3g} GB/s"
    return f"{link.link:<10}{link.ranks:>6}{f'{1e6 * link.alpha:.3g} µs':>12}{rate:>12}"
