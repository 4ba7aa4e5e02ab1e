// Layer norm and RMS norm along the rows of x (rows, columns), and their gradients.
//
//   layer norm  y = (x - mean) scale w + b     scale = 1 / sqrt(mean of (x - mean)^2 + eps)
//   RMS norm    y = x scale w                  scale = 1 / sqrt(mean of x^2 + eps); mean, b and db are null pointers
//   gradient    dx = scale (g - average(g) - hat average(g hat)) with g = dy w, hat = (x - mean) scale
//               (RMS norm: without average(g)); dw = sum over rows of dy hat, db = sum over rows of dy
//
// The work is moving bytes: N = rows columns sizeof(T) is read and written forward; x and dy are read and dx is written
// backward, 3 N; about 8 operations an element forward, 14 backward. mean and scale, a float a row, are kept between.
//
//   forward   v1  a thread a row               x read 3 times (RMS: 2); a sector for each number
//             v2  a block a row                full sectors; the sums meet in shared memory
//             v3  a warp a row, 16-byte loads  mean and squares in one pass, joined pair by pair: x read twice, the
//                                              second time from a cache; no barrier
//   backward  v1  a thread a row for dx, a thread a column for dw and db: x and dy read 2 + 1 times; few threads
//             v2  a block a row for dx; for dw and db a block 32 columns of a part of the rows, then a sum over parts
//             v3  one kernel: a block takes every gridDim-th row, a thread the same 16 bytes of each; its numbers, and
//                 its part of dw and db, stay in registers: x and dy are read once; one barrier a row
//
// No atomics: parts are added in an order that the shape alone decides, so the bits are the same in every run.
// Sums are float32 for every T. Sources: Ba et al. 2016; Zhang and Sennrich 2019; Chan, Golub and LeVeque 1983 (join).
#include "common.cuh"

// Of `count` numbers: their mean, and the sum of the squares of what they differ from it.
struct Moments { float count, mean, squares; };

__device__ __forceinline__ void join(Moments& a, const Moments& b) {
    const float count = a.count + b.count, share = count > 0.0f ? b.count / count : 0.0f, apart = b.mean - a.mean;
    a.mean += apart * share;
    a.squares += b.squares + apart * apart * a.count * share;
    a.count = count;
}
__device__ __forceinline__ float scale_of(float squares, int columns, float eps) {
    return 1.0f / sqrtf(squares / columns + eps);
}

// ---------------------------------------------------------------------------------------------------------- forward

template <typename T> __global__ void norm_v1(const T* x, const T* w, const T* b, T* y, float* mean, float* scale,
                                              int rows, int columns, float eps) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const T* in = x + static_cast<long long>(row) * columns;
    T* out = y + static_cast<long long>(row) * columns;
    float middle = 0.0f, squares = 0.0f;
    if (mean) {
        for (int i = 0; i < columns; i++) middle += to_float(in[i]);
        mean[row] = middle = middle / columns;
    }
    for (int i = 0; i < columns; i++) {
        const float apart = to_float(in[i]) - middle;
        squares += apart * apart;
    }
    const float by = scale[row] = scale_of(squares, columns, eps);
    for (int i = 0; i < columns; i++) {
        out[i] = from_float<T>((to_float(in[i]) - middle) * by * to_float(w[i]) + (b ? to_float(b[i]) : 0.0f));
    }
}

template <typename T> __global__ void norm_v2(const T* x, const T* w, const T* b, T* y, float* mean, float* scale,
                                              int columns, float eps) {
    __shared__ float partial[32];
    const T* in = x + static_cast<long long>(blockIdx.x) * columns;
    T* out = y + static_cast<long long>(blockIdx.x) * columns;
    float middle = 0.0f, squares = 0.0f;
    if (mean) {                                                  // the same for all threads
        for (int i = threadIdx.x; i < columns; i += blockDim.x) middle += to_float(in[i]);
        middle = block_sum(middle, partial) / columns;
    }
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        const float apart = to_float(in[i]) - middle;
        squares += apart * apart;
    }
    const float by = scale_of(block_sum(squares, partial), columns, eps);
    if (threadIdx.x == 0 && mean) mean[blockIdx.x] = middle;
    if (threadIdx.x == 0) scale[blockIdx.x] = by;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        out[i] = from_float<T>((to_float(in[i]) - middle) * by * to_float(w[i]) + (b ? to_float(b[i]) : 0.0f));
    }
}

// The moments of one pack; around 0 where there is no mean to take off.
template <typename T> __device__ __forceinline__ Moments moments_of(const Pack<T>& pack, bool centre) {
    constexpr int n = Pack<T>::size;
    Moments found = {n, 0.0f, 0.0f};
    if (centre) {
#pragma unroll
        for (int k = 0; k < n; k++) found.mean += to_float(pack.v[k]);
        found.mean /= n;
    }
#pragma unroll
    for (int k = 0; k < n; k++) {
        const float apart = to_float(pack.v[k]) - found.mean;
        found.squares += apart * apart;
    }
    return found;
}

template <typename T> __global__ void norm_v3(const T* x, const T* w, const T* b, T* y, float* mean, float* scale,
                                              int rows, int columns, float eps) {
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;                                     // the whole warp
    constexpr int n = Pack<T>::size;                             // columns is a multiple of n, addresses of 16 bytes
    const T* in = x + static_cast<long long>(row) * columns;
    T* out = y + static_cast<long long>(row) * columns;
    Moments all = {0.0f, 0.0f, 0.0f};
    for (int i = lane * n; i < columns; i += 32 * n) join(all, moments_of(load_pack(in + i), mean != nullptr));
#pragma unroll
    for (int bits = 16; bits > 0; bits /= 2) {
        const float count = __shfl_xor_sync(all_lanes, all.count, bits);
        const float middle = __shfl_xor_sync(all_lanes, all.mean, bits);
        join(all, {count, middle, __shfl_xor_sync(all_lanes, all.squares, bits)});
    }
    const float by = scale_of(all.squares, columns, eps), middle = __shfl_sync(all_lanes, all.mean, 0);
    if (lane == 0 && mean) mean[row] = middle;
    if (lane == 0) scale[row] = by;
    for (int i = lane * n; i < columns; i += 32 * n) {
        Pack<T> pack = load_pack(in + i);
        const Pack<T> weights = load_pack(w + i), shifts = b ? load_pack(b + i) : weights;
#pragma unroll
        for (int k = 0; k < n; k++) {
            const float hat = (to_float(pack.v[k]) - middle) * by;
            pack.v[k] = from_float<T>(hat * to_float(weights.v[k]) + (b ? to_float(shifts.v[k]) : 0.0f));
        }
        store_pack(out + i, pack);
    }
}

// --------------------------------------------------------------------------------------------------------- gradient

template <typename T> __global__ void norm_gradient_v1(const T* x, const T* w, const T* dy, const float* mean,
                                                       const float* scale, T* dx, int rows, int columns) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const long long start = static_cast<long long>(row) * columns;
    const float middle = mean ? mean[row] : 0.0f, by = scale[row];
    float level = 0.0f, along = 0.0f;                            // the averages of g and of g hat
    for (int i = 0; i < columns; i++) {
        const float g = to_float(dy[start + i]) * to_float(w[i]);
        level += g;
        along += g * (to_float(x[start + i]) - middle) * by;
    }
    level = mean ? level / columns : 0.0f;
    along /= columns;
    for (int i = 0; i < columns; i++) {
        const float g = to_float(dy[start + i]) * to_float(w[i]), hat = (to_float(x[start + i]) - middle) * by;
        dx[start + i] = from_float<T>(by * (g - level - hat * along));
    }
}

template <typename T> __global__ void norm_weights_v1(const T* x, const T* dy, const float* mean, const float* scale,
                                                      T* dw, T* db, int rows, int columns) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    float w_sum = 0.0f, b_sum = 0.0f;
    for (int row = 0; row < rows; row++) {
        const long long at = static_cast<long long>(row) * columns + column;
        const float d = to_float(dy[at]);
        w_sum += d * (to_float(x[at]) - (mean ? mean[row] : 0.0f)) * scale[row];
        b_sum += d;
    }
    dw[column] = from_float<T>(w_sum);
    if (db) db[column] = from_float<T>(b_sum);
}

template <typename T> __global__ void norm_gradient_v2(const T* x, const T* w, const T* dy, const float* mean,
                                                       const float* scale, T* dx, int columns) {
    __shared__ float partial[32];
    const long long start = static_cast<long long>(blockIdx.x) * columns;
    const float middle = mean ? mean[blockIdx.x] : 0.0f, by = scale[blockIdx.x];
    float level = 0.0f, along = 0.0f;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        const float g = to_float(dy[start + i]) * to_float(w[i]);
        level += g;
        along += g * (to_float(x[start + i]) - middle) * by;
    }
    level = mean ? block_sum(level, partial) / columns : 0.0f;
    along = block_sum(along, partial) / columns;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        const float g = to_float(dy[start + i]) * to_float(w[i]), hat = (to_float(x[start + i]) - middle) * by;
        dx[start + i] = from_float<T>(by * (g - level - hat * along));
    }
}

// Blocks of 32 x 8 threads: 32 columns, and of the rows those that are blockIdx.y modulo gridDim.y. Each block leaves a
// row of sums in w_parts and b_parts (gridDim.y, columns).
template <typename T> __global__ void norm_weights_v2(const T* x, const T* dy, const float* mean, const float* scale,
                                                      float* w_parts, float* b_parts, int rows, int columns) {
    __shared__ float w_sums[8][32];
    __shared__ float b_sums[8][32];
    const int column = blockIdx.x * 32 + threadIdx.x;
    float w_sum = 0.0f, b_sum = 0.0f;
    if (column < columns) {
        for (int row = blockIdx.y + threadIdx.y * gridDim.y; row < rows; row += 8 * gridDim.y) {
            const long long at = static_cast<long long>(row) * columns + column;
            const float d = to_float(dy[at]);
            w_sum += d * (to_float(x[at]) - (mean ? mean[row] : 0.0f)) * scale[row];
            b_sum += d;
        }
    }
    w_sums[threadIdx.y][threadIdx.x] = w_sum;
    b_sums[threadIdx.y][threadIdx.x] = b_sum;
    __syncthreads();
    if (threadIdx.y > 0 || column >= columns) return;
    for (int k = 1; k < 8; k++) {
        w_sum += w_sums[k][threadIdx.x];
        b_sum += b_sums[k][threadIdx.x];
    }
    w_parts[static_cast<long long>(blockIdx.y) * columns + column] = w_sum;
    if (b_parts) b_parts[static_cast<long long>(blockIdx.y) * columns + column] = b_sum;
}

// dx, and a row of w_parts and b_parts (gridDim.x, columns) a block. A thread has one pack of columns: its numbers and its
// sums stay in registers, and the next row's numbers are on their way while this row is computed.
template <typename T> __global__ void norm_gradient_v3(const T* x, const T* w, const T* dy, const float* mean,
                                                       const float* scale, T* dx, float* w_parts, float* b_parts,
                                                       int rows, int columns) {
    __shared__ float levels[2][32];                              // of this row and of the next: one barrier a row
    __shared__ float alongs[2][32];
    constexpr int n = Pack<T>::size;
    const int i = threadIdx.x * n, lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const bool mine = i < columns;
    Pack<T> weights{}, numbers{}, slopes{};
    float w_sum[n] = {}, b_sum[n] = {}, middle = 0.0f, by = 0.0f;
    const auto fetch = [&](int row) {
        if (row >= rows) return;
        middle = mean ? mean[row] : 0.0f, by = scale[row];
        if (!mine) return;
        numbers = load_pack(x + static_cast<long long>(row) * columns + i);
        slopes = load_pack(dy + static_cast<long long>(row) * columns + i);
    };
    if (mine) weights = load_pack(w + i);
    fetch(blockIdx.x);
    for (int row = blockIdx.x, turn = 0; row < rows; row += gridDim.x, turn ^= 1) {
        float hat[n], g[n], level = 0.0f, along = 0.0f;
        const float factor = by;
#pragma unroll
        for (int k = 0; k < n; k++) {
            const float d = to_float(slopes.v[k]);
            hat[k] = (to_float(numbers.v[k]) - middle) * factor;
            g[k] = d * to_float(weights.v[k]);
            level += g[k];
            along += g[k] * hat[k];
            w_sum[k] += d * hat[k];
            b_sum[k] += d;
        }
        fetch(row + gridDim.x);
        level = warp_sum(level), along = warp_sum(along);
        if (lane == 0) levels[turn][warp] = level, alongs[turn][warp] = along;
        __syncthreads();                                         // before others' sums are read
        level = along = 0.0f;
        for (int other = 0; other < warps; other++) level += levels[turn][other], along += alongs[turn][other];
        level = mean ? level / columns : 0.0f;
        along /= columns;
        if (!mine) continue;
        Pack<T> result;
#pragma unroll
        for (int k = 0; k < n; k++) result.v[k] = from_float<T>(factor * (g[k] - level - hat[k] * along));
        store_pack(dx + static_cast<long long>(row) * columns + i, result);
    }
    if (!mine) return;
#pragma unroll
    for (int k = 0; k < n; k += 4) {
        const long long at = static_cast<long long>(blockIdx.x) * columns + i + k;
        store_pack(w_parts + at, Pack<float>{{w_sum[k], w_sum[k + 1], w_sum[k + 2], w_sum[k + 3]}});
        if (b_parts) store_pack(b_parts + at, Pack<float>{{b_sum[k], b_sum[k + 1], b_sum[k + 2], b_sum[k + 3]}});
    }
}

// Blocks of 32 x 32 threads: the sum over the rows of `parts` of 32 columns.
template <typename T> __global__ void norm_sum_parts(const float* parts, T* result, int count, int columns) {
    __shared__ float sums[32][32];
    const int column = blockIdx.x * 32 + threadIdx.x;
    float sum = 0.0f;
    if (column < columns) {
        for (int part = threadIdx.y; part < count; part += 32) {
            sum += parts[static_cast<long long>(part) * columns + column];
        }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || column >= columns) return;
    for (int k = 1; k < 32; k++) sum += sums[k][threadIdx.x];
    result[column] = from_float<T>(sum);
}
