// GELU of a sum x + bias, SwiGLU, and their gradients: elementwise, so all of the time goes into moving bytes.
//
//   bias_gelu            y = g(x + bias)                          x in, y out                       2 B
//   bias_gelu_gradient   dx = dy g'(x + bias), dbias = sum(dx)    x and dy in, dx out               3 B
//   swiglu               y = silu(gate) up                        gate and up in, y out             3 B
//   swiglu_gradient      dgate, dup                               gate, up, dy in, dgate, dup out   5 B
//
// with B = rows columns sizeof(T) bytes; bias and dbias are a row. Between 10 and 25 operations an element. Separate
// kernels for sum, activation and product would move 2 to 3 B more each.
//
//   v1  a thread an element         a warp's loads are 32 neighbours of sizeof(T) bytes
//   v2  a thread 16 bytes           one load in the place of 4 (float) or 8 (half types): fewer instructions in flight
//
// GELU is the tanh form, as in ops: x h with h = (1 + tanh u) / 2 = 1 / (1 + exp(-2u)) and u = sqrt(2 / pi) (x + 0.044715 x³).
// The sum of a bias' gradient has a fixed order: a block sums its rows of 32 columns, sum_rows sums the blocks.
// Source: Hendrycks and Gimpel 2016 (GELU); Shazeer 2020, "GLU variants improve transformer".
#include "common.cuh"

// h = 1 / (1 + exp(-z)) and rest = 1 - h, both right to their last digits where they are small, and nothing overflows.
__device__ __forceinline__ float sigmoid(float z, float& rest) {
    const float e = __expf(-fabsf(z)), large = 1.0f / (1.0f + e), small = e * large;
    rest = z < 0.0f ? large : small;
    return z < 0.0f ? small : large;
}

__device__ __forceinline__ float silu(float x) {
    float rest;
    return x * sigmoid(x, rest);
}

// g(x), and its slope h + 2 x h (1 - h) (c + 3 k x²), where 2u = 2 x (c + k x²).
__device__ __forceinline__ float gelu(float x, float* slope = nullptr) {
    constexpr float c = 0.7978845608028654f, k = c * 0.044715f;
    float rest;
    const float h = sigmoid(2.0f * x * (c + k * x * x), rest), y = x * h;
    // Where h is 1 or 0 nothing is added to it, however large x² is.
    if (slope) *slope = rest == 0.0f || h == 0.0f ? h : h + 2.0f * y * rest * (c + 3.0f * k * x * x);
    return y;
}

// ---------------------------------------------------------------------------------------------------- bias and GELU

// bias may be null.
template <typename T> __global__ void bias_gelu_v1(const T* x, const T* bias, T* y, long long n, int columns) {
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) y[i] = from_float<T>(gelu(to_float(x[i]) + (bias ? to_float(bias[i % columns]) : 0.0f)));
}

// columns is a multiple of a pack.
template <typename T> __global__ void bias_gelu_v2(const T* x, const T* bias, T* y, long long n, int columns) {
    constexpr int size = Pack<T>::size;
    const long long i = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * size;
    if (i >= n) return;
    Pack<T> pack = load_pack(x + i), added{};
    if (bias) added = load_pack(bias + i % columns);
#pragma unroll
    for (int k = 0; k < size; k++) {
        pack.v[k] = from_float<T>(gelu(to_float(pack.v[k]) + (bias ? to_float(added.v[k]) : 0.0f)));
    }
    store_pack(y + i, pack);
}

// A block of (32, 8) threads takes 32 columns and every 8 gridDim.y-th row; partial (gridDim.y, columns) gets its sums.
template <typename T>
__global__ void bias_gelu_gradient_v1(const T* x, const T* bias, const T* dy, T* dx, float* partial, int rows, int columns) {
    __shared__ float sums[8][32];
    const int column = blockIdx.x * 32 + threadIdx.x;
    float sum = 0.0f;
    if (column < columns) {
        const float added = bias ? to_float(bias[column]) : 0.0f;
        for (int row = blockIdx.y * 8 + threadIdx.y; row < rows; row += 8 * gridDim.y) {
            const long long i = static_cast<long long>(row) * columns + column;
            float slope;
            gelu(to_float(x[i]) + added, &slope);
            const float d = to_float(dy[i]) * slope;
            dx[i] = from_float<T>(d);
            sum += d;
        }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && column < columns) {
        for (int k = 1; k < 8; k++) sum += sums[k][threadIdx.x];
        partial[static_cast<long long>(blockIdx.y) * columns + column] = sum;
    }
}

// The same, but 32 packs of columns: 128 columns of float, 256 of the half types, a block.
template <typename T>
__global__ void bias_gelu_gradient_v2(const T* x, const T* bias, const T* dy, T* dx, float* partial, int rows, int columns) {
    constexpr int size = Pack<T>::size;
    __shared__ float sums[8][32][size + 1];                   // + 1: threads of a warp begin in different banks
    const int column = (blockIdx.x * 32 + threadIdx.x) * size;
    float sum[size] = {}, added[size] = {};
    if (column < columns) {
        if (bias) {
            const Pack<T> pack = load_pack(bias + column);
#pragma unroll
            for (int k = 0; k < size; k++) added[k] = to_float(pack.v[k]);
        }
        for (int row = blockIdx.y * 8 + threadIdx.y; row < rows; row += 8 * gridDim.y) {
            const long long i = static_cast<long long>(row) * columns + column;
            const Pack<T> in = load_pack(x + i);
            Pack<T> d = load_pack(dy + i);
#pragma unroll
            for (int k = 0; k < size; k++) {
                float slope;
                gelu(to_float(in.v[k]) + added[k], &slope);
                const float exact = to_float(d.v[k]) * slope;
                d.v[k] = from_float<T>(exact);
                sum[k] += exact;
            }
            store_pack(dx + i, d);
        }
    }
#pragma unroll
    for (int k = 0; k < size; k++) sums[threadIdx.y][threadIdx.x][k] = sum[k];
    __syncthreads();
    if (threadIdx.y == 0 && column < columns) {
#pragma unroll
        for (int k = 0; k < size; k += 4) {
            Pack<float> four{{sum[k], sum[k + 1], sum[k + 2], sum[k + 3]}};
            for (int other = 1; other < 8; other++) {
#pragma unroll
                for (int i = 0; i < 4; i++) four.v[i] += sums[other][threadIdx.x][k + i];
            }
            store_pack(partial + static_cast<long long>(blockIdx.y) * columns + column + k, four);
        }
    }
}

// total[column] = the sum of partial (parts, columns), from the first part to the last.
template <typename T> __global__ void sum_rows(const float* partial, T* total, int parts, int columns) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    float sum = 0.0f;
    for (int part = 0; part < parts; part++) sum += partial[static_cast<long long>(part) * columns + column];
    total[column] = from_float<T>(sum);
}

// ---------------------------------------------------------------------------------------------------------- SwiGLU

template <typename T> __global__ void swiglu_v1(const T* gate, const T* up, T* y, long long n) {
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float x = to_float(gate[i]);
    y[i] = from_float<T>(silu(x) * to_float(up[i]));
}

template <typename T> __global__ void swiglu_v2(const T* gate, const T* up, T* y, long long n) {
    constexpr int size = Pack<T>::size;
    const long long i = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * size;
    if (i >= n) return;
    Pack<T> a = load_pack(gate + i);
    const Pack<T> b = load_pack(up + i);
#pragma unroll
    for (int k = 0; k < size; k++) {
        const float x = to_float(a.v[k]);
        a.v[k] = from_float<T>(silu(x) * to_float(b.v[k]));
    }
    store_pack(y + i, a);
}

// With s = sigmoid(gate): dup = dy gate s, dgate = dy up s (1 + gate (1 - s)).
__device__ __forceinline__ void swiglu_slopes(float gate, float up, float dy, float& dgate, float& dup) {
    float rest;
    const float s = sigmoid(gate, rest), y = gate * s;
    dup = dy * y;
    dgate = dy * up * (s + y * rest);
}

template <typename T>
__global__ void swiglu_gradient_v1(const T* gate, const T* up, const T* dy, T* dgate, T* dup, long long n) {
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float a, b;
    swiglu_slopes(to_float(gate[i]), to_float(up[i]), to_float(dy[i]), a, b);
    dgate[i] = from_float<T>(a);
    dup[i] = from_float<T>(b);
}

template <typename T>
__global__ void swiglu_gradient_v2(const T* gate, const T* up, const T* dy, T* dgate, T* dup, long long n) {
    constexpr int size = Pack<T>::size;
    const long long i = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * size;
    if (i >= n) return;
    Pack<T> a = load_pack(gate + i), b = load_pack(up + i);
    const Pack<T> d = load_pack(dy + i);
#pragma unroll
    for (int k = 0; k < size; k++) {
        float da, db;
        swiglu_slopes(to_float(a.v[k]), to_float(b.v[k]), to_float(d.v[k]), da, db);
        a.v[k] = from_float<T>(da);
        b.v[k] = from_float<T>(db);
    }
    store_pack(dgate + i, a);
    store_pack(dup + i, b);
}
