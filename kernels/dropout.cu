// y = residual + dropout(x): which elements fall is a hash of a key and of the element's global position, as in
// minidist.device.backend.random_bits, bit by bit. No mask is kept: backward draws the same numbers again.
//
//   forward    x and residual in, y out       3 B (2 B without residual)      B = rows columns sizeof(T)
//   backward   dy in, dx out                  2 B: the same kernel without residual
//
// About 20 integer operations a number. A mask kept by the forward would add a byte an element twice; dropout and sum
// apart move 5 B and that mask.
//
//   v1  a thread an element
//   v2  a thread 16 bytes; one 64-bit division a pack in the place of one an element
//
// Source: Steele, Lea and Flood 2014 (splitmix64).
#include "common.cuh"

typedef unsigned long long bits64;

// splitmix64(key ^ position)
__device__ __forceinline__ bits64 random_bits(bits64 key, bits64 position) {
    bits64 z = (key ^ position) + 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

// The position of column 0 of a row: its global token times the whole width, and where this part of the width begins.
__device__ __forceinline__ long long row_start(const long long* tokens, long long row, int first_column, int width) {
    return (tokens ? tokens[row] : row) * width + first_column;
}

// Two roundings where a compiler would take one (fma), so that every device gives the same bits.
__device__ __forceinline__ float dropped(float x, float residual, bool kept, float factor) {
    return __fadd_rn(residual, kept ? __fmul_rn(x, factor) : 0.0f * x);      // 0 x: a NaN stays one
}

// residual, tokens and stream may be null. An element is kept where its bits reach `threshold`, and then times `factor`.
// stream: where the key lies, if not in `key`: a captured step (minidist/parallel/hybrid/cuda_graph.py) draws by another one at each launch.
template <typename T>
__global__ void residual_dropout_v1(const T* x, const T* residual, T* y, const long long* tokens, long long n, int columns,
                                    int first_column, int width, const unsigned long long* stream,
                                    unsigned long long key, unsigned long long threshold, float factor) {
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const long long position = row_start(tokens, i / columns, first_column, width) + i % columns;
    const bool kept = random_bits(stream ? stream[0] : key, position) >= threshold;
    y[i] = from_float<T>(dropped(to_float(x[i]), residual ? to_float(residual[i]) : 0.0f, kept, factor));
}

template <typename T>
__global__ void residual_dropout_v2(const T* x, const T* residual, T* y, const long long* tokens, long long n, int columns,
                                    int first_column, int width, const unsigned long long* stream,
                                    unsigned long long key, unsigned long long threshold, float factor) {
    constexpr int size = Pack<T>::size;
    const long long i = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * size;
    if (i >= n) return;
    const long long position = row_start(tokens, i / columns, first_column, width) + i % columns;
    const bits64 mine = stream ? stream[0] : key;
    Pack<T> pack = load_pack(x + i), added{};
    if (residual) added = load_pack(residual + i);
#pragma unroll
    for (int k = 0; k < size; k++) {
        const bool kept = random_bits(mine, position + k) >= threshold;
        pack.v[k] = from_float<T>(dropped(to_float(pack.v[k]), residual ? to_float(added.v[k]) : 0.0f, kept, factor));
    }
    store_pack(y + i, pack);
}
