// Tiles: pieces of a matrix in shared memory, filled from global memory, read as fragments for tensor cores.
#pragma once
#include "ptx.cuh"

// A pack of which `count` elements exist; zeros beyond. `whole`: the address of a whole pack is a multiple of 16.
template <typename T> __device__ __forceinline__ Pack<T> load_part(const T* address, int count, bool whole) {
    if (whole && count >= Pack<T>::size) return load_pack(address);
    Pack<T> pack;
#pragma unroll
    for (int i = 0; i < Pack<T>::size; i++) pack.v[i] = i < count ? address[i] : from_float<T>(0.0f);
    return pack;
}
template <typename T>
__device__ __forceinline__ void store_part(T* address, const Pack<T>& pack, int count, bool whole) {
    if (whole && count >= Pack<T>::size) return store_pack(address, pack);
#pragma unroll
    for (int i = 0; i < Pack<T>::size; i++) {
        if (i < count) address[i] = pack.v[i];
    }
}

// A pair of numbers as from one register of a fragment; `whole`: both or none lie in the row, at a multiple of 4 bytes.
template <typename T>
__device__ __forceinline__ void store_pair(T* address, float left, float right, int count, bool whole) {
    if (whole) {
        if (count > 0) *reinterpret_cast<unsigned*>(address) = pack_pair<T>(left, right);
        return;
    }
    if (count > 0) address[0] = from_float<T>(left);
    if (count > 1) address[1] = from_float<T>(right);
}

// A tile of half numbers: its rows lie 16 bytes further apart than they are long, so that the 8 rows of a matrix that
// ldmatrix reads lie in 8 different groups of banks (whatever power of two `columns` is).
template <typename T, int rows_, int columns_> struct alignas(16) Tile {
    static constexpr int rows = rows_, columns = columns_, apart = columns_ + Pack<T>::size;
    T v[rows_ * apart];

    // Filled from (row, column) on of a matrix (height, width) whose rows lie `step` apart, with zeros where it ends,
    // by all `threads` threads of the block. A barrier has to stand before the tile is read.
    template <int threads>
    __device__ __forceinline__ void fill(const T* matrix, int row, int height, int column, int width, long long step,
                                         bool whole, int thread) {
        constexpr int packs = columns / Pack<T>::size;      // a row
#pragma unroll
        for (int i = thread; i < rows * packs; i += threads) {
            const int r = i / packs, c = i % packs * Pack<T>::size;
            const int count = row + r < height ? width - (column + c) : 0;
            store_pack(v + r * apart + c, load_part(matrix + (row + r) * step + column + c, count, whole));
        }
    }

    // The same, but whole packs arrive later, and the thread goes on: the loads do not wait for each other. Before the
    // tile is read stand cp_async_commit, cp_async_wait and a barrier.
    template <int threads>
    __device__ __forceinline__ void fill_async(const T* matrix, int row, int height, int column, int width,
                                               long long step, bool whole, int thread) {
        constexpr int size = Pack<T>::size, packs = columns / size, at_once = threads / packs;     // rows
        static_assert(threads % packs == 0 && rows % at_once == 0, "a thread has one column of packs");
        if (!whole) return fill<threads>(matrix, row, height, column, width, step, false, thread);
        const int first = thread / packs, c = thread % packs * size;
        const T* from = matrix + (row + first) * step + column + c;
        T* to = v + first * apart + c;
#pragma unroll
        for (int r = 0; r < rows; r += at_once) {               // a row is of whole packs
            if (row + first + r < height && column + c < width) cp_async_16(to + r * apart, from + r * step);
            else store_pack(to + r * apart, Pack<T>{});
        }
    }

    // The 16 x 16 at (row, column), as an A of mma.
    __device__ __forceinline__ void load_a(unsigned (&a)[4], int row, int column, int lane) const {
        ldmatrix<4, false>(a, v + (row + lane % 16) * apart + column + lane / 16 * 8);
    }
    // The same where the tile holds the transposed matrix: the A is what stands at (row, column) of it, flipped.
    __device__ __forceinline__ void load_a_flipped(unsigned (&a)[4], int row, int column, int lane) const {
        ldmatrix<4, true>(a, v + (row + lane / 16 * 8 + lane % 8) * apart + column + lane / 8 % 2 * 8);
    }
    // The 16 x 16 at (row, column), as two B of mma: the left 8 columns, and the right.
    __device__ __forceinline__ void load_b(unsigned (*b)[2], int row, int column, int lane) const {
        ldmatrix<4, true>(reinterpret_cast<unsigned (&)[4]>(b[0]),
                          v + (row + lane % 16) * apart + column + lane / 16 * 8);
    }
    // The same where the tile holds the transposed matrix: rows of the tile are columns of B.
    __device__ __forceinline__ void load_b_flipped(unsigned (*b)[2], int row, int column, int lane) const {
        ldmatrix<4, false>(reinterpret_cast<unsigned (&)[4]>(b[0]),
                           v + (row + lane / 16 * 8 + lane % 8) * apart + column + lane / 8 % 2 * 8);
    }
};

// Two neighbouring 16 x 8 results, rounded to T, as the 16 x 16 A of a next product: each lane holds what it needs.
template <typename T>
__device__ __forceinline__ void as_a(unsigned (&a)[4], const float (&left)[4], const float (&right)[4]) {
    a[0] = pack_pair<T>(left[0], left[1]), a[1] = pack_pair<T>(left[2], left[3]);
    a[2] = pack_pair<T>(right[0], right[1]), a[3] = pack_pair<T>(right[2], right[3]);
}

// The 64 x 32 results of a warp, 4 x 4 fragments, rounded to T, at (top, left) of a matrix (m, n).
template <typename T>
__device__ __forceinline__ void store_results(T* matrix, const float (&results)[4][4][4], int top, int left, int m, int n,
                                              int lane) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
#pragma unroll
            for (int r = 0; r < 4; r++) {                        // where results[i][j][r] stands: ptx.cuh
                const int row = top + 16 * i + lane / 4 + r / 2 * 8, column = left + 8 * j + lane % 4 * 2 + r % 2;
                if (row >= m || column >= n) continue;
                matrix[static_cast<long long>(row) * n + column] = from_float<T>(results[i][j][r]);
            }
        }
    }
}
