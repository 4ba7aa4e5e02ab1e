"""Sockets, cores and caches of a fake /sys, and of this machine."""

from pathlib import Path

import psutil

from minidist.observe.machine_parts import ProcessorCore, machine_parts, threads_in


def fake_system(folder: Path) -> Path:
    """Two sockets of two cores with two threads each: L1 and L2 of a core, L3 of a socket, memory
    beside each."""
    for thread in range(8):
        core = thread % 4
        socket = thread % 4 // 2
        place = folder / "cpu" / f"cpu{thread}"
        (place / "topology").mkdir(parents=True)
        (place / "topology/physical_package_id").write_text(f"{socket}\n")
        # begins again in each socket, as Linux counts
        (place / "topology/core_id").write_text(f"{core % 2}\n")
        caches = [
            ("1", "Data", "48K", f"{core},{core + 4}"),
            ("1", "Instruction", "32K", f"{core},{core + 4}"),
            ("2", "Unified", "2048K", f"{core},{core + 4}"),
            (
                "3",
                "Unified",
                "32M",
                f"{2 * socket}-{2 * socket + 1},{2 * socket + 4}-{2 * socket + 5}",
            ),
        ]
        for index, texts in enumerate(caches):
            (place / f"cache/index{index}").mkdir(parents=True)
            for name, text in zip(("level", "type", "size", "shared_cpu_list"), texts, strict=True):
                (place / f"cache/index{index}/{name}").write_text(text + "\n")
    for node in range(2):
        (folder / f"node/node{node}").mkdir(parents=True)
        (folder / f"node/node{node}/cpulist").write_text(
            f"{2 * node}-{2 * node + 1},{2 * node + 4}-{2 * node + 5}\n"
        )
        (folder / f"node/node{node}/meminfo").write_text(
            f"Node {node} MemTotal:       {(node + 1) << 20} kB\n"
        )
    (folder / "cpu/cpufreq").mkdir()
    return folder


def test_sockets_cores_and_caches(tmp_path: Path) -> None:
    one, other = machine_parts(fake_system(tmp_path)).sockets
    caches = (("L1d", 48 << 10), ("L1i", 32 << 10), ("L2", 2 << 20))
    assert one.cores == (ProcessorCore((0, 4), caches), ProcessorCore((1, 5), caches))
    assert other.cores == (ProcessorCore((2, 6), caches), ProcessorCore((3, 7), caches))
    assert one.shared == other.shared == (("L3", 32 << 20, 1),)
    assert (one.memory, other.memory) == (1 << 30, 2 << 30)


def test_a_system_that_tells_nothing_has_cores_all_the_same(tmp_path: Path) -> None:
    parts = machine_parts(tmp_path)
    assert (
        len(parts.sockets) == 1
        and len(parts.sockets[0].cores) >= 1
        and parts.sockets[0].shared == ()
    )
    (tmp_path / "cpu/cpu0/topology").mkdir(parents=True)
    (tmp_path / "cpu/cpu0/cache/index0").mkdir(parents=True)
    assert machine_parts(tmp_path).sockets[0].cores == (ProcessorCore((0,), ()),)


def test_this_machine() -> None:
    parts = machine_parts()
    threads = [
        thread for socket in parts.sockets for core in socket.cores for thread in core.threads
    ]
    assert len(threads) == len(set(threads)) == psutil.cpu_count() and {*parts.usable} <= {*threads}
    assert parts.memory == psutil.virtual_memory().total and 0 < parts.free <= parts.memory


def test_lists_of_the_kernel() -> None:
    assert (
        threads_in("0-2,8\n") == [0, 1, 2, 8] and threads_in("\n") == [] and threads_in("5") == [5]
    )
