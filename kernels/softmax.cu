// y = exp(x) / sum(exp(x)) along the rows of x (rows, columns), and dx = y (dy - sum(dy y)): the gradient.
//
// The work is moving bytes: a row has to be read once and written once, B = 2 rows columns sizeof(T) forward and
// 3/2 B backward (y and dy in, dx out), for about 5 operations an element, so the best time is B / bandwidth.
//
//   v1  a thread a row              x read 3 times; lanes of a warp read addresses a row apart: a sector for each number
//   v2  a block a row               neighbours read neighbours: full sectors; maximum and sum meet in shared memory
//   v3  a warp a row, 16-byte loads x read twice (the second time from a cache); no barrier: lanes meet by shuffles;
//                                   maximum and sum in one pass ("online"), sum rescaled when the maximum grows
//
// A row of -inf alone gives zeros; a NaN makes its row NaN (fmaxf passes over it, but the sum of exp does not). Sums are float32 for every T.
// Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".
#include "common.cuh"

__device__ __forceinline__ float inverse_of(float total) { return total == 0.0f ? 0.0f : 1.0f / total; }

// ---------------------------------------------------------------------------------------------------------- forward

template <typename T> __global__ void softmax_v1(const T* x, T* y, int rows, int columns) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const T* in = x + static_cast<long long>(row) * columns;
    T* out = y + static_cast<long long>(row) * columns;
    float top = minus_infinity, total = 0.0f;
    for (int i = 0; i < columns; i++) top = fmaxf(top, to_float(in[i]));
    top = softmax_offset(top);
    for (int i = 0; i < columns; i++) total += __expf(to_float(in[i]) - top);
    const float inverse = inverse_of(total);
    for (int i = 0; i < columns; i++) out[i] = from_float<T>(__expf(to_float(in[i]) - top) * inverse);
}

// A tree in shared memory: half of the threads add (or compare) what the other half brought, then a quarter, …
template <typename F> __device__ __forceinline__ float tree(float mine, float* shared, F combine) {
    shared[threadIdx.x] = mine;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {       // blockDim.x is a power of two
        if (threadIdx.x < half) shared[threadIdx.x] = combine(shared[threadIdx.x], shared[threadIdx.x + half]);
        __syncthreads();
    }
    const float result = shared[0];
    __syncthreads();                                             // before anybody writes shared again
    return result;
}

template <typename T> __global__ void softmax_v2(const T* x, T* y, int columns) {
    extern __shared__ float shared[];                            // blockDim.x floats
    const T* in = x + static_cast<long long>(blockIdx.x) * columns;
    T* out = y + static_cast<long long>(blockIdx.x) * columns;
    float top = minus_infinity, total = 0.0f;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) top = fmaxf(top, to_float(in[i]));
    top = softmax_offset(tree(top, shared, [](float a, float b) { return fmaxf(a, b); }));
    for (int i = threadIdx.x; i < columns; i += blockDim.x) total += __expf(to_float(in[i]) - top);
    const float inverse = inverse_of(tree(total, shared, [](float a, float b) { return a + b; }));
    for (int i = threadIdx.x; i < columns; i += blockDim.x) out[i] = from_float<T>(__expf(to_float(in[i]) - top) * inverse);
}

template <typename T> __global__ void softmax_v3(const T* x, T* y, int rows, int columns) {
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;                                     // the whole warp
    constexpr int n = Pack<T>::size;                             // columns is a multiple of n, x and y of 16 bytes
    const T* in = x + static_cast<long long>(row) * columns;
    T* out = y + static_cast<long long>(row) * columns;
    float top = minus_infinity, total = 0.0f;
    for (int i = lane * n; i < columns; i += 32 * n) {
        const Pack<T> pack = load_pack(in + i);
        float pack_top = minus_infinity, pack_total = 0.0f;
#pragma unroll
        for (int k = 0; k < n; k++) pack_top = fmaxf(pack_top, to_float(pack.v[k]));
        const float offset = softmax_offset(pack_top);
#pragma unroll
        for (int k = 0; k < n; k++) pack_total += __expf(to_float(pack.v[k]) - offset);
        softmax_join(top, total, pack_top, pack_total);
    }
#pragma unroll
    for (int bits = 16; bits > 0; bits /= 2) {
        const float other_top = __shfl_xor_sync(all_lanes, top, bits);
        softmax_join(top, total, other_top, __shfl_xor_sync(all_lanes, total, bits));
    }
    const float offset = softmax_offset(top), inverse = inverse_of(total);
    for (int i = lane * n; i < columns; i += 32 * n) {
        Pack<T> pack = load_pack(in + i);
#pragma unroll
        for (int k = 0; k < n; k++) pack.v[k] = from_float<T>(__expf(to_float(pack.v[k]) - offset) * inverse);
        store_pack(out + i, pack);
    }
}

// --------------------------------------------------------------------------------------------------------- gradient

template <typename T> __global__ void softmax_gradient_v1(const T* y, const T* dy, T* dx, int rows, int columns) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const long long start = static_cast<long long>(row) * columns;
    float dot = 0.0f;
    for (int i = 0; i < columns; i++) dot += to_float(y[start + i]) * to_float(dy[start + i]);
    for (int i = 0; i < columns; i++) {
        dx[start + i] = from_float<T>(to_float(y[start + i]) * (to_float(dy[start + i]) - dot));
    }
}

template <typename T> __global__ void softmax_gradient_v2(const T* y, const T* dy, T* dx, int columns) {
    extern __shared__ float shared[];
    const long long start = static_cast<long long>(blockIdx.x) * columns;
    float dot = 0.0f;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) dot += to_float(y[start + i]) * to_float(dy[start + i]);
    dot = tree(dot, shared, [](float a, float b) { return a + b; });
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        dx[start + i] = from_float<T>(to_float(y[start + i]) * (to_float(dy[start + i]) - dot));
    }
}

template <typename T> __global__ void softmax_gradient_v3(const T* y, const T* dy, T* dx, int rows, int columns) {
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    constexpr int n = Pack<T>::size;
    const long long start = static_cast<long long>(row) * columns;
    float dot = 0.0f;
    for (int i = lane * n; i < columns; i += 32 * n) {
        const Pack<T> a = load_pack(y + start + i), b = load_pack(dy + start + i);
#pragma unroll
        for (int k = 0; k < n; k++) dot += to_float(a.v[k]) * to_float(b.v[k]);
    }
    dot = warp_sum(dot);
    for (int i = lane * n; i < columns; i += 32 * n) {
        const Pack<T> a = load_pack(y + start + i), b = load_pack(dy + start + i);
        Pack<T> result;
#pragma unroll
        for (int k = 0; k < n; k++) result.v[k] = from_float<T>(to_float(a.v[k]) * (to_float(b.v[k]) - dot));
        store_pack(dx + start + i, result);
    }
}
