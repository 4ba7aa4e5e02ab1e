"""The drawing of doctor: every width, many cores, GPUs, links as they were measured."""

from dataclasses import replace

import pytest

from minidist.cli.machine_drawing import box, drawing, links, row
from minidist.comm.cost.link_model import LinkCost, Profile
from minidist.observe.machine_parts import (
    InstalledGpu,
    MachineParts,
    ProcessorCore,
    ProcessorSocket,
)

CORES = tuple(ProcessorCore((number,), (("L1d", 48 << 10), ("L2", 2 << 20))) for number in range(2))
SOCKET = ProcessorSocket(0, CORES, (("L3", 260 << 20, 1),), 24 << 30)
SMALL = MachineParts("vm", "A Processor", (SOCKET,), 24 << 30, 8 << 30, (0, 1), ())
MANY = tuple(ProcessorCore((number, number + 48), (("L2", 2 << 20),)) for number in range(48))
SOCKETS = (
    ProcessorSocket(0, MANY[:24], (("L3", 32 << 20, 3),), 256 << 30),
    ProcessorSocket(1, MANY[24:], (), 1 << 30),
)
LARGE = replace(
    SMALL,
    sockets=SOCKETS,
    usable=tuple(range(2, 96)),
    gpus=(InstalledGpu("A GPU of a long name", 141 << 30),) * 8,
)
PROFILE = Profile(
    [
        LinkCost("tcp", 4, 2.4e-5, 1e-6, 5e-10, 1e-10, 0.1),
        LinkCost("shm", 2, 4e-6, 1e-6, 2e-10, 1e-10, 0.1),
    ],
    {"date": "2026-11-22T09:00"},
)


def test_a_small_machine() -> None:
    assert drawing(SMALL, None, width=50) == [
        "┌ vm: 24 GiB of memory, 8 GiB free ──────────────┐",
        "│ A Processor                                    │",
        "│ ┌ socket 0: 2 cores, L3 260 MiB ─────────────┐ │",
        "│ │ ┌ core 0 ────┐ ┌ core 1 ────┐              │ │",
        "│ │ │ L1d 48 KiB │ │ L1d 48 KiB │              │ │",
        "│ │ │ L2 2 MiB   │ │ L2 2 MiB   │              │ │",
        "│ │ └────────────┘ └────────────┘              │ │",
        "│ └────────────────────────────────────────────┘ │",
        "└────────────────────────────────────────────────┘",
        "",
        "links between ranks: not measured yet",
        "  minidist bench calibrate",
    ]


@pytest.mark.parametrize("parts", [SMALL, LARGE])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_any_width_and_encoding(parts: MachineParts, width: int, encoding: str) -> None:
    lines = drawing(parts, PROFILE, width=width, encoding=encoding)
    assert max(map(len, lines)) <= max(width, 40) and "\n".join(lines).encode(encoding)
    end = next(number for number, line in enumerate(lines) if line.startswith(("└", "+-")))
    assert {len(line) for line in lines[: end + 1]} == {max(width, 40)}


def test_many_cores_and_gpus() -> None:
    text = "\n".join(drawing(LARGE, None, width=100))
    assert (
        "socket 0: 24 cores, L3 3 × 32 MiB, 256 GiB beside it" in text
        and text.count("┌ core ") == 6
    )
    assert (
        text.count("21 more") == 2
        and "like these" in text
        and "┌ core 24 " in text
        and "threads 24,72" in text
    )
    assert (
        text.count("A GPU of a long name") == 8
        and "┌ GPU 7 " in text
        and "141 GiB of memory" in text
    )
    assert text.count("not ours") == 0  # threads 48 and 49 of cores 0 and 1 are ours
    text = "\n".join(drawing(replace(LARGE, usable=(0,)), None, width=100))
    assert text.count("not ours") == 5
    odd = replace(LARGE.sockets[0], cores=(*MANY[:23], ProcessorCore((99,), ())))
    assert "not all like these" in "\n".join(
        drawing(replace(LARGE, sockets=(odd,)), None, width=100)
    )


def test_links_with_their_latency_and_bandwidth() -> None:
    assert links(PROFILE, 80)[1:] == [
        "shm            2        4 µs      5 GB/s",
        "tcp            4       24 µs      2 GB/s",
        "  measured 2026-11-22T09:00",
    ]
    assert links(Profile([], {}), 80) == links(None, 80)


def test_boxes() -> None:
    assert box("a title", ["x"]) == ["┌ a title ─┐", "│ x        │", "└──────────┘"]
    assert [len(line) for line in row([box("a", ["b"])] * 3, 15)] == [13, 13, 13, 6, 6, 6]
