"""The C library's allocator."""

from minidist.device.allocator import tune_allocator


def test_it_says_whether_it_did() -> None:
    assert tune_allocator() in (True, False)
