// Tokens to their experts and back: rows copied into the order of experts, and the results, weighted, added up a token.
//
//   gather     y[i] = weights[i] x[tokens[i]]                        R rows read, R written        2 B
//   combine    y[t] = sum of weights[s] results[s], s in slots[t]    R rows read, R / k written    B + B / k
//   row_dots   y[i] = sum of a[i] b[tokens[i]] over columns          2 R rows read                 2 B
//
// with B = R width sizeof(T) bytes, R rows, k of each token where none is dropped, 1 or 2 operations an element; tables of
// 4 bytes a row are small beside rows. gather is also the gradient of combine for results (weighted), combine that of
// gather (weights null), row_dots that for the weights.
// All is written once by one thread, sums in the order of slots: no atomics, the same bits each time. In steps (weigh,
// round, then add) the way back would move 2 B more.
//
//   v1  a block a row, a thread an element
//   v2  16-byte loads and stores              a quarter (float) or an eighth of the requests
// Source: Shazeer et al. 2017, "Outrageously large neural networks"; Gale et al. 2022, "MegaBlocks".
#include "common.cuh"

template <typename T>
__global__ void gather_v1(const T* x, const int* tokens, const float* weights, T* y, int width) {
    const long long from = static_cast<long long>(tokens[blockIdx.x]) * width;
    const long long to = static_cast<long long>(blockIdx.x) * width;
    const float weight = weights ? weights[blockIdx.x] : 1.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) y[to + i] = from_float<T>(weight * to_float(x[from + i]));
}

template <typename T>
__global__ void gather_v2(const T* x, const int* tokens, const float* weights, T* y, int width) {
    constexpr int n = Pack<T>::size;
    const long long from = static_cast<long long>(tokens[blockIdx.x]) * width;
    const long long to = static_cast<long long>(blockIdx.x) * width;
    const float weight = weights ? weights[blockIdx.x] : 1.0f;
    for (int i = threadIdx.x * n; i < width; i += blockDim.x * n) {
        Pack<T> pack = load_pack(x + from + i);
#pragma unroll
        for (int k = 0; k < n; k++) pack.v[k] = from_float<T>(weight * to_float(pack.v[k]));
        store_pack(y + to + i, pack);
    }
}

// slots: `ways` a token, in rising order; -1: dropped.
template <typename T>
__global__ void combine_v1(const T* results, const float* weights, const int* slots, T* y, int ways, int width) {
    const int* own = slots + static_cast<long long>(blockIdx.x) * ways;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float sum = 0.0f;
        for (int way = 0; way < ways; way++) {
            const int slot = own[way];
            if (slot < 0) continue;
            sum += (weights ? weights[slot] : 1.0f) * to_float(results[static_cast<long long>(slot) * width + i]);
        }
        y[static_cast<long long>(blockIdx.x) * width + i] = from_float<T>(sum);
    }
}

template <typename T>
__global__ void combine_v2(const T* results, const float* weights, const int* slots, T* y, int ways, int width) {
    constexpr int n = Pack<T>::size;
    const int* own = slots + static_cast<long long>(blockIdx.x) * ways;
    for (int i = threadIdx.x * n; i < width; i += blockDim.x * n) {
        float sum[n] = {};
        for (int way = 0; way < ways; way++) {
            const int slot = own[way];
            if (slot < 0) continue;
            const float weight = weights ? weights[slot] : 1.0f;
            const Pack<T> pack = load_pack(results + static_cast<long long>(slot) * width + i);
#pragma unroll
            for (int k = 0; k < n; k++) sum[k] += weight * to_float(pack.v[k]);
        }
        Pack<T> rounded;
#pragma unroll
        for (int k = 0; k < n; k++) rounded.v[k] = from_float<T>(sum[k]);
        store_pack(y + static_cast<long long>(blockIdx.x) * width + i, rounded);
    }
}

template <typename T> __global__ void row_dots(const T* a, const T* b, const int* tokens, float* y, int width) {
    __shared__ float partial[32];
    const long long row = static_cast<long long>(blockIdx.x) * width;
    const long long other = static_cast<long long>(tokens[blockIdx.x]) * width;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) sum += to_float(a[row + i]) * to_float(b[other + i]);
    sum = block_sum(sum, partial);
    if (threadIdx.x == 0) y[blockIdx.x] = sum;
}
