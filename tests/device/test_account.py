"""The memory account: distinct buffers, by category, now and peak; held against tracemalloc."""

import gc
import threading
import tracemalloc

import numpy as np
import pytest

from minidist.autograd import ops
from minidist.autograd.tensor import Parameter
from minidist.device import account
from minidist.device.account import MemoryAccount
from minidist.errors import ConfigError, MemoryLimitError


def test_distinct_buffers_until_they_die():
    memory = MemoryAccount()
    a = memory.hold(np.zeros(100), "workspace")
    assert memory.hold(a, "gradients") is a  # the first category wins
    memory.hold(a[10:], "gradients")  # a view is its owner
    memory.hold(a.reshape(10, 10).T[2:], "activations")
    b = memory.hold(np.zeros(50, "float32"), "gradients")
    assert memory.now == {
        "parameters": 0,
        "gradients": 200,
        "optimizer": 0,
        "activations": 0,
        "communication": 0,
        "residuals": 0,
        "workspace": 800,
        "total": 1000,
    }
    del a
    assert memory.now["workspace"] == 0 and memory.now["total"] == 200
    assert memory.peak["total"] == 1000
    memory.reset_peak()
    assert memory.peak["total"] == 200
    del b
    assert memory.snapshot()["gradients"] == {"now": 0, "peak": 200}
    assert set(memory.snapshot()) == {*account.CATEGORIES, "total"}


def test_a_view_keeps_its_owner_counted():
    memory = MemoryAccount()
    view = memory.hold(np.zeros(100), "workspace")[:1]
    assert memory.now["total"] == 800
    del view
    assert memory.now["total"] == 0


def test_buffers_that_numpy_does_not_own():
    memory = MemoryAccount()
    raw = bytearray(64)
    array = np.frombuffer(raw, "uint8")
    memory.hold(array[8:], "communication")
    assert memory.now["communication"] == 64


def test_the_peak_of_the_sum_is_not_the_sum_of_peaks():
    memory = MemoryAccount()
    for category in ("gradients", "workspace"):
        memory.hold(np.zeros(100), category)  # dies at once
    assert memory.peak["gradients"] == memory.peak["workspace"] == 800
    assert memory.peak["total"] == 800


def test_unknown_category():
    with pytest.raises(
        ConfigError, match="no category 'weights'; choose one of parameters, gradients"
    ):
        MemoryAccount().hold(np.zeros(1), "weights")


def test_each_thread_has_its_own_account():
    mine = account.current()
    seen = []
    thread = threading.Thread(target=lambda: seen.append(account.current()))
    thread.start()
    thread.join()
    assert seen[0] is not mine and account.current() is mine
    with account.use(MemoryAccount()) as other:
        assert account.current() is other
    assert account.current() is mine


def test_many_threads_one_account():
    memory = MemoryAccount()

    def work():
        for _ in range(300):
            kept = [memory.hold(np.zeros(n), "communication") for n in range(1, 9)]
            memory.hold(kept[0], "workspace")
            assert memory.now["communication"] > 0

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(memory.now.values()) == {0}
    assert 8 * 36 <= memory.peak["communication"] <= 4 * 2 * 8 * 36


class Model:
    """A two-layer GPT of plain ops, big enough that Python's own objects do not matter."""

    def __init__(self, width=128, vocabulary=96, context=64):
        rng = np.random.default_rng(0)

        def draw(*shape):
            return Parameter((rng.normal(size=shape) * 0.1).astype("float32"))

        self.table = draw(vocabulary, width)
        self.positions = draw(context, width)
        self.layers = [
            [
                draw(width),
                draw(width),
                draw(width, 3 * width),
                draw(3 * width),
                draw(width, width),
                draw(width),
                draw(width),
                draw(width),
                draw(width, 4 * width),
                draw(4 * width),
                draw(4 * width, width),
                draw(width),
            ]
            for _ in range(2)
        ]
        self.parameters = [self.table, self.positions, *(p for layer in self.layers for p in layer)]

    def loss(self, ids):
        x = ops.embedding(self.table, ids) + ops.embedding(self.positions, np.arange(ids.shape[1]))
        for g1, b1, w_qkv, b_qkv, w_out, b_out, g2, b2, w_up, b_up, w_down, b_down in self.layers:
            h = ops.causal_attention_packed(
                ops.linear(ops.layer_norm(x, g1, b1), w_qkv, b_qkv), heads=4
            )
            x = x + ops.linear(h, w_out, b_out)
            h = ops.gelu(ops.linear(ops.layer_norm(x, g2, b2), w_up, b_up))
            x = x + ops.linear(h, w_down, b_down)
        return ops.cross_entropy(ops.unembed(x, self.table), ids)


# attention keeps the probabilities of the first, not of the second
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("context", [64, 320])
def test_within_five_percent_of_tracemalloc(context):
    Model(context=8).loss(np.zeros((1, 8), int)).backward()  # whatever is imported on first use
    gc.collect()
    with account.use(MemoryAccount()) as memory:
        tracemalloc.start()
        try:
            start = tracemalloc.get_traced_memory()[0]
            model = Model(context=context)
            for _ in range(2):
                loss = model.loss(np.random.default_rng(1).integers(0, 96, size=(16, context)))
                assert memory.now["total"] == pytest.approx(
                    tracemalloc.get_traced_memory()[0] - start, rel=0.05
                )
                loss.backward()
                del loss
                assert memory.now["total"] == pytest.approx(
                    tracemalloc.get_traced_memory()[0] - start, rel=0.05
                )
            assert memory.peak["total"] == pytest.approx(
                tracemalloc.get_traced_memory()[1] - start, rel=0.05
            )
        finally:
            tracemalloc.stop()
        sizes = sum(p.data.nbytes for p in model.parameters)
        assert memory.now["parameters"] == memory.now["gradients"] == sizes
        assert memory.now["activations"] == memory.now["workspace"] == 0


def test_a_limit_refuses_what_passes_it_and_counts_on():
    memory = MemoryAccount(limit=1000)
    held = memory.hold(np.zeros(100), "parameters")
    for _ in range(2):  # what was refused is not counted, neither when it comes nor when it goes
        with pytest.raises(
            MemoryLimitError,
            match=r"device memory: 208 bytes more for activations do not fit under "
            r"the limit of 1,000: held are 800 \(parameters 800\); raise",
        ):
            memory.hold(np.zeros(26), "activations")
    assert memory.now["total"] == memory.peak["total"] == 800
    memory.hold(np.zeros(25), "activations")  # exactly full, and gone at once
    del held
    assert memory.now["total"] == 0 and memory.peak["total"] == 1000


def test_peaks_of_a_part_of_the_time_are_put_together():
    memory = MemoryAccount()
    memory.hold(np.zeros(100), "workspace")  # dies at once
    before = memory.peak
    memory.reset_peak()
    memory.hold(np.zeros(10), "gradients")
    memory.raise_peak(before)
    assert (memory.peak["workspace"], memory.peak["gradients"], memory.peak["total"]) == (
        800,
        80,
        800,
    )
