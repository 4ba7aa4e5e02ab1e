"""The numbers of the live figure `buckets`, computed another way."""

import pytest

from minidist.site.live import buckets


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("bucket_bytes", [buckets.BUCKETS[0], buckets.BUCKETS[-1]])
def test_the_exposed_time_is_that_of_the_gaps_in_the_picture(
    bucket_bytes: int, overlap: bool
) -> None:
    step = buckets.step_of(bucket_bytes, 1, overlap)
    computes, reduces = buckets.lanes_of(bucket_bytes, 1, overlap)
    busy = sum(span.stop - span.start for span in computes)
    assert step.axes["dp"].exposed == pytest.approx(step.step_seconds - busy)
    sent = sum(span.details["nbytes"] for span in reduces)
    vectors = 12 * 13 * 768 + 2 * 768  # biases and norms of the blocks, and the last norm
    assert sent == 2 * (buckets.CONFIG.numbers + vectors)  # bfloat16


def test_one_bucket_takes_what_a_ring_takes_and_hides_nothing() -> None:
    """2 (P-1)/P of the gradients' bytes over 0.92 of 50 GB/s, and little for latency."""
    everything = buckets.BUCKETS[-1]
    for overlap in (True, False):
        ring = 2 * 7 / 8 * 2 * buckets.CONFIG.numbers / (0.92 * 50e9)
        exposed = buckets.step_of(everything, 1, overlap).axes["dp"].exposed
        assert ring < exposed < 1.05 * ring
    told = [buckets.step_of(16 << 20, link, True).axes["dp"].exposed for link in (1, 2)]
    assert [round(1e3 * seconds, 1) for seconds in told] == [1.4, 6.8]  # the prediction's numbers
