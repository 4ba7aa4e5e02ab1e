"""8, 4 and 1 bits with scales: bit for bit the reference, what is lost bounded in float64, planted
mistakes caught."""

import ml_dtypes
import numpy as np
import pytest
from kernel_checks import close, needs_compiler, on_each_device, planted, there, wide

from minidist.device.backend import to_host
from minidist.errors import ConfigError, DtypeError, KernelError, ShapeError
from minidist.kernels import on_cpu
from minidist.kernels import quantise as family
from minidist.kernels.quantise import (
    GROUP,
    KINDS,
    LARGEST,
    SIGN_VERSIONS,
    SIGNS_GROUP,
    SOURCE,
    VERSIONS,
    pack_signs,
    pack_signs_reference,
    quantise,
    quantise_reference,
    restore,
    restore_reference,
    restore_signs,
)

COUNTS = [1, 2, 131, 9 * GROUP - 3]


def drawn(count, kind, bits=8):
    """The scale is 1, and every sixteenth lies between two codes; then a group of zeros, one of
    tiny numbers."""
    x = np.random.default_rng(0).normal(size=count)
    x[::16] = np.round(x[::16]) + 0.5
    x[::GROUP] = LARGEST[bits]
    x[GROUP : 2 * GROUP] = 0
    x[2 * GROUP : 3 * GROUP] *= 1e-44
    return x.astype(kind)


def unpacked(codes, count, bits):
    """Codes one a byte."""
    if bits == 8:
        return codes
    halves = (
        np.stack([codes.view(np.uint8) & 15, codes.view(np.uint8) >> 4], axis=1)
        .reshape(-1)
        .astype(np.int8)
    )
    assert not halves[count:].any()
    return np.where(halves > 7, halves - 16, halves)[:count]


@pytest.mark.parametrize("bits", LARGEST)
def test_the_reference_loses_half_a_step(bits):
    x = drawn(700, np.float64, bits)
    x[2 * GROUP : 3 * GROUP] *= 1e38  # a scale that float32 has
    codes, scales = quantise_reference(x, bits)
    lost = np.abs(restore_reference(codes, scales.astype(np.float64)) - x)
    assert (lost <= np.repeat(scales, GROUP)[:700] * (0.5 + 1e-5)).all()
    assert np.abs(codes).max() == LARGEST[bits]


def test_the_mean_is_the_best_scale():
    x = drawn(SIGNS_GROUP, np.float64)
    signs, (scale,) = pack_signs_reference(x)
    lost = [((np.where(signs, s, -s) - x) ** 2).sum() for s in (scale, scale * 1.01, scale * 0.99)]
    assert min(lost) == lost[0]


def check(device, kind, count, bits, version):
    x = drawn(count, kind, bits)
    want, want_scales = quantise_reference(x, bits)
    (placed,) = there(device, x)
    with on_cpu.watch(seed=count):
        codes, scales = quantise(placed, bits=bits, version=version)
        y = restore(codes, scales, count, bits=bits, dtype=kind)
    np.testing.assert_array_equal(to_host(scales), want_scales)
    np.testing.assert_array_equal(unpacked(to_host(codes), count, bits), want)
    np.testing.assert_array_equal(
        wide(y), restore_reference(want, want_scales).astype(kind).astype(np.float64)
    )


@pytest.mark.sampled
@on_each_device
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("bits", LARGEST)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", COUNTS)
def test_bits(version, bits, kind, count, device):
    check(device, kind, count, bits, version)


@on_each_device
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("bits", LARGEST)
def test_every_rung(version, bits, device):
    check(device, "float32", 3 * GROUP + 5, bits, version)


def check_signs(device, kind, count, version):
    x = drawn(count, kind)
    x[-1] = -0.0
    (placed,) = there(device, x)
    signs, want = pack_signs_reference(x.astype(np.float64))
    with on_cpu.watch(seed=count):
        words, scales = pack_signs(placed, version=version)
        y = restore_signs(words, scales, count, dtype=kind)
    bits = np.unpackbits(to_host(words).view(np.uint8), bitorder="little")
    np.testing.assert_array_equal(bits[:count], signs)
    assert not bits[count:].any()
    close(scales, want, 1e-5)
    full = np.repeat(wide(scales), SIGNS_GROUP)[:count]
    close(y, np.where(signs, full, -full), 4e-3 if kind == "bfloat16" else 0.0)


@on_each_device
@pytest.mark.parametrize("version", SIGN_VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 33, SIGNS_GROUP, 2 * SIGNS_GROUP + 65])
def test_signs(version, kind, count, device):
    check_signs(device, kind, count, version)


@on_each_device
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_inf_and_nan_spoil_their_group_alone(version, bad, device):
    x = np.ones(3 * SIGNS_GROUP, np.float32)
    x[SIGNS_GROUP + 5] = bad
    (placed,) = there(device, x)
    for bits in LARGEST:
        y = wide(restore(*quantise(placed, bits=bits, version=version), x.size, bits=bits))
        assert np.isnan(y[SIGNS_GROUP : SIGNS_GROUP + GROUP]).all()
        np.testing.assert_array_equal(np.delete(y, slice(SIGNS_GROUP, SIGNS_GROUP + GROUP)), 1)
    y = wide(restore_signs(*pack_signs(placed, version=min(version, 2)), x.size))
    assert not np.isfinite(y[SIGNS_GROUP : 2 * SIGNS_GROUP]).any()
    np.testing.assert_array_equal(np.delete(y, slice(SIGNS_GROUP, 2 * SIGNS_GROUP)), 1)


@needs_compiler
def test_bytes_moved_and_errors():
    x = np.ones(2 * SIGNS_GROUP, np.float32)
    for version in VERSIONS:
        with on_cpu.watch(count=True) as seen:
            quantise(x, bits=8, version=version)
            pack_signs(x, version=min(version, 2))
        assert [s.loads.bytes for s in seen] == [x.nbytes * (2 if version == 1 else 1), x.nbytes]
        assert [s.stores.bytes for s in seen] == [x.size + x.size // GROUP * 4, x.size // 8 + 8]
        assert (
            seen[0].loads.sectors
            == {1: 2 * x.size, 2: 2 * x.nbytes // 32, 3: x.nbytes // 32}[version]
        )
    for launcher in (lambda x: quantise(x, bits=4), pack_signs):
        assert [part.size for part in launcher(x[:0])] == [0, 0]
        with pytest.raises(DtypeError, match="no kernel for float16"):
            launcher(x.astype(np.float16))
    assert (
        restore(*quantise(x[:0], bits=4), 0, bits=4).size
        == restore_signs(*pack_signs(x[:0]), 0).size
        == 0
    )
    assert (
        restore(*quantise(x[1:], bits=4), 2047, bits=4, dtype="bfloat16").dtype
        == ml_dtypes.bfloat16
    )
    with pytest.raises(KernelError, match="take version 2"):
        quantise(x[1:], bits=8, version=3)
    with pytest.raises(ConfigError, match="choose 8 or 4"):
        quantise(x, bits=2)
    with pytest.raises(ShapeError, match=r"needs \(100,\) and \(2,\)"):
        restore(*quantise(x, bits=4), 200, bits=4)
    with pytest.raises(ShapeError, match=r"needs \(63,\) and \(2,\)"):
        restore_signs(*pack_signs(x), 2000)


MISTAKES = {
    "the halves of a byte change places": (
        "quantise_v2",
        4,
        ("(low & 15) | (high & 15) << 4", "(high & 15) | (low & 15) << 4", 1),
        None,
    ),
    "ties go up": (
        "quantise_v1",
        8,
        ("rintf(quotient(x, scale))", "floorf(quotient(x, scale) + 0.5f)", 1),
        None,
    ),
    "the end is not watched": (
        "quantise_v3",
        8,
        ("whole = i + 4 <= count;", "whole = i < count;", 1),
        "out of bounds: .* x",
    ),
    "four bits without a sign": ("quantise_v1", 4, ("& 15) ^ 8) - 8", "& 15) ^ 8) ^ 8", 1), None),
    "a vote of those who are there": (
        "pack_signs_v2",
        1,
        ("to_float(x[i]) : -1.0f", "to_float(x[i]) : 1.0f", 1),
        None,
    ),
}


@pytest.mark.sampled(every=5)
@needs_compiler
@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes(mistake, tmp_path, monkeypatch):
    """`None`: no rule of CUDA is broken, the result is wrong."""
    kernel, bits, change, says = MISTAKES[mistake]
    kinds = "<float>" if bits == 1 else f"<float, {bits}>"
    kernels = [kernel + kinds, ("restore_signs" if bits == 1 else "restore") + kinds]
    monkeypatch.setattr(family, "SOURCE", planted(tmp_path, SOURCE, kernels, change))
    with pytest.raises(KernelError if says else AssertionError, match=says):
        if bits == 1:
            check_signs("cpu", "float32", 33, 2)
        else:
            check("cpu", "float32", 9 * GROUP - 3, bits, int(kernel[-1]))
