// What the versions of attention and of its gradient share: which key a query sees, and the products of tiles.
#pragma once
#include "tiles.cuh"

// Of the mask of blocks: queries and keys of 64 by 64 see each other or do not, for all heads alike.
constexpr int mask_side = 64;

// Sizes and rules of a call, as the kernels hand them on.
struct Attention {
    int heads, kv_heads, queries, keys, width;      // width: of a head
    bool causal;
    const unsigned char* blocks;                    // (ceil(queries / 64), ceil(keys / 64)), or null: all
    bool packed;                                    // q, k and v are one array (B, T, (H + 2 H_kv) D), y is (B, T, H D)

    __device__ __forceinline__ bool sees(int query, int key) const {
        return query < queries && key < keys && (!causal || key <= query);
    }
    // Whether a tile of queries may see a tile of keys at all; a tile lies within one block of the mask.
    __device__ __forceinline__ bool tile_sees(int query, int rows, int key) const {
        if (causal && key > query + rows - 1) return false;
        return blocks == nullptr || blocks[query / mask_side * ((keys + mask_side - 1) / mask_side) + key / mask_side];
    }
    // Whether some query of a tile of 64 by 64 does not see some key of it. All other tiles need no mask.
    __device__ __forceinline__ bool is_edge(int query, int key) const {
        return query + mask_side > queries || key + mask_side > keys || (causal && key + mask_side > query + 1);
    }
    // The first tile of 64 keys, from `key` on, that a tile of 64 queries sees; `keys` if there is none.
    __device__ __forceinline__ int tile_from(int query, int key) const {
        while (key < keys && !tile_sees(query, mask_side, key)) key += mask_side;
        return min(key, keys);
    }

    // The key head of a head (of all B H): H / H_kv heads in a row share one.
    __device__ __forceinline__ int kv_head(int head) const {
        return head / heads * kv_heads + head % heads / (heads / kv_heads);
    }
    // Where rows lie in q and y (B, H, T, D), k and v (B, H_kv, S, D), or packed; and from each to the next.
    __device__ __forceinline__ int step() const { return packed ? (heads + 2 * kv_heads) * width : width; }
    __device__ __forceinline__ int y_step() const { return packed ? heads * width : width; }
    __device__ __forceinline__ long long of_query(int head, int query) const {
        return place(head, heads, queries, query, step());
    }
    __device__ __forceinline__ long long of_y(int head, int query) const {
        return place(head, heads, queries, query, y_step());
    }
    __device__ __forceinline__ long long of_key(int kv_head, int key) const {
        return place(kv_head, kv_heads, keys, key, step()) + (packed ? heads * width : 0);
    }
    __device__ __forceinline__ long long of_value(int kv_head, int key) const {
        return of_key(kv_head, key) + (packed ? kv_heads * width : 0);
    }
    __device__ __forceinline__ long long place(int head, int count, int rows, int row, int step) const {
        if (!packed) return (static_cast<long long>(head) * rows + row) * width;
        return (static_cast<long long>(head / count) * rows + row) * step + head % count * width;
    }
};

// What is taken off before exp: the maximum, but 0 where all is -inf (exp(-inf - -inf) would be NaN).
__device__ __forceinline__ float offset_of(float top) { return top == minus_infinity ? 0.0f : top; }
__device__ __forceinline__ float inverse_of(float total) { return total == 0.0f ? 0.0f : 1.0f / total; }
// log(sum(exp(score))) from the maximum and the sum of exp(score - maximum); -inf where no key is seen.
__device__ __forceinline__ float log_sum(float top, float total) {
    return total == 0.0f ? minus_infinity : offset_of(top) + __logf(total);
}

// Tiles of 32 in float32, for the versions without tensor cores: 4 warps, each 8 of the rows.
constexpr int tile = 32, warps = 4, rows_a_warp = tile / warps;

// `columns` numbers a row, rows `apart` apart, in float32; zeros beyond the matrix, whose rows lie `step` apart.
template <typename T>
__device__ __forceinline__ void fill(float* shared, int apart, const T* matrix, int row, int height, int width,
                                     int step, int columns) {
    for (int i = threadIdx.x; i < tile * columns; i += 32 * warps) {
        const int r = i / columns, c = i % columns;
        const bool there = row + r < height && c < width;
        shared[r * apart + c] = there ? to_float(matrix[static_cast<long long>(row + r) * step + c]) : 0.0f;
    }
}
// Of a warp's 8 rows: sum[r][n] += weights (8, 32) times numbers (32, columns), of which a lane has column lane + 32 n.
template <int parts>
__device__ __forceinline__ void add_product(float (&sum)[rows_a_warp][parts], const float* weights,
                                            const float* numbers, int apart, int lane) {
    for (int i = 0; i < tile; i++) {
#pragma unroll
        for (int r = 0; r < rows_a_warp; r++) {
#pragma unroll
            for (int n = 0; n < parts; n++) sum[r][n] += weights[r * tile + i] * numbers[i * apart + 32 * n + lane];
        }
    }
}
__device__ __forceinline__ float dot(const float* a, const float* b, int columns) {
    float sum = 0.0f;
    for (int i = 0; i < columns; i++) sum += a[i] * b[i];
    return sum;
}

// Tiles of 64 in half types, for tensor cores: 4 warps, each 16 of the rows. exp(x) is 2^(x log2(e)): tensor cores'
// versions put the factor into the scale, so that exp costs one multiplication and one instruction of the function unit.
constexpr int side = 64;
constexpr float log2_e = 1.4426950408889634f;

// Begin to fetch a tile of keys and the tile of their values, from row `key` on, if there is such a row.
template <typename T, int columns>
__device__ __forceinline__ void fetch_keys(Tile<T, side, columns>& k_tile, Tile<T, side, columns>& v_tile, const T* k,
                                           const T* v, int key, const Attention& all, bool whole, int thread) {
    if (key < all.keys) {
        k_tile.template fill_async<128>(k, key, all.keys, 0, all.width, all.step(), whole, thread);
        v_tile.template fill_async<128>(v, key, all.keys, 0, all.width, all.step(), whole, thread);
    }
    cp_async_commit();
}

// Where a tile has an edge: of a lane's numbers of 16 rows, at (row, column) and on, those of a query and a key that do
// not see each other become `hidden`. Rows are queries, or keys.
template <bool keys_down, int eights>
__device__ __forceinline__ void hide(float (&numbers)[eights][4], const Attention& all, int row, int column,
                                     float hidden) {
#pragma unroll
    for (int j = 0; j < eights; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int down = row + i / 2 * 8, along = column + 8 * j + i % 2;
            if (!all.sees(keys_down ? along : down, keys_down ? down : along)) numbers[j][i] = hidden;
        }
    }
}

// products (16, n) = rows `mine`… of a (64, columns) times rows `from`… of b (64, columns) transposed; n = 8 eights.
template <typename T, int columns, int eights>
__device__ __forceinline__ void product_of_rows(float (&products)[eights][4], const Tile<T, side, columns>& a,
                                                const Tile<T, side, columns>& b, int mine, int from, int lane) {
#pragma unroll
    for (int i = 0; i < columns; i += 16) {
        unsigned from_a[4];
        a.load_a(from_a, mine, i, lane);
#pragma unroll
        for (int j = 0; j < eights; j += 2) {
            unsigned from_b[2][2];
            b.load_b_flipped(from_b, from + 8 * j, i, lane);
            mma_16x8x16<T>(products[j], from_a, from_b[0]);
            mma_16x8x16<T>(products[j + 1], from_a, from_b[1]);
        }
    }
}

// sum (16, columns) += weights (16, n), rounded to T, times rows `from`… of b (64, columns); n = 8 eights.
template <typename T, int columns, int eights>
__device__ __forceinline__ void add_weighted(float (&sum)[columns / 8][4], const float (&weights)[eights][4],
                                             const Tile<T, side, columns>& b, int from, int lane) {
#pragma unroll
    for (int i = 0; i < eights / 2; i++) {
        unsigned from_weights[4];
        as_a<T>(from_weights, weights[2 * i], weights[2 * i + 1]);
#pragma unroll
        for (int j = 0; j < columns / 8; j += 2) {
            unsigned from_b[2][2];
            b.load_b(from_b, from + 16 * i, 8 * j, lane);
            mma_16x8x16<T>(sum[j], from_weights, from_b[0]);
            mma_16x8x16<T>(sum[j + 1], from_weights, from_b[1]);
        }
    }
}
