"""minidist bench kernels: counted here; timed with a clock of our own, and over the stand-in for
CuPy."""

import contextlib
import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import fake_gpu
import ml_dtypes
import numpy as np
import pytest
from kernel_checks import needs_compiler
from rich.console import Console

from minidist.bench.kernels import gpu as gpu_timing
from minidist.bench.kernels import peers
from minidist.bench.kernels.case import COMPILED, EAGER, KIND, Draw, error, once, place, sample
from minidist.bench.kernels.counting import COUNTED, count_all
from minidist.bench.kernels.gpu import readings
from minidist.bench.kernels.plots import draw_kernels
from minidist.bench.kernels.tables import show_kernels
from minidist.bench.kernels.timing import CASES, KernelRow, chosen, judged, measure_all, timed
from minidist.bench.step.ranks import Model
from minidist.cli import main
from minidist.errors import KernelError
from minidist.kernels import on_cpu
from minidist.kernels.compile import sources

CEILINGS = {"copy": 1e12, "matrix": {"bfloat16": 100e12, "float32": 10e12}}


def quiet(line):
    """Progress that nobody sees."""


class Clock:
    """A GPU that is the CPU build, with rubbish in new arrays, and whose clock says what it is
    told."""

    device = "cpu"

    def __init__(self, seconds):
        self.told = seconds
        self.turns = []

    def free(self):
        """Nothing is kept."""

    def poisoned(self):
        return contextlib.nullcontext()

    def timer(self, work):
        name = f"contender {len(self.turns)}"
        self.turns.append([])
        turns = self.turns[-1]

        def one_run():
            turns.append(name)
            return self.told[len(turns) - 1]

        return one_run


# ----------------------------------------------------------------------------------------- counting


@needs_compiler
def test_counts_are_what_the_headers_state(tmp_path, capsys):
    """Rows of softmax: by v1 each lane's number is a sector of its own, v3 reads and writes whole
    ones."""
    file = tmp_path / "counts.json"
    picture = tmp_path / "counts.png"
    assert (
        main(
            [
                "bench",
                "kernels",
                "softmax",
                "residual_dropout",
                "--count",
                "--seed",
                "3",
                "--json",
                str(file),
                "--figure",
                str(picture),
            ]
        )
        == 0
    )
    counts = {(row["kernel"], row["rung"]): row for row in json.loads(file.read_text())["counts"]}
    numbers = COUNTED.batch * COUNTED.heads * COUNTED.context * COUNTED.context
    assert counts["softmax", "v1"]["least"] == 2 * 2 * numbers
    assert counts["softmax", "v1"]["sectors"] == 4 * numbers
    assert counts["softmax", "v3"]["asked"] == counts["softmax", "v3"]["fetched"] == 3 * 2 * numbers
    assert counts["softmax", "v3"]["needed"] == pytest.approx(2 / 3)
    assert counts["residual_dropout", "v2"]["needed"] == 1.0
    assert (
        counts["residual_dropout", "v2"]["requests"] * 8
        == counts["residual_dropout", "v1"]["requests"]
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "asked / fetched" in printed and "66.7%" in printed


@pytest.mark.soak
@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_rung_is_right_and_counted(case):
    counts = count_all([case], seed=5, progress=quiet)
    assert len(counts) == len(case.versions)
    assert all(count.least > 0 and count.sectors > 0 and 0 <= count.error <= 2 for count in counts)


def test_every_kernel_has_a_case_and_every_case_a_peer():
    assert {case.family for case in CASES} == {source.path.stem for source in sources()} - {
        "attention_gradient"
    }
    assert {case.name for case in CASES} == set(peers.PEERS)
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["softmax"], ["softmax", "softmax_gradient"]),
        (["top_k"], ["top_k"]),
        (["ring_add", "layer_norm"], ["layer_norm", "ring_add"]),
    ],
)
def test_names_are_modules_or_kernels(names, expected):
    assert [case.name for case in chosen(names)] == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["sofmax"], "no kernel 'sofmax'; did you mean softmax?"),
        (["--count", "matmull"], "did you mean matmul?"),
        (["--peers", "eagre"], "'eagre' is no peer; choose of eager, compile, or none"),
        (["--rounds", "0"], "whole number of at least 1"),
    ],
)
def test_bad_input_is_one_line(options, expected, capsys):
    assert main(["bench", "kernels", *options]) == 2
    told = capsys.readouterr().err
    assert expected in told and told.count("\n") == 1


def test_without_a_gpu_it_says_what_can_be_had(monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    assert main(["bench", "kernels"]) == 2
    told = capsys.readouterr().err
    assert (
        "needs CuPy, which is not installed" in told
        and "--count counts" in told
        and "device cpu" not in told
    )
    assert told.count("\n") == 1


def test_without_a_compiler_nothing_is_counted(monkeypatch, capsys):
    monkeypatch.setattr(on_cpu, "compiler", lambda: None)
    assert main(["bench", "kernels", "--count"]) == 2
    assert "apt install g++" in capsys.readouterr().err


# -------------------------------------------------------------------------------- right, or no time


def of(name):
    return next(case for case in CASES if case.name == name)


def checked(case, spoil, rows=None):
    """The error of a case's own reference, rounded and then spoiled."""
    inputs = case.draw(COUNTED, Draw(0, KIND))
    rows = sample(case, inputs, np.random.default_rng(0)) if rows is None else rows
    whole = case.want(inputs, np.arange(case.rows(inputs)))
    outputs = [one if one.dtype.kind in "iu" else one.astype(ml_dtypes.bfloat16) for one in whole]
    spoil(outputs)
    return error(case, inputs, rows, case.want(inputs, rows), tuple(outputs))


def test_rounding_once_is_allowed():
    assert 0.2 < checked(of("softmax"), lambda outputs: None) < 1
    assert checked(of("pack_signs"), lambda outputs: None) < 1


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("softmax", lambda outputs: outputs[0].__setitem__((0, 0), np.nan)),
        (
            "softmax",
            lambda outputs: (
                outputs[0].reshape(-1).view(np.uint16).__setitem__(slice(77, 78), 0xFFFF)
            ),
        ),
        ("softmax", lambda outputs: outputs[0].__setitem__(-1, outputs[0][0])),
        ("softmax", lambda outputs: outputs.append(outputs[0])),
        (
            "at_least",
            lambda outputs: outputs.__setitem__(slice(None), [one[:-1] for one in outputs]),
        ),
        ("pack_signs", lambda outputs: outputs[0].__setitem__(3, outputs[0][3] ^ 1)),
        ("swiglu_gradient", lambda outputs: outputs.reverse()),
    ],
)
def test_what_is_wrong_is_seen(name, spoil):
    assert checked(of(name), spoil) > 2


def test_a_number_that_nobody_wrote_is_seen_in_rows_that_are_not_looked_at():
    def spoil(outputs):
        outputs[0][7].view(np.uint16)[5] = 0xFFFF

    assert checked(of("softmax"), spoil, rows=np.array([0, 1])) == float("inf")


def test_the_first_and_last_rows_are_looked_at():
    case = replace(of("softmax"), sampled=5)
    inputs = case.draw(COUNTED, Draw(0, KIND))
    rows = sample(case, inputs, np.random.default_rng(1))
    assert (
        len(set(rows)) == 5
        and {rows[0], rows[-1]} == {0, len(inputs["x"]) - 1}
        and (np.diff(rows) > 0).all()
    )


def test_inputs_are_fresh():
    one, other = (of("softmax").draw(COUNTED, Draw(seed, KIND))["x"] for seed in (0, 1))
    assert one.dtype == ml_dtypes.bfloat16 and (one != other).mean() > 0.9


# ------------------------------------------------------------------------------------------- timing


def works(names):
    return lambda case, inputs: (
        {name: lambda: None for name in names},
        ["rotary, lost: never seen"],
    )


@needs_compiler
def test_contenders_take_turns_and_medians_count():
    clock = Clock([9e-6, 1e-6, 2e-6])
    rows, left_out = measure_all(
        [of("rotary")], COUNTED, clock, CEILINGS, works([EAGER]), rounds=3, seed=1, progress=quiet
    )
    assert [row.contender for row in rows] == ["v1", "v2", EAGER] and left_out == [
        "rotary, lost: never seen"
    ]
    assert [len(turns) for turns in clock.turns] == [3, 3, 3]
    heads = COUNTED.heads * COUNTED.context
    half = COUNTED.width // COUNTED.heads // 2
    moved = 2 * 2 * heads * 2 * half + 2 * 4 * COUNTED.context * half  # x in, y out, cos and sin
    for row in rows:
        assert (row.bytes, row.seconds, row.dtype) == (moved, 2e-6, "bfloat16")
        assert row.fraction == pytest.approx(moved / 2e-6 / 1e12) and row.beside_eager == 1.0
    assert rows[-1].error is None and rows[0].error < 1 and not rows[0].verdict


@needs_compiler
def test_a_rung_that_takes_float32_alone_is_measured_so():
    rows, _ = measure_all(
        [of("rms_norm")],
        COUNTED,
        Clock([1e-6]),
        CEILINGS,
        works([EAGER]),
        rounds=1,
        seed=1,
        progress=quiet,
    )
    assert [(row.contender, row.dtype) for row in rows] == [
        ("v1", "float32"),
        ("v2", "bfloat16"),
        ("v3", "bfloat16"),
        (EAGER, "bfloat16"),
    ]
    assert [row.beside_eager for row in rows] == [None, 1.0, 1.0, 1.0]
    assert rows[0].bytes > 1.9 * rows[1].bytes


@needs_compiler
def test_a_wrong_kernel_has_no_time():
    right = of("rotary")

    def build(inputs, version):
        work = right.build(inputs, version)
        return lambda: tuple(-y if version == 2 else y for y in work())

    clock = Clock([1e-6])
    rows, _ = measure_all(
        [replace(right, build=build)],
        COUNTED,
        clock,
        CEILINGS,
        works([EAGER]),
        rounds=1,
        seed=1,
        progress=quiet,
    )
    assert len(clock.turns) == 2 and [row.seconds for row in rows] == [1e-6, None, 1e-6]
    assert rows[1].verdict.startswith("wrong: off by") and rows[1].fraction is None


@needs_compiler
def test_a_rung_that_does_not_run_is_left_out_and_the_others_are_measured():
    right = of("rotary")

    def build(inputs, version):
        if version == 2:
            raise KernelError("rotary.cu:9: no such word (NVRTC)\nand more")
        return right.build(inputs, version)

    broken = replace(right, build=build)
    rows, left_out = measure_all(
        [broken, replace(broken, versions=(2,))],
        COUNTED,
        Clock([1e-6]),
        CEILINGS,
        works([EAGER]),
        rounds=1,
        seed=1,
        progress=quiet,
    )
    assert [row.contender for row in rows] == ["v1", EAGER] and rows[0].beside_eager == 1.0
    assert left_out.count("rotary v2: rotary.cu:9: no such word (NVRTC)") == 2


def test_a_rung_too_slow_for_a_step_is_left_out(monkeypatch):
    slow = replace(of("top_k"), versions=(1,), left_out={1: "it reads all"})
    rows, left_out = measure_all(
        [replace(slow, versions=(1, 2), build=lambda i, v: lambda: ())],
        COUNTED,
        Clock([1.0]),
        CEILINGS,
        works([]),
        rounds=1,
        seed=1,
        progress=quiet,
    )
    assert left_out[0] == "top_k v1: it reads all" and [row.contender for row in rows] == ["v2"]
    assert rows[0].seconds is None  # it gave nothing


def row(contender="v3", seconds=1e-3, held="copy", **fields):
    plain = KernelRow("k", "f", contender, "bfloat16", held, 10**9, 5e10, **fields)
    return timed(plain, seconds, CEILINGS)


def test_fractions():
    moves = row(seconds=1.25e-3)
    multiplies = row(seconds=1e-3, held="matrix")
    assert (moves.rate, moves.fraction) == (pytest.approx(8e11), pytest.approx(0.8))
    assert (multiplies.rate, multiplies.fraction) == (pytest.approx(5e13), pytest.approx(0.5))
    assert timed(replace(multiplies, dtype="float32"), 1e-2, CEILINGS).fraction == pytest.approx(
        0.5
    )
    assert row(seconds=None).fraction is None


@pytest.mark.parametrize(
    ("name", "ours", "eager", "expected"),
    [
        ("softmax", 1.1e-3, 1.2e-3, "met"),
        ("softmax", 1.1e-3, None, "met, eager not measured"),
        ("softmax", 1.25e-3, 2e-3, "80% of a copy, not 85%"),
        ("softmax", 1.1e-3, 1.0e-3, "behind eager: 0.91×"),
        ("softmax", 2e-3, 1e-3, "50% of a copy, not 85%; behind eager: 0.50×"),
        ("attention", 2e-3, 1e-3, "met"),
        ("attention", 2.5e-3, 1e-3, "40% of flash attention, not 50%"),
        ("attention", 2e-3, None, "flash attention not measured"),
        ("matmul", 9e-3, 1e-3, ""),
        ("attention_gradient", 9e-3, 1e-3, ""),
    ],
)
def test_verdicts(name, ours, eager, expected):
    case = of(name)
    rows = [row(f"v{version}", 9e-3, case.held) for version in case.versions[:-1]]
    rows.append(row(f"v{case.versions[-1]}", ours, case.held, error=0.5))
    rows += [row(EAGER, eager, case.held)] if eager else []
    judgements = [each.verdict for each in judged(rows, case)]
    assert judgements[len(case.versions) - 1] == expected
    assert not any(judgements[: len(case.versions) - 1] + judgements[len(case.versions) :])


def test_the_table_and_the_figure(tmp_path):
    gpu = {"name": "Some GPU", "driver": "1.2", "cupy": "14", "cuda": 13000, "multiprocessors": 8}
    rows = judged(
        [row("v1", 9e-3), row("v2", 1.1e-3, error=0.5), row(EAGER, 1.2e-3), row(COMPILED, 1e-3)],
        replace(of("rotary"), name="k"),
    )
    rows += [
        replace(each, kernel="matmul")
        for each in (row("v1", 9e-3, "matrix"), row("v5", None, "matrix"))
    ]
    result = {
        "gpu": gpu,
        "ceilings": CEILINGS,
        "rounds": 3,
        "counts": None,
        "left_out": ["PyTorch: gone"],
        "rows": [asdict(each) for each in rows],
    }
    with open(tmp_path / "table", "w") as file:
        show_kernels(result, Console(file=file, width=200))
    lines = (tmp_path / "table").read_text().splitlines()
    assert [
        cell.strip() for cell in next(line for line in lines if "v2" in line).strip("│").split("│")
    ] == ["", "v2", "bfloat16", "1,100.0", "909 GB/s", "90.9%", "", "1.09×", "met"]
    assert (
        "5.6 TFLOP/s" in next(line for line in lines if "matmul" in line)
        and "left out: PyTorch: gone" in lines
    )
    draw_kernels(tmp_path / "kernels.png", result)
    assert (tmp_path / "kernels.png").read_bytes().startswith(b"\x89PNG")


def test_least_bytes_are_each_input_and_output_once():
    x = np.zeros((3, 4), np.float16)
    assert (
        once({"x": x, "several": [x, x], "count": 7}, (x.astype(np.float32), x)) == 3 * 24 + 48 + 24
    )


# ---------------------------------------------------------------------------------------- the peers


def torch_result(torch, tensor):
    """In float64, or integers as the bytes that they are."""
    tensor = tensor.detach()
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    return (
        (tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor)
        .numpy()
        .reshape(-1)
    )


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_peers_compute_the_same(case):
    """On the CPU, eager. Not comparable: another dropout; a y that is no softmax; float32 AdamW
    without clipping."""
    torch = pytest.importorskip("torch", reason="needs PyTorch: the extra `bench`")
    inputs = case.draw(COUNTED, Draw(1, case.kind(case.versions[-1], KIND)))
    want = case.want(inputs, np.arange(case.rows(inputs)))
    given = peers.tensors(torch, place(inputs, "cpu"))
    got = peers.PEERS[case.name](torch, given, lambda function: function)()
    if case.name in ("residual_dropout", "softmax_gradient", "adam"):
        return
    got = got if isinstance(got, (tuple, list)) else (got,)
    if case.name == "cross_entropy":
        want[0] = np.array([want[0].mean()])
    for ours, theirs in zip(want, got, strict=False):
        numbers = torch_result(torch, theirs)
        numbers = (
            numbers.view(ours.dtype)
            if numbers.dtype.kind == "i" and ours.dtype == np.uint32
            else numbers
        )
        np.testing.assert_allclose(
            numbers.astype(np.float64),
            ours.reshape(-1).astype(np.float64),
            rtol=0,
            atol=0.015 * float(abs(ours).max()),
        )


def test_a_peer_that_does_not_run_is_left_out():
    """PyTorch as far as it is asked; its eager form works, its compiler fails when the function is
    first called."""

    def no_compiler(function):
        def fails(*given):
            raise RuntimeError("no triton\nand a long story")

        return fails

    torch = SimpleNamespace(
        compile=no_compiler,
        compiler=SimpleNamespace(reset=lambda: None),
        cuda=SimpleNamespace(empty_cache=lambda: None),
        from_dlpack=lambda array: array,
        bfloat16=ml_dtypes.bfloat16,
    )
    inputs = of("matmul").draw(Model(1, 8, 1, 4, 1, 16), Draw(0, "float32"))
    found, left_out = peers.peers_of(torch, [EAGER, COMPILED], of("matmul"), inputs)
    np.testing.assert_array_equal(found[EAGER](), inputs["a"] @ inputs["b"])
    assert list(found) == [EAGER] and left_out == ["matmul, torch.compile: no triton"]


# ----------------------------------------------------------------------------------------- on a GPU


@pytest.mark.parametrize(
    ("queueing", "reading", "times"),
    [(0.0, 1e-4, 1), (50e-6, 1e-4, 2), (1e-3, 1e-4, 21), (1.0, 1e-6, 200), (1e-3, 0.0, 200)],
)
def test_the_gpu_reads_for_twice_as_long_as_the_host_queues(queueing, reading, times):
    assert readings(queueing, reading) == times


class Pool:
    """CuPy's, as far as poisoned() asks it: what it hands out is noted."""

    def __init__(self):
        self.made = []
        self.freed = 0

    def free_all_blocks(self):
        self.freed += 1

    def malloc(self, nbytes):
        pointer = SimpleNamespace(filled=None)
        pointer.memset_async = lambda value, count: setattr(pointer, "filled", (value, count))
        self.made.append(pointer)
        return pointer


@pytest.fixture
def cuda(monkeypatch):
    """The stand-in that computes at once; every run between two events takes 2 ms."""
    cupy = fake_gpu.install(monkeypatch)
    pool = Pool()
    using = []
    monkeypatch.setattr(cupy.cuda, "get_elapsed_time", lambda start, stop: 2.0, raising=False)
    monkeypatch.setattr(
        type(cupy.cuda.runtime),
        "getDeviceProperties",
        lambda self, device: {"l2CacheSize": 4096},
        raising=False,
    )
    monkeypatch.setattr(
        cupy.cuda,
        "using_allocator",
        lambda made: contextlib.nullcontext(using.append(made)),
        raising=False,
    )
    for name in ("get_default_memory_pool", "get_default_pinned_memory_pool"):
        monkeypatch.setattr(cupy, name, lambda: pool, raising=False)
    return SimpleNamespace(cupy=cupy, pool=pool, using=using)


@needs_compiler
def test_over_the_stand_in_for_cupy(cuda, monkeypatch):
    """Arrays on the device, launches that take them, results brought back and found right."""
    monkeypatch.setattr(gpu_timing, "WARM_UPS", 1)
    tiny = Model(layers=1, width=32, heads=2, context=32, batch=1, vocab=64)
    gpu = gpu_timing.CudaGpu()
    names = ["layer_norm", "cross_entropy", "adam", "quantise_4", "to_experts"]
    cases = [replace(of(name), versions=of(name).versions[-1:]) for name in names]
    rows, _ = measure_all(cases, tiny, gpu, CEILINGS, works([]), rounds=1, seed=1, progress=quiet)
    assert [row.kernel for row in rows] == names
    assert all(row.seconds == 2e-3 and row.error <= 1.5 for row in rows)
    assert cuda.pool.freed == 2 * len(names)  # the GPU's and the pinned


def test_the_cache_is_emptied_before_every_run(cuda):
    gpu = gpu_timing.CudaGpu()
    ran = []
    assert gpu._buffer.nbytes == 4 * 4096
    gpu._buffer = SimpleNamespace(sum=lambda: ran.append("read"))
    timer = gpu.timer(lambda: ran.append("work"))
    ran.clear()
    assert [timer(), timer()] == [2e-3, 2e-3]
    # what the host needs to queue nothing is far below 2 ms
    assert ran == ["read", "read", "work"] * 2


def test_new_arrays_are_filled_with_ones(cuda):
    with gpu_timing.CudaGpu().poisoned():
        cuda.using[0](64)
        cuda.using[0](0)
    assert [pointer.filled for pointer in cuda.pool.made] == [(0xFF, 64), None]


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    file = tmp_path / "kernels.json"
    picture = tmp_path / "kernels.png"
    assert (
        main(
            [
                "bench",
                "kernels",
                "rotary",
                "matmul",
                "--rounds",
                "3",
                "--json",
                str(file),
                "--figure",
                str(picture),
            ]
        )
        == 0
    )
    result = json.loads(file.read_text())
    assert result["ceilings"]["copy"] > 1e10 and all(row["seconds"] for row in result["rows"])
    assert all(0 < row["fraction"] < 1.3 for row in result["rows"])


@pytest.mark.gpu
def test_new_arrays_are_rubbish_on_a_gpu():
    gpu = gpu_timing.CudaGpu()
    with gpu.poisoned():
        assert np.isnan(gpu.xp.empty((1000,), np.float32).get()).all()
