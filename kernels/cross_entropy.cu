// loss = log(sum(exp(x))) - x[target] for each row x of logits (rows, columns), and dx = (softmax(x) - one-hot) scale.
//
// Forward and backward together: the gradient needs what the loss has just computed, and the logits are the largest
// array of a language model's step (tokens times vocabulary). B = rows columns sizeof(T); apart they take 1 B to read
// for the loss, 2 B to read and write for the gradient; about 6 operations an element.
//
//   v1  a thread a row               logits read 3 times, a sector for each number
//   v2  a block a row                maximum and sum in one pass ("online"), a second for dx: 2 B read, 1 B written
//   v3  a block a row, which it      1 B read, 1 B written: the least there is. 16 bytes a load. A row must fit shared
//       keeps in shared memory       memory: columns sizeof(T) up to 227 KB less 256 bytes (sm_80: 163 KB)
//
// dx may be the logits' own memory, or null: then the loss alone. factor, one number that lies on the GPU already (the
// gradient of the loss), multiplies scale; it may be null. A target outside the row makes loss and dx NaN.
// Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".
#include "common.cuh"

// Every thread brings a part and gets the whole row's; block of full warps; tops, totals: 32 floats each.
__device__ __forceinline__ void join_block(float& top, float& total, float* tops, float* totals) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
#pragma unroll
    for (int bits = 16; bits > 0; bits /= 2) {
        const float other_top = __shfl_xor_sync(all_lanes, top, bits);
        softmax_join(top, total, other_top, __shfl_xor_sync(all_lanes, total, bits));
    }
    if (lane == 0) tops[warp] = top, totals[warp] = total;
    __syncthreads();
    top = tops[0], total = totals[0];
    for (int other = 1; other < warps; other++) softmax_join(top, total, tops[other], totals[other]);
}

// log(total) + (top - target's), in this order: large logits of a run that diverges do not swallow log(total).
__device__ __forceinline__ float loss_of(float top, float total, float at_target) {
    return __logf(total) + (top - at_target);
}
__device__ __forceinline__ bool inside(long long target, int columns) { return target >= 0 && target < columns; }

template <typename T>
__global__ void cross_entropy_v1(const T* logits, const long long* targets, float* losses, T* dx, int rows, int columns,
                                 float scale, const float* factor) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const long long start = static_cast<long long>(row) * columns, target = targets[row];
    float top = minus_infinity, total = 0.0f;
    for (int i = 0; i < columns; i++) top = fmaxf(top, to_float(logits[start + i]));
    for (int i = 0; i < columns; i++) total += __expf(to_float(logits[start + i]) - top);
    if (!inside(target, columns)) total = not_a_number;
    losses[row] = loss_of(top, total, inside(target, columns) ? to_float(logits[start + target]) : 0.0f);
    if (!dx) return;
    if (factor) scale *= *factor;
    for (int i = 0; i < columns; i++) {
        const float p = __expf(to_float(logits[start + i]) - top) / total;
        dx[start + i] = from_float<T>((p - (i == target ? 1.0f : 0.0f)) * scale);
    }
}

template <typename T>
__global__ void cross_entropy_v2(const T* logits, const long long* targets, float* losses, T* dx, int rows, int columns,
                                 float scale, const float* factor) {
    __shared__ float tops[32];
    __shared__ float totals[32];
    const long long start = static_cast<long long>(blockIdx.x) * columns, target = targets[blockIdx.x];
    float top = minus_infinity, total = 0.0f;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) softmax_join(top, total, to_float(logits[start + i]), 1.0f);
    join_block(top, total, tops, totals);
    if (!inside(target, columns)) total = not_a_number;
    if (threadIdx.x == 0) {
        losses[blockIdx.x] = loss_of(top, total, inside(target, columns) ? to_float(logits[start + target]) : 0.0f);
    }
    if (!dx) return;
    if (factor) scale *= *factor;
    __syncthreads();                                       // dx may be logits: the target's is read first
    const float inverse = 1.0f / total;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        const float p = __expf(to_float(logits[start + i]) - top) * inverse;
        dx[start + i] = from_float<T>((p - (i == target ? 1.0f : 0.0f)) * scale);
    }
}

template <typename T>
__global__ void cross_entropy_v3(const T* logits, const long long* targets, float* losses, T* dx, int rows, int columns,
                                 float scale, const float* factor) {
    __shared__ float tops[32];
    __shared__ float totals[32];
    extern __shared__ uint4 row_packs[];                   // columns of T
    T* kept = reinterpret_cast<T*>(row_packs);
    constexpr int size = Pack<T>::size;
    const long long start = static_cast<long long>(blockIdx.x) * columns, target = targets[blockIdx.x];
    float top = minus_infinity, total = 0.0f;
    for (int i = threadIdx.x * size; i < columns; i += blockDim.x * size) {
        const Pack<T> pack = load_pack(logits + start + i);
        store_pack(kept + i, pack);
        float pack_top = minus_infinity, pack_total = 0.0f;
#pragma unroll
        for (int k = 0; k < size; k++) pack_top = fmaxf(pack_top, to_float(pack.v[k]));
        const float offset = softmax_offset(pack_top);
#pragma unroll
        for (int k = 0; k < size; k++) pack_total += __expf(to_float(pack.v[k]) - offset);
        softmax_join(top, total, pack_top, pack_total);
    }
    join_block(top, total, tops, totals);                  // its barrier: kept is written
    if (!inside(target, columns)) total = not_a_number;
    if (threadIdx.x == 0) {
        losses[blockIdx.x] = loss_of(top, total, inside(target, columns) ? to_float(kept[target]) : 0.0f);
    }
    if (!dx) return;
    if (factor) scale *= *factor;
    const float inverse = 1.0f / total;
    for (int i = threadIdx.x * size; i < columns; i += blockDim.x * size) {
        Pack<T> pack = load_pack(kept + i);
#pragma unroll
        for (int k = 0; k < size; k++) {
            const float p = __expf(to_float(pack.v[k]) - top) * inverse;
            pack.v[k] = from_float<T>((p - (i + k == target ? 1.0f : 0.0f)) * scale);
        }
        store_pack(dx + start + i, pack);
    }
}
