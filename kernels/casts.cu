// y = x scale, rounded once to a smaller type, and the largest |x| (amax), from which the next scale follows.
//
// The work is moving bytes: x is read, y written, sizeof(T) + sizeof(Y) an element, for 3 operations; amax comes from the
// same read. Rounded to nearest, ties to even; NaN stays NaN. In fp8 what is too large, inf too, becomes the largest
// number (448 in e4m3, 57344 in e5m2) with its sign; in fp16 and bf16 it becomes infinite.
//
//   v1  a thread an element                 an atomic of each thread on one number: they wait for each other
//   v2  the same, amax by warp, then block  an atomic a block
//   v3  16 bytes of x a load                at most 1056 blocks, which walk over x in strides: so many atomics
//
// A maximum does not depend on the order, so atomics keep the bits. As bits of an unsigned, floats without a sign are in
// the order of their values and a NaN comes last: the maximum is NaN if an element is.
// fp8 is a byte here, put together below: CuPy has no dtype for it, and each bit of the rounding is there to read.
// Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning".
#include "ptx.cuh"

// fp8 of 1 sign, E exponent and M mantissa bits. e4m3: no infinity, the last code is NaN. e5m2: as IEEE.
template <int E, int M> __device__ __forceinline__ unsigned char to_fp8(float x) {
    constexpr int bias = (1 << (E - 1)) - 1;
    constexpr unsigned largest = E == 4 ? 0x7e : 0x7b, nan = E == 4 ? 0x7f : 0x7e;
    const unsigned bits = __float_as_uint(x), sign = bits >> 31 << 7, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return sign | nan;
    unsigned code;
    if (size >> 23 <= 127 - bias) {                      // subnormal: x in units of its last bit, 2^(1 - bias - M), …
        const float units = __uint_as_float(size) * (1u << (bias + M - 1));
        code = __float_as_uint(units + 8388608.0f) & 0xff;   // … rounded by adding 2^23, whose last bit is worth 1
    } else {                                             // drop 23 - M bits, rounding by what is added before
        const unsigned odd = size >> (23 - M) & 1;
        code = ((size + ((1u << (22 - M)) - 1) + odd) >> (23 - M)) - ((127 - bias) << M);
    }
    return sign | (code > largest ? largest : code);     // inf is the largest code of all before this
}

template <int E, int M> __device__ __forceinline__ float from_fp8(unsigned char code) {
    constexpr int bias = (1 << (E - 1)) - 1;
    const unsigned sign = static_cast<unsigned>(code >> 7) << 31, size = code & 0x7f;
    if (E == 4 ? size == 0x7f : size > 0x7c) return not_a_number;
    if (E == 5 && size == 0x7c) return __uint_as_float(sign | 0x7f800000u);
    const float value = size >> M ? __uint_as_float((size + ((127 - bias) << M)) << (23 - M))
                                  : static_cast<float>(size) / (1u << (bias + M - 1));
    return __uint_as_float(sign | __float_as_uint(value));
}

// `exponent`: how many of an fp8's bits; 0 for the types that are not fp8.
template <typename Y, int exponent> __device__ __forceinline__ Y rounded(float x) {
    if constexpr (exponent) return to_fp8<exponent, 7 - exponent>(x);
    else return from_float<Y>(x);
}

__device__ __forceinline__ unsigned larger(unsigned a, unsigned b) { return a > b ? a : b; }
__device__ __forceinline__ unsigned size_of(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// The block's largest goes to amax, in one atomic. All threads of the block come here.
__device__ __forceinline__ void bring(unsigned top, unsigned* amax) {
    __shared__ unsigned partial[32];
#pragma unroll
    for (int bits = 16; bits > 0; bits /= 2) top = larger(top, __shfl_xor_sync(all_lanes, top, bits));
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = top;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int warp = 1; warp < blockDim.x / 32; warp++) top = larger(top, partial[warp]);
    atomicMax(amax, top);
}

template <typename T, typename Y, int exponent>
__global__ void cast_v1(const T* x, Y* y, const float* scale, unsigned* amax, long long count) {
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const float number = to_float(x[i]);
    y[i] = rounded<Y, exponent>(scale ? product(number, scale[0]) : number);
    atomicMax(amax, size_of(number));
}

template <typename T, typename Y, int exponent>
__global__ void cast_v2(const T* x, Y* y, const float* scale, unsigned* amax, long long count) {
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const float number = i < count ? to_float(x[i]) : 0.0f;
    if (i < count) y[i] = rounded<Y, exponent>(scale ? product(number, scale[0]) : number);
    bring(size_of(number), amax);
}

template <typename T, typename Y, int exponent>
__global__ void cast_v3(const T* x, Y* y, const float* scale, unsigned* amax, long long count) {
    constexpr int n = Pack<T>::size, nbytes = n * sizeof(Y);     // x and y begin at multiples of 16 bytes
    const long long thread = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const long long threads = static_cast<long long>(gridDim.x) * blockDim.x;
    const float factor = scale ? scale[0] : 1.0f;
    unsigned top = 0;
    for (long long i = thread * n; i + n <= count; i += threads * n) {
        const Pack<T> pack = load_pack(x + i);
        struct alignas(nbytes) { Y v[n]; } few;
#pragma unroll
        for (int k = 0; k < n; k++) {
            const float number = to_float(pack.v[k]);
            few.v[k] = rounded<Y, exponent>(product(number, factor));
            top = larger(top, size_of(number));
        }
        if constexpr (nbytes == 4) *reinterpret_cast<unsigned*>(y + i) = *reinterpret_cast<const unsigned*>(few.v);
        else *reinterpret_cast<uint2*>(y + i) = *reinterpret_cast<const uint2*>(few.v);
    }
    const long long rest = count / n * n + thread;               // fewer than n elements are left over
    if (rest < count) {
        const float number = to_float(x[rest]);
        y[rest] = rounded<Y, exponent>(product(number, factor));
        top = larger(top, size_of(number));
    }
    bring(top, amax);
}

// Back from fp8, exactly, then divided by the scale: exact too where that is a power of two, be Y float or bf16.
template <int exponent, typename Y>
__global__ void restore_fp8(const unsigned char* x, Y* y, const float* scale, long long count) {
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) y[i] = from_float<Y>(quotient(from_fp8<exponent, 7 - exponent>(x[i]), scale ? scale[0] : 1.0f));
}
