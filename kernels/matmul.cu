// c = a b: (m, k) times (k, n), row-major; 2 m n k operations, of any size, summed in float32 for every T.
//
// Each number of a is needed n times and each of b m times. What makes a product slow is fetching them that often; each
// rung keeps them closer, so that one fetch serves more operations. s = sizeof(T).
//
//   rung                          read from global memory        what a fetch serves
//   v1  a thread a result         2 m n k s                      1 operation: a and b from (cached) global memory
//   v2  tiles in shared memory    m n k s (1/32 + 1/32)          32 threads; an operation reads shared memory twice
//   v3  registers: 8 x 8 a thread m n k s (1/128 + 1/128)        16 numbers of shared memory make 64 products
//   v4  vector loads              as v3                          the same by 16 bytes a load, so fewer instructions
//   v5  tensor cores (half types) as v3                          a warp multiplies 16 x 16 by 16 x 8 in an instruction;
//                                                                a and b may lie transposed: ldmatrix turns them
//
// v3 to v5 read exactly this where m and n are multiples of 128, v2 of 32; edges are read less often. Written: m n s.
// Sources: Boehm 2022, "How to optimize a CUDA matmul kernel"; NVIDIA, CUTLASS, "Efficient GEMM in CUDA".
#include "tiles.cuh"

template <typename T> __global__ void matmul_v1(const T* a, const T* b, T* c, int m, int n, int k) {
    const int row = blockIdx.y * blockDim.y + threadIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= m || column >= n) return;
    float sum = 0.0f;
    for (int i = 0; i < k; i++) {                                // a warp: one number of a, 32 neighbours of b
        sum += to_float(a[static_cast<long long>(row) * k + i]) * to_float(b[static_cast<long long>(i) * n + column]);
    }
    c[static_cast<long long>(row) * n + column] = from_float<T>(sum);
}

template <typename T> __global__ void matmul_v2(const T* a, const T* b, T* c, int m, int n, int k) {
    constexpr int side = 32;                                     // of a tile, and of the block of threads
    __shared__ float a_tile[side][side];
    __shared__ float b_tile[side][side];
    const int x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * side + y, column = blockIdx.x * side + x;
    float sum = 0.0f;
    for (int start = 0; start < k; start += side) {
        a_tile[y][x] = row < m && start + x < k ? to_float(a[static_cast<long long>(row) * k + start + x]) : 0;
        b_tile[y][x] = start + y < k && column < n ? to_float(b[static_cast<long long>(start + y) * n + column]) : 0;
        __syncthreads();                                         // before others' numbers are read
        for (int i = 0; i < side; i++) sum += a_tile[y][i] * b_tile[i][x];
        __syncthreads();                                         // before they are overwritten
    }
    if (row < m && column < n) c[static_cast<long long>(row) * n + column] = from_float<T>(sum);
}

// ---------------------------------------------------------------------- a block of 16 x 16 threads, 128 x 128 results

constexpr int side = 128, lanes = 16, each = side / lanes, threads = lanes * lanes;

// results[i][j] += a[i] b[j]: 64 products from 16 numbers.
__device__ __forceinline__ void outer_product(float (&results)[each][each], const float (&a)[each],
                                              const float (&b)[each]) {
#pragma unroll
    for (int i = 0; i < each; i++) {
#pragma unroll
        for (int j = 0; j < each; j++) results[i][j] += a[i] * b[j];
    }
}

template <typename T>
__global__ void __launch_bounds__(256) matmul_v3(const T* a, const T* b, T* c, int m, int n, int k) {
    constexpr int depth = 8;
    __shared__ float a_tile[depth][side + 1];                    // transposed; + 1: a warp writes to different banks
    __shared__ float b_tile[depth][side];
    const int thread = threadIdx.x, x = thread % lanes, y = thread / lanes;
    const int top = blockIdx.y * side, left = blockIdx.x * side;
    float results[each][each] = {}, from_a[each], from_b[each];
    for (int start = 0; start < k; start += depth) {
        for (int i = thread; i < side * depth; i += threads) {
            const int row = top + i / depth, column = start + i % depth;
            const bool there = row < m && column < k;
            a_tile[i % depth][i / depth] = there ? to_float(a[static_cast<long long>(row) * k + column]) : 0.0f;
        }
        for (int i = thread; i < side * depth; i += threads) {
            const int row = start + i / side, column = left + i % side;
            const bool there = row < k && column < n;
            b_tile[i / side][i % side] = there ? to_float(b[static_cast<long long>(row) * n + column]) : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int d = 0; d < depth; d++) {
#pragma unroll
            for (int i = 0; i < each; i++) from_a[i] = a_tile[d][y + lanes * i], from_b[i] = b_tile[d][x + lanes * i];
            outer_product(results, from_a, from_b);
        }
        __syncthreads();
    }
    for (int i = 0; i < each; i++) {
        for (int j = 0; j < each; j++) {
            const int row = top + y + lanes * i, column = left + x + lanes * j;
            if (row < m && column < n) c[static_cast<long long>(row) * n + column] = from_float<T>(results[i][j]);
        }
    }
}

// Where a thread's i-th row or column of 8 lies: two runs of 4, so that a run is one load of 16 bytes, and the threads
// beside each other read addresses beside each other.
__device__ __forceinline__ int run_of(int thread, int i) { return i / 4 * (side / 2) + thread * 4 + i % 4; }

__device__ __forceinline__ void load_runs(float (&numbers)[each], const float* line, int thread) {
#pragma unroll
    for (int i = 0; i < each; i += 4) {
        const Pack<float> pack = load_pack(line + run_of(thread, i));
#pragma unroll
        for (int j = 0; j < 4; j++) numbers[i + j] = pack.v[j];
    }
}

template <typename T>
__global__ void __launch_bounds__(256) matmul_v4(const T* a, const T* b, T* c, int m, int n, int k, bool whole) {
    constexpr int depth = 16, size = Pack<T>::size;
    alignas(16) __shared__ float a_tile[depth][side + 4];
    alignas(16) __shared__ float b_tile[depth][side];
    const int thread = threadIdx.x, x = thread % lanes, y = thread / lanes;
    const int top = blockIdx.y * side, left = blockIdx.x * side;
    float results[each][each] = {}, from_a[each], from_b[each];
    for (int start = 0; start < k; start += depth) {
        for (int i = thread; i < side * depth / size; i += threads) {     // whole: rows of a and b are whole packs
            const int row = i / (depth / size), column = i % (depth / size) * size;
            const Pack<T> pack = load_part(a + static_cast<long long>(top + row) * k + start + column,
                                           top + row < m ? k - (start + column) : 0, whole);
#pragma unroll
            for (int j = 0; j < size; j++) a_tile[column + j][row] = to_float(pack.v[j]);
        }
        for (int i = thread; i < side * depth / size; i += threads) {
            const int row = i / (side / size), column = i % (side / size) * size;
            const Pack<T> pack = load_part(b + static_cast<long long>(start + row) * n + left + column,
                                           start + row < k ? n - (left + column) : 0, whole);
#pragma unroll
            for (int j = 0; j < size; j++) b_tile[row][column + j] = to_float(pack.v[j]);
        }
        __syncthreads();
#pragma unroll
        for (int d = 0; d < depth; d++) {
            load_runs(from_a, a_tile[d], y);
            load_runs(from_b, b_tile[d], x);
            outer_product(results, from_a, from_b);
        }
        __syncthreads();
    }
    for (int i = 0; i < each; i++) {
        for (int j = 0; j < each; j++) {
            const int row = top + run_of(y, i), column = left + run_of(x, j);
            if (row < m && column < n) c[static_cast<long long>(row) * n + column] = from_float<T>(results[i][j]);
        }
    }
}

// ------------------------------------------------------------------------------------------------------- tensor cores

// A block of 8 warps has 128 x 128 results, a warp 64 x 32 of them: 4 x 4 fragments of 16 x 8, in registers.
// a_flipped: a is given as (k, m); b_flipped: b is given as (n, k). Tiles hold what lies in memory.
template <typename T, bool a_flipped, bool b_flipped>
__global__ void __launch_bounds__(256) matmul_v5(const T* a, const T* b, T* c, int m, int n, int k, bool whole) {
    constexpr int depth = 32;
    __shared__ Tile<T, a_flipped ? depth : side, a_flipped ? side : depth> a_tile;
    __shared__ Tile<T, b_flipped ? side : depth, b_flipped ? depth : side> b_tile;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int top = blockIdx.y * side, left = blockIdx.x * side, warp_top = warp / 4 * 64, warp_left = warp % 4 * 32;
    float results[4][4][4] = {};
    for (int start = 0; start < k; start += depth) {
        if (a_flipped) a_tile.template fill<threads>(a, start, k, top, m, m, whole, thread);
        else a_tile.template fill<threads>(a, top, m, start, k, k, whole, thread);
        if (b_flipped) b_tile.template fill<threads>(b, left, n, start, k, k, whole, thread);
        else b_tile.template fill<threads>(b, start, k, left, n, n, whole, thread);
        __syncthreads();
#pragma unroll
        for (int d = 0; d < depth; d += 16) {
            unsigned from_a[4][4], from_b[4][2];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (a_flipped) a_tile.load_a_flipped(from_a[i], d, warp_top + 16 * i, lane);
                else a_tile.load_a(from_a[i], warp_top + 16 * i, d, lane);
            }
#pragma unroll
            for (int j = 0; j < 4; j += 2) {
                if (b_flipped) b_tile.load_b_flipped(from_b + j, warp_left + 8 * j, d, lane);
                else b_tile.load_b(from_b + j, d, warp_left + 8 * j, lane);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    mma_16x8x16<T>(results[i][j], from_a[i], from_b[j]);
                }
            }
        }
        __syncthreads();
    }
    store_results(c, results, top + warp_top, left + warp_left, m, n, lane);
}
