"""The C library's allocator."""

import subprocess
import sys
from pathlib import Path

import pytest

from minidist.device.allocator import tune_allocator

PROGRAM = """
import ctypes, minidist.device.allocator as allocator
before = int(open("/proc/self/statm").read().split()[1])
assert allocator.tune_allocator()
taken = allocator.use_huge_pages(ctypes.CDLL(None))
assert taken == 0, "only once in a process"
heap, flags = False, []
for line in open("/proc/self/smaps"):
    if line.split()[0].count("-") == 1 and len(line.split()) >= 5:
        heap = line.rstrip().endswith("[heap]")
    if heap and line.startswith("Size:"):
        size = int(line.split()[1]) * 1024
    if heap and line.startswith("VmFlags:"):
        flags.append((size, "hg" in line.split()))
resident = 4096 * (int(open("/proc/self/statm").read().split()[1]) - before)
print(sum(size for size, huge in flags if huge), resident)
"""


def test_it_says_whether_it_did() -> None:
    assert tune_allocator() in (True, False)


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="no such pages here"
)
def test_the_heap_asks_for_huge_pages_and_takes_no_memory_for_it() -> None:
    out = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    huge, resident = map(int, out.split())
    assert huge >= 256 << 20, "the heap grew first, and all of it asks"
    assert resident < 32 << 20, "addresses, not memory"
