"""float16 to float32 and back on the host, at a speed that does not depend on the numbers.

NumPy's casts set the processor's underflow flag for each number. One million float32 to float16
take 2.6 ms, but 68 ms if the results are subnormal (below 6.1e-5), as gradients in float16 often
are; here 2 ms in both cases. The way back takes 0.8 ms instead of 1.7 or 8.7 ms. Both give NumPy's
bits; overflow becomes infinite without a warning.
Source:  the bit tricks of F. Giesen, "float_to_half_full_rtne", and of M. Dukhan's FP16 library.
"""

import numpy as np

_BLOCK = 32768  # numbers at a time: their scratch stays in the second-level cache
# of every float16; 256 KiB
_VALUES = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def _bits(number: int) -> np.ndarray:
    """Return a uint32 without dims, which ufuncs take without conversion."""
    return np.asarray(number, np.uint32)


_ONE = _bits(1)
_THIRTEEN = _bits(13)
_SIXTEEN = _bits(16)
_MAGNITUDE = _bits(0x7FFFFFFF)
_SIGN_16 = _bits(0x8000)
_NAN_16 = _bits(0x7E00)
_EXPONENT_2X = _bits(0xFF000000)
_SMALLEST_2X = _bits(0x71000000)
_BIAS = _bits(0x07800000)
_EXPONENT_16 = _bits(0x7C00)
_DIGITS = _bits(0xFFF)
_UP = np.float32(2.0**112)
_DOWN = np.float32(2.0**-110)


def to_float32(array: np.ndarray) -> np.ndarray:
    """Return float16 of any shape as float32, exactly, by a table. A transposed matrix stays
    transposed in memory."""
    if array.flags.f_contiguous and not array.flags.c_contiguous:
        return to_float32(array.T).T
    return np.take(_VALUES, array.view(np.uint16), mode="clip")


def from_float32(array: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Write contiguous float32 into contiguous float16 `out` of the same size, rounded to nearest,
    ties to even."""
    source = array.reshape(-1).view(np.uint32)
    target = out.reshape(-1).view(np.uint16)
    size = min(_BLOCK, source.size)
    room = [np.empty(size, np.uint32) for _ in range(3)]
    with np.errstate(over="ignore", invalid="ignore"):  # invalid: a signalling NaN
        for start in range(0, source.size, _BLOCK):
            bits = source[start : start + _BLOCK]
            _round_block(
                bits, target[start : start + _BLOCK], *(spare[: bits.size] for spare in room)
            )
    return out


def _round_block(
    bits: np.ndarray, target: np.ndarray, a: np.ndarray, b: np.ndarray, f: np.ndarray
) -> None:
    """Round one block; a, b, f are scratch.

    |x| is scaled so that an overflow in float16 is one in float32. Then a power of two is added, so
    large that the last digit of the sum is the last digit of float16: the addition rounds. Exponent
    and digits are taken from the sum.
    """
    value = f.view(np.float32)
    np.add(bits, bits, out=a)  # without the sign
    np.bitwise_and(bits, _MAGNITUDE, out=f)
    np.multiply(value, _UP, out=value)
    np.multiply(value, _DOWN, out=value)  # 4 |x|, or infinite from 65,536 up
    np.bitwise_and(a, _EXPONENT_2X, out=b)
    np.maximum(b, _SMALLEST_2X, out=b)  # subnormals share the smallest exponent
    np.right_shift(b, _ONE, out=b)
    np.add(b, _BIAS, out=b)
    np.add(value, b.view(np.float32), out=value)
    np.right_shift(f, _THIRTEEN, out=b)
    np.bitwise_and(b, _EXPONENT_16, out=b)
    np.bitwise_and(f, _DIGITS, out=f)
    np.add(b, f, out=b)
    np.copyto(b, _NAN_16, where=a > _EXPONENT_2X)
    np.right_shift(bits, _SIXTEEN, out=a)
    np.bitwise_and(a, _SIGN_16, out=a)
    np.bitwise_or(a, b, out=a)
    target[...] = a
