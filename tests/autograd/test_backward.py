"""The walk back: order, freeing, hooks, deferred weights, bound gradients, and its errors."""

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.autograd import ops
from minidist.autograd.tape import Node, op, saved
from minidist.autograd.tensor import Parameter, grad_mode, no_grad, tensor
from minidist.errors import GradientError, ShapeError


def weights(*shape, name="w", seed=0):
    return Parameter(np.random.default_rng(seed).normal(size=shape), name=name)


def mlp(x, first, bias, second):
    """Two linears, the second one's result normed; uses `first` twice when its shape allows."""
    h = ops.gelu(ops.linear(x, first, bias))
    if first.shape[0] == first.shape[1]:
        h = ops.linear(h, first)
    return ops.sum(ops.linear(h, second) ** 2)


# ------------------------------------------------------------------------------------------- errors


def test_second_backward_says_what_to_do():
    x = tensor(np.ones(3), requires_grad=True)
    loss = (x * x).sum()
    loss.backward()
    with pytest.raises(GradientError, match="sum and freed.*run the forward again"):
        loss.backward()


def test_second_backward_through_a_shared_part():
    x = tensor(np.ones(3), requires_grad=True)
    shared = x * x
    shared.sum().backward()
    with pytest.raises(GradientError, match="earlier backward ran through mul"):
        (shared + 1.0).sum().backward()


def test_loss_must_be_one_number():
    y = tensor(np.ones((2, 3)), requires_grad=True) * 2.0
    with pytest.raises(GradientError, match=r"shape \(2, 3\).*sum or mean, or pass dy"):
        y.backward()
    with pytest.raises(GradientError, match=r"dy is float32 \(2, 3\), the tensor is float64"):
        y.backward(np.ones((2, 3), "float32"))
    y.backward(np.ones((2, 3)))


def test_nothing_to_differentiate():
    with pytest.raises(GradientError, match="no_grad"):
        tensor(1.0).backward()
    x = tensor(np.ones(3), requires_grad=True)
    with no_grad():
        y = (x * 2.0).sum()
    assert y.node is None and not y.requires_grad
    with pytest.raises(GradientError):
        y.backward()


def test_grad_modes_nest():
    x = tensor(np.ones(3), requires_grad=True)
    with no_grad():
        with grad_mode(True):
            assert (x * 2.0).requires_grad
        assert not (x * 2.0).requires_grad
    assert (x * 2.0).requires_grad


# ------------------------------------------------------------------------------------------- values


def test_a_leaf_is_its_own_gradient():
    x = tensor(np.array(3.0), requires_grad=True)
    x.backward()
    x.backward()
    assert x.grad == 2.0


def test_gradients_add_up_over_backwards():
    w = weights(3)
    for _ in range(3):
        (w * 2.0).sum().backward()
    np.testing.assert_array_equal(w.grad, [6.0, 6.0, 6.0])
    w.zero_grad()
    assert w.grad is None


def test_leaves_of_a_sum_do_not_share_their_gradient():
    a = tensor(np.zeros(3), requires_grad=True)
    b = tensor(np.zeros(3), requires_grad=True)
    dy = np.ones(3)
    (a + b).backward(dy)
    a.grad[0] = 7.0
    assert b.grad[0] == 1.0 and dy[0] == 1.0


@given(
    st.lists(st.sampled_from(["add", "mul", "view", "sum", "mean"]), min_size=1, max_size=6),
    st.integers(0, 99),
)
def test_results_used_many_times(steps, seed):
    """y = f(y, y) again and again: contributions that alias dy must never be added to in place."""
    rng = np.random.default_rng(seed)
    start = rng.uniform(0.5, 1.5, size=(2, 2))

    def run(array):
        x = tensor(array, requires_grad=True)
        y = x
        for step in steps:
            if step == "add":
                y = y + y
            elif step == "mul":
                y = y * y * 0.5 + y
            elif step == "view":
                y = ops.transpose(y) + ops.reshape(y, (2, 2)) + y
            elif step == "sum":
                y = ops.sum(y, dim=0, keepdims=True) + y
            else:
                y = y * 2.0 + ops.mean(y, dim=1, keepdims=True)
            y = y * 0.25
        return x, ops.sum(y)

    x, loss = run(start)
    loss.backward()
    for place in np.ndindex(start.shape):
        h = np.zeros_like(start)
        h[place] = 1e-6
        numeric = (run(start + h)[1].item() - run(start - h)[1].item()) / 2e-6
        assert x.grad[place] == pytest.approx(numeric, rel=1e-6, abs=1e-9)


def test_gradient_functions_nobody_needs_do_not_run():
    ran = []

    @op
    def pair(a, b):
        return a + b, saved()

    for name in ("a", "b"):

        @pair.gradient(name)
        def _(node, dy, name=name):
            ran.append(name)
            assert node.needs("b") and not node.needs("a")
            return dy

    x = tensor(np.ones(2), requires_grad=True)
    pair(np.ones(2), x).backward(np.ones(2))
    assert ran == ["b"]


def test_ten_times_deeper_than_the_recursion_limit():
    x = tensor(np.ones(1), requires_grad=True)
    y = x
    for _ in range(10_000):
        y = -y
    y.backward(np.ones(1))
    assert x.grad[0] == 1.0
    y = x
    for _ in range(10_000):
        y = -y
    del y  # and a graph that is dropped instead


def test_order_is_newest_first():
    order = []
    x = tensor(np.ones(2), requires_grad=True)
    parts = [x * float(i) for i in range(5)]
    for i, part in enumerate(parts):
        part.register_hook(lambda dy, i=i: order.append(i))
    total = parts[3] + parts[0] + parts[4] + parts[1] + parts[2]
    total.sum().backward()
    assert order == [4, 3, 2, 1, 0]


# ------------------------------------------------------------------------------------------ freeing


def nodes(tensor_):
    found = []
    stack = [tensor_.node]
    while stack:
        node = stack.pop()
        found.append(node)
        stack += [edge.source for edge in node.edges if isinstance(edge.source, Node)]
    return found


def test_what_a_node_saved_dies_as_backward_passes():
    x = tensor(np.ones((4, 4)), requires_grad=True)
    alive = []
    y = x
    for i in range(4):
        y = ops.sqrt(y)
        alive.append(weakref.ref(y.data))
        y.register_hook(lambda dy, i=i: seen.append((i, [r() is not None for r in alive])))
    seen = []
    loss = y.sum()
    del y
    gc.collect()
    assert all(r() is not None for r in alive)
    loss.backward()
    assert seen == [
        (3, [True] * 4),
        (2, [True, True, True, False]),
        (1, [True, True, False, False]),
        (0, [True, False, False, False]),
    ]
    assert all(r() is None for r in alive)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (0,), (3, 0), (2, 3)])
@pytest.mark.parametrize(
    "loss", [ops.sum, ops.mean, lambda x: ops.sum(ops.mean(x, dim=0)) if x.ndim else ops.sum(x)]
)
@pytest.mark.filterwarnings("ignore:invalid value|divide by zero")  # the mean of nothing is NaN
def test_a_leafs_gradient_is_an_array_of_its_own(loss, shape):
    """A second backward adds to it, and clipping scales it in place; no other array changes with
    it."""
    for kind in (Parameter, tensor):
        leaf = (
            kind(np.ones(shape))
            if kind is Parameter
            else tensor(np.ones(shape), requires_grad=True)
        )
        loss(leaf).backward()
        once = leaf.grad.copy()
        loss(leaf).backward()
        np.testing.assert_array_equal(leaf.grad, 2 * once)
        leaf.grad *= 0.5
        np.testing.assert_array_equal(leaf.grad, once)
    y = ops.mean(leaf)
    (y + y * 2 + y * y).backward()  # several contributions to the gradient of one number


def test_a_dropped_graph_frees_without_the_collector():
    gc.disable()
    try:
        x = tensor(np.ones((4, 4)), requires_grad=True)
        y = ops.exp(x)
        ref = weakref.ref(y.data)
        loss = y.sum()
        del y, loss
        assert ref() is None
    finally:
        gc.enable()


def test_a_saved_parameter_is_read_again():
    """ZeRO-3 frees weights after the forward and brings them back, elsewhere, before backward."""
    w = weights(3, 3)
    values = w.data.copy()
    x = tensor(np.ones((2, 3)), requires_grad=True)
    loss = ops.sum(ops.linear(x, w))
    old = weakref.ref(w.data)
    w.data = np.empty(0)
    assert old() is None, "the tape must not keep a freed weight alive"
    w.data = values
    loss.backward()
    np.testing.assert_allclose(x.grad, np.ones((2, 3)) @ values.T)


# -------------------------------------------------------------------------------------------- hooks


def test_parameter_hooks_run_once_when_the_gradient_is_final():
    w = weights(3, 3)
    seen = []
    w.hooks.append(lambda p: seen.append(p.grad.copy()))
    x = tensor(np.ones((2, 3)))
    loss = ops.sum(ops.linear(ops.linear(x, w), w)) + ops.sum(w * w)  # three uses
    loss.backward()
    assert len(seen) == 1
    np.testing.assert_array_equal(seen[0], w.grad)
    ops.sum(w).backward()
    assert len(seen) == 2


def test_unused_parameters_get_no_hook_and_no_gradient():
    used = weights(2, name="used")
    unused = weights(2, name="unused")
    seen = []
    for p in (used, unused):
        p.hooks.append(lambda p: seen.append(p.name))
    _ = unused * 2.0
    (used * 2.0).sum().backward()
    assert seen == ["used"] and unused.grad is None


def test_tensor_hooks_see_the_total_and_may_replace_it():
    x = tensor(np.ones(3), requires_grad=True)
    seen = []

    def double(dy):
        seen.append(dy.copy())
        return dy * 2.0

    y = x * 1.0
    remove = y.register_hook(double)
    (y + y * 2.0).sum().backward()
    np.testing.assert_array_equal(seen, [[3.0, 3.0, 3.0]])
    np.testing.assert_array_equal(x.grad, [6.0, 6.0, 6.0])
    y = x * 1.0
    remove = y.register_hook(double)
    remove()
    y.sum().backward()
    assert len(seen) == 1


def test_tensor_hooks_of_a_leaf_see_one_total_a_backward():
    x = tensor(np.ones(2), requires_grad=True)
    seen = []
    x.register_hook(lambda dy: seen.append(dy.copy()))
    for _ in range(2):
        (x * 2.0 + x).sum().backward()
    np.testing.assert_array_equal(seen, [[3.0, 3.0], [3.0, 3.0]])
    np.testing.assert_array_equal(x.grad, [6.0, 6.0])


def test_tensor_hook_without_gradient_is_refused():
    with pytest.raises(GradientError, match="never run"):
        tensor(np.ones(2)).register_hook(print)


# --------------------------------------------------------------------------------- deferred weights


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
def test_deferred_weights_end_in_the_same_bits(n, m, seed):
    def build():
        x = tensor(np.random.default_rng(seed).normal(size=(2, n)), requires_grad=True)
        return x, weights(n, m, seed=seed), weights(m, seed=seed + 1), weights(m, 2, seed=seed + 2)

    whole = build()
    parts = build()
    mlp(*whole).backward()
    later = mlp(*parts).backward(defer_weights=True)
    np.testing.assert_array_equal(parts[0].grad, whole[0].grad)
    assert all(p.grad is None for p in parts[1:])
    fired = []
    parts[1].hooks.append(lambda p: fired.append(p))
    for weight in later:
        weight()
    for a, b in zip(parts[1:], whole[1:], strict=True):
        np.testing.assert_array_equal(a.grad, b.grad)
    assert fired == [parts[1]]


def test_deferred_weights_run_once_and_free_their_node():
    x = tensor(np.ones((2, 3)), requires_grad=True)
    w = weights(3, 3)
    h = ops.exp(x)
    saved_input = weakref.ref(h.data)
    loss = ops.sum(ops.linear(h, w))
    del h
    (weight,) = loss.backward(defer_weights=True)
    assert weight.parameter is w and saved_input() is not None
    with pytest.raises(GradientError, match="earlier backward"):
        loss.backward()
    weight()
    assert saved_input() is None
    with pytest.raises(GradientError, match="gradient of w has been computed already"):
        weight()


# ---------------------------------------------------------------------------------- bound gradients


def test_bound_gradients_are_written_into_their_view():
    buffer = np.full(12, 99.0)
    w = weights(3, 4)
    view = buffer.reshape(3, 4)
    w.bind_gradient(view)
    assert w.grad is None
    x = tensor(np.ones((2, 3)))
    ops.sum(ops.linear(x, w)).backward()
    assert w.grad is view
    np.testing.assert_array_equal(buffer, 2.0)
    ops.sum(ops.linear(x, w)).backward()  # adds
    np.testing.assert_array_equal(buffer, 4.0)
    w.zero_grad()
    assert w.grad is None and buffer[0] == 4.0  # stale, not cleared
    (ops.sum(ops.linear(x, w)) + ops.sum(w)).backward()
    np.testing.assert_array_equal(buffer, 3.0)
    w.bind_gradient(None)
    ops.sum(w).backward()
    assert w.grad is not view and buffer[0] == 3.0


def test_bound_gradients_of_many_uses_and_kinds():
    w = weights(2, 2)
    view = np.empty((2, 2))
    w.bind_gradient(view)
    ids = np.array([0, 1, 1])
    loss = ops.sum(ops.unembed(ops.embedding(w, ids), w))  # tied, as in GPT
    loss.backward()
    bound = view.copy()
    w.bind_gradient(None)
    ops.sum(ops.unembed(ops.embedding(w, ids), w)).backward()
    np.testing.assert_array_equal(bound, w.grad)


def test_binding_a_view_that_does_not_fit():
    with pytest.raises(
        ShapeError, match=r"'w' is float64 \(2, 2\), but the view is float64 \(4,\)"
    ):
        weights(2, 2).bind_gradient(np.empty(4))


def test_grad_can_be_set():
    w = weights(2)
    w.grad = np.ones(2)
    ops.sum(w).backward()
    np.testing.assert_array_equal(w.grad, [2.0, 2.0])
    view = np.empty(2)
    w.bind_gradient(view)
    w.grad = np.ones(2)
    assert w.grad is view and view[0] == 1.0
    w.grad = None
    assert w.grad is None
