// Numbers in few bits, with a scale for each group: 8 or 4 bits (groups of 128), or the sign alone (groups of 1024).
//
//   quantise        code = round(x / scale), scale = largest |x| of the group / 127 (8 bits) or / 7 (4 bits)
//   restore         y = code scale                         off by at most scale / 2, and what T rounds
//   pack_signs      bit = not x < 0, scale = mean |x|      of all scales the one of the smallest squared error
//   restore_signs   y = scale or -scale
//
// The work is moving bytes: x is read and codes are written, or the other way round: sizeof(T) + bits / 8 + 4 / group an
// element, for about 5 operations. Codes are rounded to nearest, ties to even; 4-bit ones lie two a byte, the first in the
// low half; sign i is bit i % 32 of word i / 32. inf or NaN in a group is in its scale: codes restore the group as NaN.
//
//   v1  a thread a group                  the lanes of a warp read far from each other: a sector an element, for codes twice
//   v2  a warp a group (signs: a block)   the largest by shuffles, signs by one vote for 32 of them; a lane takes pairs,
//                                         and the second of a pair finds its sector in a cache
//   v3  four elements a load (quantise)   each sector once, a quarter of the requests, one store for four codes
//
// Source: Dettmers 2016 (1511.04561); Seide et al. 2014, 1-bit SGD; Tang et al. 2021 (2102.02888), 1-bit Adam.
#include "ptx.cuh"

constexpr int group = 128, signs_group = 1024;

__device__ __forceinline__ unsigned larger(unsigned a, unsigned b) { return a > b ? a : b; }
// As unsigned numbers, floats without sign are in the order of their values, and NaN comes last: no maximum loses it.
__device__ __forceinline__ unsigned size_of(float x) { return __float_as_uint(x) & 0x7fffffffu; }

template <int bits> __device__ __forceinline__ float scale_of(unsigned top) {
    return quotient(__uint_as_float(top), bits == 8 ? 127.0f : 7.0f);
}
template <int bits> __device__ __forceinline__ int code_of(float x, float scale) {
    constexpr float largest = bits == 8 ? 127.0f : 7.0f;
    if (size_of(scale) == 0 || size_of(scale) >= 0x7f800000u) return 0;          // 0 scale: 0, or NaN as it should be
    return static_cast<int>(fminf(fmaxf(rintf(quotient(x, scale)), -largest), largest));
}
// As bits, between -0 and a NaN with its sign: a comparison with 0 takes tiny numbers for 0 (ptx.cuh says why).
__device__ __forceinline__ bool below_zero(float x) {
    return __float_as_uint(x) > 0x80000000u && __float_as_uint(x) <= 0xff800000u;
}
__device__ __forceinline__ int both(int low, int high) { return (low & 15) | (high & 15) << 4; }

// Two neighbours' codes; the second is 0 if there is none.
template <int bits> __device__ __forceinline__ void store_two(signed char* codes, long long i, long long count, int low,
                                                              int high) {
    if (bits == 4) codes[i / 2] = static_cast<signed char>(both(low, high));
    else codes[i] = static_cast<signed char>(low);
    if (bits == 8 && i + 1 < count) codes[i + 1] = static_cast<signed char>(high);
}

template <typename T, int bits>
__global__ void quantise_v1(const T* x, signed char* codes, float* scales, long long count) {
    const long long which = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x, first = which * group;
    if (first >= count) return;
    const long long end = first + group < count ? first + group : count;
    unsigned top = 0;
    for (long long i = first; i < end; i++) top = larger(top, size_of(to_float(x[i])));
    const float scale = scale_of<bits>(top);
    scales[which] = scale;
    for (long long i = first; i < end; i += 2)
        store_two<bits>(codes, i, count, code_of<bits>(to_float(x[i]), scale),
                        i + 1 < end ? code_of<bits>(to_float(x[i + 1]), scale) : 0);
}

// The group's scale, known to all lanes.
template <int bits> __device__ __forceinline__ float warp_scale(unsigned top, float* place) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) top = larger(top, __shfl_xor_sync(all_lanes, top, lanes));
    const float scale = scale_of<bits>(top);
    if (threadIdx.x % 32 == 0) *place = scale;
    return scale;
}

template <typename T, int bits>
__global__ void quantise_v2(const T* x, signed char* codes, float* scales, long long count) {
    const long long which = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    if (which * group >= count) return;                          // a whole warp
    const long long first = which * group + threadIdx.x % 32 * 2;
    float own[4];                                                // two pairs, 64 elements apart
    unsigned top = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const long long i = first + k / 2 * 64 + k % 2;
        own[k] = i < count ? to_float(x[i]) : 0.0f;
        top = larger(top, size_of(own[k]));
    }
    const float scale = warp_scale<bits>(top, scales + which);
#pragma unroll
    for (int k = 0; k < 4; k += 2) {
        const long long i = first + k / 2 * 64;
        if (i < count) store_two<bits>(codes, i, count, code_of<bits>(own[k], scale), code_of<bits>(own[k + 1], scale));
    }
}

template <typename T, int bits>
__global__ void quantise_v3(const T* x, signed char* codes, float* scales, long long count) {
    struct alignas(4 * sizeof(T)) Four { T v[4]; } four;         // x and codes begin at multiples of 16 bytes
    const long long which = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    if (which * group >= count) return;                          // a whole warp
    const long long i = which * group + threadIdx.x % 32 * 4;
    const bool whole = i + 4 <= count;
    if (whole && sizeof(T) == 4) *reinterpret_cast<uint4*>(four.v) = *reinterpret_cast<const uint4*>(x + i);
    if (whole && sizeof(T) == 2) *reinterpret_cast<uint2*>(four.v) = *reinterpret_cast<const uint2*>(x + i);
    if (!whole)
        for (int k = 0; k < 4; k++) four.v[k] = i + k < count ? x[i + k] : from_float<T>(0.0f);
    unsigned top = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) top = larger(top, size_of(to_float(four.v[k])));
    const float scale = warp_scale<bits>(top, scales + which);
    int code[4];
#pragma unroll
    for (int k = 0; k < 4; k++) code[k] = code_of<bits>(to_float(four.v[k]), scale);
    if (!whole) {
        if (i < count) store_two<bits>(codes, i, count, code[0], code[1]);
        if (i + 2 < count) store_two<bits>(codes, i + 2, count, code[2], code[3]);
    } else if (bits == 8) {
        *reinterpret_cast<unsigned*>(codes + i) =
            (code[0] & 255) | (code[1] & 255) << 8 | (code[2] & 255) << 16 | static_cast<unsigned>(code[3] & 255) << 24;
    } else {
        *reinterpret_cast<unsigned short*>(codes + i / 2) = both(code[0], code[1]) | both(code[2], code[3]) << 8;
    }
}

// A thread an element: neighbours write neighbours.
template <typename T, int bits>
__global__ void restore(const signed char* codes, const float* scales, T* y, long long count) {
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    int code;
    if (bits == 8) code = codes[i];
    else code = ((codes[i / 2] >> (i % 2 * 4) & 15) ^ 8) - 8;    // 4 bits with their sign
    y[i] = from_float<T>(product(code, scales[i / group]));
}

template <typename T> __global__ void pack_signs_v1(const T* x, unsigned* words, float* scales, long long count) {
    const long long which = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x, first = which * signs_group;
    if (first >= count) return;
    const long long end = first + signs_group < count ? first + signs_group : count;
    float sum = 0.0f;
    for (long long start = first; start < end; start += 32) {
        unsigned word = 0;
        for (long long i = start; i < start + 32 && i < end; i++) {
            sum += fabsf(to_float(x[i]));
            word |= static_cast<unsigned>(!below_zero(to_float(x[i]))) << (i - start);
        }
        words[start / 32] = word;
    }
    scales[which] = sum / (end - first);
}

template <typename T> __global__ void pack_signs_v2(const T* x, unsigned* words, float* scales, long long count) {
    __shared__ float partial[32];
    const long long first = static_cast<long long>(blockIdx.x) * signs_group;
    float sum = 0.0f;
    for (int k = threadIdx.x; k < signs_group; k += blockDim.x) {
        const long long i = first + k;
        const float number = i < count ? to_float(x[i]) : -1.0f;
        if (i < count) sum += fabsf(number);
        const unsigned word = __ballot_sync(all_lanes, !below_zero(number));        // all lanes' signs, one bit each
        if (k % 32 == 0 && i < count) words[i / 32] = word;
    }
    sum = block_sum(sum, partial);
    if (threadIdx.x == 0) scales[blockIdx.x] = sum / (count - first < signs_group ? count - first : signs_group);
}

template <typename T>
__global__ void restore_signs(const unsigned* words, const float* scales, T* y, long long count) {
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const float scale = scales[i / signs_group];
    y[i] = from_float<T>(words[i / 32] >> (i % 32) & 1 ? scale : -scale);
}
