// The gradient of an embedding: row t of the result is the sum of dy[i] over all i whose token is t; a row that no token
// names is zero. `add_rows` of a mixture of experts is the same sum.
//
// The work is moving bytes: dy is read once, the result written once, B = (tokens + count) width sizeof(T), for one
// addition an element of dy. The order of the additions is fixed and they are float32, rounded once at the end: atomics
// would spare the sorting, and their sums differ from run to run, and round at each step in a half type.
//
//   v1  a block a row of the result        each block reads all tokens to find its own: count x tokens ids, from caches
//   v2  tokens sorted before: runs         a block walks its run, whose bounds are known; a frequent token is a long walk
//   v3  16-byte loads, 8 warps a run       warp w adds every eighth row of the run; then warp 0 adds the 8 sums in order
//
// With v3 the walk of a token that stands everywhere is tokens / 8 rows.
// Sorting is the launcher's: some 8-byte numbers a token, little beside rows of hundreds of bytes.
// Source: Blelloch 1990, "Prefix sums and their applications" (sums of segments).
#include "common.cuh"

template <typename T>
__global__ void embedding_gradient_v1(const long long* ids, const T* dy, T* result, int tokens, int width) {
    const int row = blockIdx.x;
    for (int column = threadIdx.x; column < width; column += blockDim.x) {
        float sum = 0.0f;
        for (int i = 0; i < tokens; i++)
            if (ids[i] == row) sum += to_float(dy[static_cast<long long>(i) * width + column]);
        result[static_cast<long long>(row) * width + column] = from_float<T>(sum);
    }
}

// order: the tokens' positions, sorted by token; row t's run is order[starts[t]] … order[starts[t + 1] - 1].
template <typename T>
__global__ void embedding_gradient_v2(const int* order, const int* starts, const T* dy, T* result, int width) {
    const int row = blockIdx.x, first = starts[row], end = starts[row + 1];
    for (int column = threadIdx.x; column < width; column += blockDim.x) {
        float sum = 0.0f;
        for (int i = first; i < end; i++) sum += to_float(dy[static_cast<long long>(order[i]) * width + column]);
        result[static_cast<long long>(row) * width + column] = from_float<T>(sum);
    }
}

// A block of 8 warps: 32 packs of columns of one row; blocks along y cover a wide row.
template <typename T>
__global__ void __launch_bounds__(256)
embedding_gradient_v3(const int* order, const int* starts, const T* dy, T* result, int width) {
    constexpr int n = Pack<T>::size, warps = 8;
    __shared__ float sums[warps][n][32];                         // lanes beside each other: no bank twice
    const int row = blockIdx.x, first = starts[row], end = starts[row + 1];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = (blockIdx.y * 32 + lane) * n;
    float sum[n] = {};
    if (column < width) {
#pragma unroll 4
        for (int i = first + warp; i < end; i += warps) {
            const Pack<T> pack = load_pack(dy + static_cast<long long>(order[i]) * width + column);
#pragma unroll
            for (int k = 0; k < n; k++) sum[k] += to_float(pack.v[k]);
        }
    }
    const int used = end - first < warps ? end - first : warps;  // the same for all threads of the block
    if (used > 1) {
#pragma unroll
        for (int k = 0; k < n; k++) sums[warp][k][lane] = sum[k];
        __syncthreads();
    }
    if (warp > 0 || column >= width) return;
    for (int other = 1; other < used; other++)
#pragma unroll
        for (int k = 0; k < n; k++) sum[k] += sums[other][k][lane];
    Pack<T> pack;
#pragma unroll
    for (int k = 0; k < n; k++) pack.v[k] = from_float<T>(sum[k]);
    store_pack(result + static_cast<long long>(row) * width + column, pack);
}
