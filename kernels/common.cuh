// What kernels share: element types to float and back, vector loads, sums and maxima over a warp and over a block.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

constexpr unsigned all_lanes = 0xffffffffu;
#define minus_infinity __uint_as_float(0xff800000u)       // NVRTC knows no INFINITY
#define not_a_number __uint_as_float(0x7fffffffu)

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// Rounded once, to nearest even: every kernel computes in float32 and stores by this.
template <typename T> __device__ __forceinline__ T from_float(float x) { return static_cast<T>(x); }
template <> __device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

// 16 bytes of T, one load or store: 4 floats, 8 half numbers. The address must be a multiple of 16.
template <typename T> struct alignas(16) Pack {
    static constexpr int size = 16 / sizeof(T);
    T v[size];
};
template <typename T> __device__ __forceinline__ Pack<T> load_pack(const T* address) {
    Pack<T> pack;
    *reinterpret_cast<uint4*>(pack.v) = *reinterpret_cast<const uint4*>(address);
    return pack;
}
template <typename T> __device__ __forceinline__ void store_pack(T* address, const Pack<T>& pack) {
    *reinterpret_cast<uint4*>(address) = *reinterpret_cast<const uint4*>(pack.v);
}

// Four T, one load or store of 16 or 8 bytes: beside a Pack<float>, each lane of a warp then reads whole sectors of both.
template <typename T> struct alignas(4 * sizeof(T)) Quad { T v[4]; };
template <typename T> __device__ __forceinline__ Quad<T> load_quad(const T* address) {
    Quad<T> quad;
    if constexpr (sizeof(T) == 4) *reinterpret_cast<uint4*>(quad.v) = *reinterpret_cast<const uint4*>(address);
    else *reinterpret_cast<uint2*>(quad.v) = *reinterpret_cast<const uint2*>(address);
    return quad;
}
template <typename T> __device__ __forceinline__ void store_quad(T* address, const Quad<T>& quad) {
    if constexpr (sizeof(T) == 4) *reinterpret_cast<uint4*>(address) = *reinterpret_cast<const uint4*>(quad.v);
    else *reinterpret_cast<uint2*>(address) = *reinterpret_cast<const uint2*>(quad.v);
}

// A softmax in parts: each part has its maximum `top` and its `total` of exp(x - top), and two parts become one.
// The offset taken off before exp is the maximum, but 0 where all is -inf: exp(-inf - -inf) would be NaN.
__device__ __forceinline__ float softmax_offset(float top) { return top == minus_infinity ? 0.0f : top; }
__device__ __forceinline__ void softmax_join(float& top, float& total, float other_top, float other_total) {
    const float both = fmaxf(top, other_top), offset = softmax_offset(both);
    total = total * __expf(top - offset) + other_total * __expf(other_top - offset);
    top = both;
}

// Every lane of a full warp calls these, and every lane gets the result. 5 shuffles.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int bits = 16; bits > 0; bits /= 2) x += __shfl_xor_sync(all_lanes, x, bits);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int bits = 16; bits > 0; bits /= 2) x = fmaxf(x, __shfl_xor_sync(all_lanes, x, bits));
    return x;
}

// Every thread of the block (one dim, a multiple of 32) calls these, and every thread gets the result. 2 barriers;
// `partial` is shared memory of 32 floats, free for the next use when the call returns.
__device__ __forceinline__ float block_sum(float x, float* partial) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    x = warp_sum(x);
    if (lane == 0) partial[warp] = x;
    __syncthreads();
    x = warp_sum(lane < warps ? partial[lane] : 0.0f);
    __syncthreads();
    return x;
}
__device__ __forceinline__ float block_max(float x, float* partial) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    x = warp_max(x);
    if (lane == 0) partial[warp] = x;
    __syncthreads();
    x = warp_max(lane < warps ? partial[lane] : minus_infinity);
    __syncthreads();
    return x;
}
