"""Every .cu compiles for every GPU it is meant for; what ptxas says of registers and spills is read
right."""

import re

import pytest

from minidist.errors import KernelError
from minidist.kernels import __main__ as table
from minidist.kernels import compile as gpu
from minidist.kernels.loader import HERE, Source

needs_nvrtc = pytest.mark.skipif(
    not gpu.available(), reason="no NVRTC (pip install -e '.[test-kernels]') and no nvcc"
)
SOURCES = {source.path.stem: source for source in gpu.sources()}


def compiled(source, architecture, kernels):
    """Compile these; all registers are counted, and none has more than a thread can have."""
    usages = gpu.compile_for(source, architecture, kernels)
    assert len(usages) == len(kernels)
    for usage in usages:
        assert 0 < usage.registers <= 255, usage
        assert usage.shared <= 48 * 1024, usage


def test_no_kernel_is_forgotten():
    assert {path.stem for path in HERE.glob("*.cu")} == set(SOURCES)


TURNS = [
    (name, architecture, (place + turn) % len(gpu.architectures(source)) == 0)
    for place, (name, source) in enumerate(SOURCES.items())
    for turn, architecture in enumerate(gpu.architectures(source))
]


@needs_nvrtc
@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        pytest.param(name, architecture, marks=[] if mine else [pytest.mark.soak])
        for name, architecture, mine in TURNS
    ],
)
def test_each_compiles(name, architecture):
    """Each kernel for one architecture, the next source for the next (for all three: soak; no
    kernel asks which)."""
    compiled(
        SOURCES[name],
        architecture,
        gpu.one_of_each(SOURCES[name], gpu.ARCHITECTURES.index(architecture)),
    )


@needs_nvrtc
@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "architecture"), [(name, architecture) for name, architecture, _ in TURNS]
)
def test_every_instance_compiles(name, architecture):
    compiled(SOURCES[name], architecture, SOURCES[name].kernels)


GREEDY = """
template <int n> __global__ void __launch_bounds__(1024) greedy(const float* x, float* y) {
    __shared__ float part[n];
    float kept[n];
    for (int i = 0; i < n; i++) kept[i] = x[threadIdx.x + i * i];
    part[threadIdx.x % n] = kept[0];
    __syncthreads();
    for (int round = 0; round < 3; round++)
        for (int i = 0; i < n; i++) kept[i] = kept[i] * kept[(i + 7) % n] + kept[(i * 5 + round) % n];
    float total = part[n - 1];
    for (int i = 0; i < n; i++) total += kept[i];
    y[threadIdx.x] = total;
}
"""


@needs_nvrtc
def test_spills_and_shared_memory_are_read(tmp_path):
    """64 registers a thread are all that 1024 threads leave: 80 numbers spill, 8 do not."""
    path = tmp_path / "greedy.cu"
    path.write_text(GREEDY)
    few, many = sorted(
        gpu.compile_for(Source(path, ["greedy<8>", "greedy<80>"]), "sm_80"), key=lambda u: u.shared
    )
    assert (few.shared, many.shared) == (32, 320)
    assert few.spill_stores == 0 < many.spill_stores
    assert many.registers <= 64


@needs_nvrtc
def test_a_compile_error_is_one_line(tmp_path):
    path = tmp_path / "wrong.cu"
    path.write_text('#include "common.cuh"\n__global__ void wrong(float* x) {\n    x[0] = y;\n}\n')
    with pytest.raises(
        KernelError, match=r'^wrong\.cu:3: identifier "y" is undefined \(\w+, sm_90\)$'
    ):
        gpu.compile_for(Source(path, ["wrong"]), "sm_90")


def test_without_a_compiler_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(gpu, "_wheels", lambda: None)
    monkeypatch.setattr(gpu.shutil, "which", lambda name: None)
    assert not gpu.available()
    with pytest.raises(KernelError, match="test-kernels"):
        gpu.compile_for(Source("softmax.cu", ["softmax_v1<float>"]), "sm_90")


@needs_nvrtc
def test_the_table(monkeypatch, capsys):
    monkeypatch.setattr(table, "ARCHITECTURES", ("sm_90",))
    assert table.main(["dropout"]) == 0
    lines = capsys.readouterr().out.splitlines()
    ends = [[word.end() for word in re.finditer(r"\S+", line)][-3:] for line in lines[1:]]
    assert all(end == ends[0] for end in ends)  # each number stands under its word
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:]}
    assert set(rows) == set(SOURCES["dropout"].kernels)
    assert all(len(cells) == 3 and all(cell.isdigit() for cell in cells) for cells in rows.values())
