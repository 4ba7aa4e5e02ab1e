"""The checker accepts right collectives and tells what is wrong with wrong ones."""

import inspect
import re
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest
from collective_checker import PAIRS

from minidist.comm.chunks import split
from minidist.comm.collectives import pairwise, ring, tree
from minidist.comm.group import Group
from minidist.errors import ConfigError
from minidist.testing import Example, check_collective, check_example, checker
from minidist.testing.reference import DTYPES, EVERY_DTYPE, OPS, VERBS

COUNT = 20


def ends(group):
    """The next and the previous rank."""
    return {"dst": (group.rank + 1) % group.size, "src": (group.rank - 1) % group.size}


# ----------------------------------------------------------------------------- right collectives


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("verb", "algorithm"), PAIRS)
def test_every_algorithm_of_the_library_is_right(verb, algorithm):
    """Without buffers; tests/comm/test_conformance.py has them over the other transports."""
    method = partial(getattr(Group, verb), algorithm=algorithm)
    unbuffered = ("threads-unbuffered",)
    count = check_collective(
        verb, method, dtypes=EVERY_DTYPE, ops=OPS, transports=unbuffered, examples=COUNT
    )
    assert count >= COUNT


def chunks_of(group, x):
    return [chunk.copy() for chunk in np.array_split(x.reshape(-1), group.size)]


def own_all_reduce(group, x):
    chunks = chunks_of(group, x)
    ring.plain_reduce_scatter(group, chunks)
    ring.plain_all_gather(group, chunks)
    return np.concatenate(chunks).reshape(x.shape)


def own_reduce_scatter(group, x):
    chunks = chunks_of(group, x)
    ring.plain_reduce_scatter(group, chunks)
    return chunks[group.rank]


def own_all_gather(group, x):
    blocks = [x] * group.size
    ring.plain_all_gather(group, blocks)
    return np.concatenate(blocks)


def own_reduce(group, x, root, op="sum"):
    if group.rank != root:
        group.send(x, root)
        return None
    combine = {"sum": np.add, "max": np.maximum}[op]
    total = x.copy() if root == 0 else group.recv(0)
    for src in range(1, group.size):
        total = combine(total, x if src == root else group.recv(src))
    return total


def own_gather(group, x, root):
    if group.rank != root:
        group.send(x, root)
        return None
    return np.concatenate([x if src == root else group.recv(src) for src in range(group.size)])


def own_scatter(group, x, root):
    if group.rank != root:
        return group.recv(root)
    parts = split(x, group.size)
    for dst in range(group.size):
        if dst != root:
            group.send(parts[dst], dst)
    return parts[root]


def own_barrier(group):
    distance = 1
    while distance < group.size:
        ahead = (group.rank + distance) % group.size
        group.exchange(np.empty(0), dst=ahead, src=(group.rank - distance) % group.size)
        distance *= 2


OWN = {
    "broadcast": tree.plain_broadcast,
    "scatter": own_scatter,
    "reduce": own_reduce,
    "gather": own_gather,
    "all_reduce": own_all_reduce,
    "reduce_scatter": own_reduce_scatter,
    "all_gather": own_all_gather,
    "all_to_all": pairwise.plain_all_to_all,
    "barrier": own_barrier,
}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("verb", VERBS)
def test_right_collectives_by_send_and_recv_pass(verb):
    ops = ("sum", "max") if verb == "reduce" else ("sum",)
    assert check_collective(verb, OWN[verb], ops=ops, examples=COUNT) > COUNT / 2


def test_every_dtype_and_layout_is_tried_over_both_transports_also_without_hypothesis():
    seen = set()

    def all_reduce(group, x):
        layout = "other" if x.flags.c_contiguous else "not contiguous"
        layout = layout if x.flags.writeable else "read-only"
        # a message to the next rank has begun, and is over at once only where it has a buffer
        started = group.start_send(x[:0], ends(group)["dst"]) if group.size > 1 else None
        buffered = started is not None and started.done()
        if started is not None:
            group.recv(ends(group)["src"])
            started.wait()
        seen.update([x.dtype.name, layout, buffered])
        return own_all_reduce(group, x)

    check_collective("all_reduce", all_reduce, examples=0)
    assert seen == {*DTYPES, "read-only", "not contiguous", "other", True, False}


def test_the_example_of_the_docstring_is_right():
    def all_reduce(group, x):
        return np.sum(group.all_gather(x[np.newaxis]), axis=0, dtype=x.dtype)

    code = "return np.sum(group.all_gather(x[np.newaxis]), axis=0, dtype=x.dtype)"
    assert code in check_collective.__doc__ and code in inspect.getsource(all_reduce)
    check_collective("all_reduce", all_reduce, examples=COUNT)


def test_ranks_may_add_in_their_own_order_where_that_is_said():
    check_collective("all_reduce", own_value_added_first, same_bits=False, transports=("threads",))


def test_a_function_may_overwrite_its_argument_where_that_is_said():
    def all_reduce(group, x):
        x[...] = own_all_reduce(group, x)
        return x

    check_collective("all_reduce", all_reduce, overwrites=True, examples=COUNT)
    with pytest.raises(AssertionError, match="changed its argument x"):
        check_collective("all_reduce", all_reduce, layouts=("plain",), examples=COUNT)


# ---------------------------------------------------------------------------------- planted bugs

MUTANTS = {}


def mutant(verb, *says, **options):
    """Register a wrong collective, and what its message says."""

    def register(function):
        MUTANTS[function.__name__] = (verb, function, says, options)
        return function

    return register


@mutant("all_reduce", r"on 1 of 2 ranks", r"rank 1: element \[0\] is \d+.0, NumPy has \d+.0")
def wrong_chunk(group, x):
    chunks = chunks_of(group, x)
    ring.plain_reduce_scatter(group, chunks)
    wanted = chunks[0].copy()
    ring.plain_all_gather(group, chunks)
    chunks[0] = wanted  # on all ranks but 0 not finished
    return np.concatenate(chunks).reshape(x.shape)


@mutant("all_reduce", r"elements per rank: \d,", r"element \[\d(, \d)?\] is")
def remainder_forgotten(group, x):
    flat = x.reshape(-1)
    whole = len(flat) // group.size * group.size
    total = flat.copy()
    total[:whole] = own_all_reduce(group, flat[:whole])
    return total.reshape(x.shape)


@mutant("all_reduce", r"wrong on 2 of 2 ranks\n  2 ranks")
def last_rank_missing(group, x):
    return own_all_reduce(group, np.zeros_like(x) if group.rank == group.size - 1 else x)


@mutant(
    "all_reduce",
    r"does not end: ranks wait in vain\n  2 ranks.*threads-unbuffered",
    r"0 waits for 1 at \S*test_checker.py:\d+, 1 waits for 0 at \S*test_checker.py:\d+",
)
def everyone_sends_first(group, x):
    travelling = x
    blocks = {group.rank: x}
    for step in range(1, group.size):
        group.send(travelling, ends(group)["dst"])
        travelling = group.recv(ends(group)["src"])
        blocks[(group.rank - step) % group.size] = travelling
    total = blocks[0].copy()
    for rank in range(1, group.size):
        total = total + blocks[rank]
    return total


@mutant("all_reduce", r"does not end", r"rank \d+ has ended|waits for")
def waits_for_a_message_that_nobody_sends(group, x):
    total = own_all_reduce(group, x)
    if group.size > 2 and group.rank == 2:
        group.recv(0)
    return total


@mutant("all_reduce", r"int64", r"element \[0\] is")
def integers_travel_as_int32(group, x):
    travels = x.astype(np.int32) if x.dtype == np.int64 else x
    return own_all_reduce(group, travels).astype(x.dtype)


@mutant("all_reduce", r", float64, ")
def float64_travels_as_float32(group, x):
    travels = x.astype(np.float32) if x.dtype == np.float64 else x
    return own_all_reduce(group, travels).astype(x.dtype)


@mutant("all_reduce", r"returned dtype float64, expected float32")
def result_is_float64(group, x):
    return np.zeros(x.shape) + own_all_reduce(group, x)


@mutant("all_reduce", r"transposed arrays", r"element \[\d, \d\] is")
def elements_in_the_order_of_memory(group, x):
    return own_all_reduce(group, x.ravel(order="K")).reshape(x.shape)


@mutant("all_reduce", r"raised ValueError", r"strided|transposed")
def bytes_of_a_contiguous_array(group, x):
    if not x.flags.c_contiguous:
        raise ValueError("memoryview: underlying buffer is not C-contiguous")
    return own_all_reduce(group, x)


@mutant("all_reduce", r"raised ValueError", r"read-only")
def writes_into_the_argument(group, x):
    x += 0
    return own_all_reduce(group, x)


@mutant("all_reduce", "changed its argument x", layouts=("plain", "strided"))
def sums_into_the_argument(group, x):
    x[...] = own_all_reduce(group, x)
    return x.copy()


@mutant("all_reduce", "has other bits than rank 0", "rough values")
def own_value_added_first(group, x):
    total = x.copy()
    travelling = x
    for _ in range(1, group.size):
        travelling = group.exchange(travelling, **ends(group))
        total = total + travelling
    return total


@mutant("all_reduce", r"which are ranks \d+, \d+ of the job")
def number_in_the_job_for_number_in_the_group(group, x):
    me = group.world_ranks[group.rank]
    if group.size == 1:
        return x.copy()
    chunks = chunks_of(group, x)
    for step in range(group.size - 1):
        first = (me - step - 1) % group.size
        second = (me - step - 2) % group.size
        arrived = group.exchange(chunks[first], (me + 1) % group.size, (me - 1) % group.size)
        chunks[second] = chunks[second] + arrived
    for step in range(group.size - 1):
        first = (me - step) % group.size
        second = (me - step - 1) % group.size
        chunks[second] = group.exchange(chunks[first], (me + 1) % group.size, (me - 1) % group.size)
    return np.concatenate(chunks).reshape(x.shape)


@mutant("all_reduce", r"in call 2 on the same group|raised|messages", transports=("threads",))
def a_message_is_left_behind(group, x):
    total = own_all_reduce(group, x)
    if x.size and group.size > 1 and group.rank == 0:
        group.send(total.reshape(-1)[:1], 1)
    return total


@mutant("all_reduce", "op mean", ops=("sum", "mean"))
def mean_forgets_to_divide(group, x, op):
    return own_all_reduce(group, x)


@mutant("all_reduce", r"op max, .*", r"element \[", ops=("sum", "max"))
def maximum_begins_at_zero(group, x, op):
    if op == "sum":
        return own_all_reduce(group, x)
    return np.maximum(group.all_reduce(x, op), np.zeros((), x.dtype))


@mutant("broadcast", r"root 1", r"element \[")
def broadcast_from_rank_0(group, x, root):
    full = tree.plain_broadcast(group, x, root)
    return full if root == 0 or group.rank == root else np.zeros_like(full)


@mutant("reduce", r"root 1", r"rank 1: returned None, expected an array")
def root_ignored(group, x, root):
    return own_reduce(group, x, 0)


@mutant("scatter", r"returned shape \(\d, 2\), expected \(\d, 2\)|element")
def parts_reversed(group, x, root):
    backwards = None
    if x is not None:
        backwards = np.concatenate(split(x, group.size)[::-1])
    return own_scatter(group, backwards, root)


@mutant("gather", r"rank \d: element \[")
def order_ignored(group, x, root):
    if group.rank != root:
        group.send(x, root)
        return None
    return np.concatenate([x, *(group.recv(r) for r in range(group.size) if r != root)])


@mutant("all_gather", r"rows of 2 by rank: ", r"shape|element|raised")
def blocks_of_one_length(group, x):
    blocks = [np.zeros_like(x) for _ in range(group.size)]
    blocks[group.rank] = x
    for step in range(group.size - 1):
        out = blocks[(group.rank - step - 1) % group.size]
        arrived = group.exchange(blocks[(group.rank - step) % group.size], **ends(group))
        most = min(len(out), len(arrived))
        out[:most] = arrived[:most]
    return np.concatenate(blocks)


@mutant("reduce_scatter", r"element \[0\] is|returned shape")
def neighbours_chunk(group, x):
    chunks = chunks_of(group, x)
    ring.plain_reduce_scatter(group, chunks)
    return chunks[(group.rank + 1) % group.size]


@mutant("all_to_all", r"part \d: (element|returned shape)")
def parts_not_transposed(group, parts):
    return pairwise.plain_all_to_all(group, parts)[::-1]


@mutant("all_to_all", r"returned None, expected a list of \d arrays")
def parts_forgotten(group, parts):
    pairwise.plain_all_to_all(group, parts)


@mutant("barrier", r"rank \d calls last", r"left the barrier before rank \d had called it")
def barrier_of_neighbours(group):
    if group.size > 1:
        group.exchange(np.empty(0), **ends(group))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_is_found_and_told(name, monkeypatch):
    monkeypatch.setattr(checker, "SHRINKING", 1.0)
    verb, function, says, options = MUTANTS[name]
    started = time.monotonic()
    with pytest.raises(AssertionError) as caught:
        check_collective(verb, function, **options)
    told = str(caught.value)
    for text in (*says, rf"only this: check_example\(Example\('{verb}', .*\), {name}\)"):
        assert re.search(text, told), told
    assert time.monotonic() - started < 60


def test_the_line_of_a_message_runs_its_example_again():
    with pytest.raises(AssertionError) as caught:
        check_collective("all_reduce", last_rank_missing)
    line = str(caught.value).splitlines()[-1].removeprefix("only this: ")
    with pytest.raises(AssertionError) as again:
        eval(line, {**globals(), **locals()})
    assert str(again.value) == str(caught.value)


def test_another_seed_draws_other_examples_and_the_same_seed_the_same():
    def drawn(seed):
        seen = []

        def all_reduce(group, x):
            if group.rank == 0:
                seen.append((group.size, x.dtype.name, x.shape))
            return own_all_reduce(group, x)

        check_collective("all_reduce", all_reduce, examples=5, seed=seed)
        return seen

    assert drawn(0) == drawn(0) != drawn(1)


def test_a_rank_that_hangs_outside_of_messages_is_told_once():
    hung = []

    def all_reduce(group, x):
        if group.size == 3 and group.rank == 1:
            hung.append(group.rank)
            time.sleep(3.0)
        return own_all_reduce(group, x)

    with pytest.raises(AssertionError, match="does not end within the limit") as caught:
        check_collective("all_reduce", all_reduce, limit=2.0)
    assert re.search(r"rank 1 waits for no rank, at \S*test_checker.py:\d+", str(caught.value))
    assert len(hung) == 1


# ----------------------------------------------------------------------------------- wrong calls


@pytest.mark.parametrize(
    ("verb", "options", "says"),
    [
        ("allreduce", {}, "no collective 'allreduce'; choose one of broadcast, .*all_reduce"),
        ("all_reduce", {"sizes": (0,)}, "sizes has 0; expected counts of ranks"),
        ("all_reduce", {"sizes": ()}, r"sizes=\(\); expected a tuple of choices"),
        ("all_reduce", {"dtypes": "float32"}, "dtypes='float32'; expected a tuple"),
        ("all_reduce", {"dtypes": ("float31",)}, "'float31' is no dtype of NumPy or ml_dtypes"),
        ("all_reduce", {"dtypes": ("U5",)}, "'U5' is no dtype .* for numbers; for example float32"),
        ("all_reduce", {"dtypes": ("int8",), "ops": ("mean",)}, "no op of .*mean.* is defined"),
        ("all_reduce", {"limit": -1}, "limit"),
        ("all_reduce", {"examples": True}, "examples=True; expected a count"),
        ("all_reduce", {"ops": ("avg",)}, "ops has 'avg'; choose among sum, mean"),
        ("all_reduce", {"transports": ("tcp",)}, "transports has 'tcp'; choose among threads"),
        ("all_reduce", {"layouts": ("odd",)}, "layouts has 'odd'; choose among plain"),
        ("all_reduce", {"examples": -1}, "examples=-1; expected a count"),
        ("all_reduce", {"ops": ("max",)}, "own_all_reduce takes no argument `op`, so op max"),
        ("broadcast", {}, "own_all_reduce takes no argument `root`"),
    ],
)
def test_a_wrong_call_gets_one_clear_line(verb, options, says):
    with pytest.raises(ConfigError, match=says) as caught:
        check_collective(verb, own_all_reduce, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("example", "says"),
    [
        (Example("sum", 2, (1, 1)), "no collective 'sum'"),
        (Example("all_reduce", 0, ()), "size=0; expected a count of ranks"),
        (Example("all_reduce", 3, (4, 4)), r"lengths=\(4, 4\); expected a tuple of 3 lengths"),
        (Example("all_reduce", 3, 4), "lengths=4; expected a tuple of 3 lengths"),
        (Example("all_to_all", 2, (1, 1)), "expected a tuple of 2 tuples of 2 lengths"),
        (Example("reduce", 2, (1, 1), root=2), "root=2; expected a rank below 2"),
        (Example("reduce", 2, (1, 1), dtype="float31"), "'float31' is no dtype"),
        (Example("reduce", 2, (1, 1), layout="odd"), "layout='odd'; choose one of plain"),
        (Example("reduce", 2, (1, 1), world_ranks=(1, 1)), "expected 2 ranks, or"),
    ],
)
def test_an_example_that_cannot_be_gets_one_clear_line(example, says):
    with pytest.raises(ConfigError, match=says) as caught:
        check_example(example, Group.reduce)
    assert "\n" not in str(caught.value)


def test_the_mean_is_checked_with_the_dtypes_that_have_one():
    seen = set()

    def mean(group, x, op):
        seen.add((op, x.dtype.kind in "biu"))
        return group.all_reduce(x, op)

    check_collective("all_reduce", mean, ops=("mean",), examples=COUNT)
    assert seen == {("mean", False)}


def test_a_function_is_expected():
    with pytest.raises(ConfigError, match="check of all_reduce: 5 is no function"):
        check_collective("all_reduce", 5)


def test_without_hypothesis_one_line_names_the_remedy_and_one_example_can_be_checked():
    code = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "from minidist.testing import Example, check_example\n"
        "from minidist.testing.every_dtype import every_dtype\n"
        "from minidist.comm.group import Group\n"
        "check_example(Example('all_reduce', 2, (3, 3)), Group.all_reduce)\n"
        "for example in every_dtype('scatter', dtypes=('int8',)):\n"
        "    check_example(example, Group.scatter)\n"
        "try:\n"
        "    from minidist.testing import check_collective\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == (
        "minidist.testing.check_collective needs Hypothesis, which is not installed: "
        'pip install "minidist[test]"\n'
    )
