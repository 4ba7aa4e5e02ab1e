// Gradients of attention.cu. Of each head, with p = exp(c q kᵀ - log_total) the probabilities, computed again, and
// r = sum(dy y) of each query:
//
//   dv = pᵀ dy        ds = p (dy vᵀ - r)        dq = c ds k        dk = c dsᵀ q
//
// dk and dv are sums over queries, dq is one over keys. One kernel holds a tile of queries and walks along the keys for
// dq, another holds a tile of keys and walks along the queries (of all heads that share it) for dk and dv: 14 T S D
// operations a head instead of 10, since scores and dy vᵀ are computed twice, but no block adds to another's result: no
// atomics, and the same bits every time. Half of that if causal.
//
//   v1  naive             p and ds in global memory, T S floats a head each; then a thread a number of dk and dv
//   v2  tiles of 32       p and ds of a tile in shared memory; q and dy, k and v are read once for 32 keys, 32 queries
//   v3  tensor cores      tiles of 64, p and ds in registers as in attention.cu; half types
//
// Sources: Dao et al. 2022, "FlashAttention"; Dao 2023, "FlashAttention-2".
#include "attention.cuh"

// row (B, H, T) = sum(dy y) along the columns: a warp a query. grid: ceil(B H T / 4); 128 threads.
template <typename T> __global__ void attention_row(const T* y, const T* dy, float* row, int rows, int width) {
    const int i = blockIdx.x * 4 + threadIdx.x / 32;
    if (i >= rows) return;                                       // the whole warp
    float sum = 0.0f;
    for (int c = threadIdx.x % 32; c < width; c += 32) {
        const long long at = static_cast<long long>(i) * width + c;
        sum += to_float(y[at]) * to_float(dy[at]);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) row[i] = sum;
}

// -------------------------------------------------------------------------------------------------------------- naive

// grid: (ceil(T / blockDim.x), B H): a thread a query. p and ds (B, H, T, S) are left for the next kernel.
template <typename T>
__global__ void attention_dq_v1(const T* q, const T* k, const T* v, const T* dy, const float* log_total,
                                const float* row, T* dq, float* p, float* ds, int heads, int kv_heads, int queries,
                                int keys, int width, float scale, bool causal, const unsigned char* blocks) {
    const Attention all{heads, kv_heads, queries, keys, width, causal, blocks};
    const int query = blockIdx.x * blockDim.x + threadIdx.x, head = blockIdx.y, kv_head = all.kv_head(head);
    if (query >= queries) return;
    const long long at = static_cast<long long>(head) * queries + query, start = all.of_query(head, query);
    for (int key = 0; key < keys; key++) {
        const long long other = all.of_key(kv_head, key);
        float score = 0.0f, dp = 0.0f;
        for (int i = 0; i < width; i++) {
            score += to_float(q[start + i]) * to_float(k[other + i]);
            dp += to_float(dy[start + i]) * to_float(v[other + i]);
        }
        const bool seen = all.sees(query, key) && all.tile_sees(query, 1, key);
        const float probability = seen ? __expf(score * scale - log_total[at]) : 0.0f;
        p[at * keys + key] = probability;
        ds[at * keys + key] = probability * (dp - row[at]) * scale;
    }
    for (int i = 0; i < width; i++) {
        float sum = 0.0f;
        for (int key = 0; key < keys; key++) sum += ds[at * keys + key] * to_float(k[all.of_key(kv_head, key) + i]);
        dq[start + i] = from_float<T>(sum);
    }
}

// grid: (ceil(S D / blockDim.x), B H_kv): a thread a number of dk and of dv.
template <typename T>
__global__ void attention_dkv_v1(const T* q, const T* dy, const float* p, const float* ds, T* dk, T* dv, int heads,
                                 int kv_heads, int queries, int keys, int width) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, key = i / width, column = i % width, kv_head = blockIdx.y;
    if (key >= keys) return;
    const int group = heads / kv_heads;
    float k_sum = 0.0f, v_sum = 0.0f;
    for (int n = 0; n < group * queries; n++) {                  // the heads of a group lie side by side
        const long long at = static_cast<long long>(kv_head) * group * queries + n;
        k_sum += ds[at * keys + key] * to_float(q[at * width + column]);
        v_sum += p[at * keys + key] * to_float(dy[at * width + column]);
    }
    const long long at = (static_cast<long long>(kv_head) * keys + key) * width + column;
    dk[at] = from_float<T>(k_sum), dv[at] = from_float<T>(v_sum);
}

// --------------------------------------------------------------------------------------------- tiles in shared memory

// grid: (ceil(T / 32), B H); 128 threads. A warp has 8 queries, a lane a key of the tile.
template <typename T, int columns>
__global__ void __launch_bounds__(128) attention_dq_v2(const T* q, const T* k, const T* v, const T* dy,
                                                       const float* log_total, const float* row, T* dq, int heads,
                                                       int kv_heads, int queries, int keys, int width, float scale,
                                                       bool causal, const unsigned char* blocks) {
    constexpr int parts = columns / 32, apart = columns + 1;
    extern __shared__ float shared[];
    float* q_tile = shared;                                      // each (32, apart)
    float* dy_tile = q_tile + tile * apart;
    float* k_tile = dy_tile + tile * apart;
    float* v_tile = k_tile + tile * apart;
    float* ds_tile = v_tile + tile * apart;                      // (32, 32)
    const Attention all{heads, kv_heads, queries, keys, width, causal, blocks};
    const int first = blockIdx.x * tile, head = blockIdx.y, kv_head = all.kv_head(head);
    const int lane = threadIdx.x % 32, mine = threadIdx.x / 32 * rows_a_warp;
    const long long at = static_cast<long long>(head) * queries + first + mine;
    float sum[rows_a_warp][parts] = {};
    fill(q_tile, apart, q + all.of_query(head, 0), first, queries, width, columns);
    fill(dy_tile, apart, dy + all.of_query(head, 0), first, queries, width, columns);
    for (int key = 0; key < keys; key += tile) {
        if (!all.tile_sees(first, tile, key)) continue;          // the whole block
        __syncthreads();                                         // before the last tile is overwritten
        fill(k_tile, apart, k + all.of_key(kv_head, 0), key, keys, width, columns);
        fill(v_tile, apart, v + all.of_key(kv_head, 0), key, keys, width, columns);
        __syncthreads();                                         // before others' numbers are read
        for (int r = 0; r < rows_a_warp; r++) {
            const float score = dot(q_tile + (mine + r) * apart, k_tile + lane * apart, columns) * scale;
            const float dp = dot(dy_tile + (mine + r) * apart, v_tile + lane * apart, columns);
            const bool seen = all.sees(first + mine + r, key + lane);
            ds_tile[(mine + r) * tile + lane] = seen ? __expf(score - log_total[at + r]) * (dp - row[at + r]) : 0.0f;
        }
        __syncwarp();                                            // its own rows of ds_tile are written
        add_product(sum, ds_tile + mine * tile, k_tile, apart, lane);
    }
    for (int r = 0; r < rows_a_warp; r++) {
        for (int n = 0; n < parts; n++) {
            const int query = first + mine + r, column = 32 * n + lane;
            if (query >= queries || column >= width) continue;
            dq[all.of_query(head, query) + column] = from_float<T>(sum[r][n] * scale);
        }
    }
}

// grid: (ceil(S / 32), B H_kv); 128 threads. A warp has 8 keys, a lane a query of the tile.
template <typename T, int columns>
__global__ void __launch_bounds__(128) attention_dkv_v2(const T* q, const T* k, const T* v, const T* dy,
                                                        const float* log_total, const float* row, T* dk, T* dv,
                                                        int heads, int kv_heads, int queries, int keys, int width,
                                                        float scale, bool causal, const unsigned char* blocks) {
    constexpr int parts = columns / 32, apart = columns + 1;
    extern __shared__ float shared[];
    float* q_tile = shared;                                      // each (32, apart)
    float* dy_tile = q_tile + tile * apart;
    float* k_tile = dy_tile + tile * apart;
    float* v_tile = k_tile + tile * apart;
    float* p_tile = v_tile + tile * apart;                       // each (32, 32), keys down
    float* ds_tile = p_tile + tile * tile;
    const Attention all{heads, kv_heads, queries, keys, width, causal, blocks};
    const int first = blockIdx.x * tile, kv_head = blockIdx.y, group = heads / kv_heads;
    const int lane = threadIdx.x % 32, mine = threadIdx.x / 32 * rows_a_warp;
    float k_sum[rows_a_warp][parts] = {}, v_sum[rows_a_warp][parts] = {};
    fill(k_tile, apart, k + all.of_key(kv_head, 0), first, keys, width, columns);
    fill(v_tile, apart, v + all.of_key(kv_head, 0), first, keys, width, columns);
    for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
        for (int query = 0; query < queries; query += tile) {
            if (!all.tile_sees(query, tile, first)) continue;    // the whole block
            __syncthreads();                                     // before the last tile is overwritten
            fill(q_tile, apart, q + all.of_query(head, 0), query, queries, width, columns);
            fill(dy_tile, apart, dy + all.of_query(head, 0), query, queries, width, columns);
            __syncthreads();                                     // before others' numbers are read
            const long long at = static_cast<long long>(head) * queries + query + lane;
            for (int r = 0; r < rows_a_warp; r++) {
                const float score = dot(k_tile + (mine + r) * apart, q_tile + lane * apart, columns) * scale;
                const float dp = dot(v_tile + (mine + r) * apart, dy_tile + lane * apart, columns);
                const bool seen = all.sees(query + lane, first + mine + r);
                const float p = seen ? __expf(score - log_total[at]) : 0.0f;
                p_tile[(mine + r) * tile + lane] = p;
                ds_tile[(mine + r) * tile + lane] = seen ? p * (dp - row[at]) : 0.0f;
            }
            __syncwarp();                                        // its own rows of both are written
            add_product(v_sum, p_tile + mine * tile, dy_tile, apart, lane);
            add_product(k_sum, ds_tile + mine * tile, q_tile, apart, lane);
        }
    }
    for (int r = 0; r < rows_a_warp; r++) {
        for (int n = 0; n < parts; n++) {
            const int key = first + mine + r, column = 32 * n + lane;
            if (key >= keys || column >= width) continue;
            dk[all.of_key(kv_head, key) + column] = from_float<T>(k_sum[r][n] * scale);
            dv[all.of_key(kv_head, key) + column] = from_float<T>(v_sum[r][n]);
        }
    }
}

// ------------------------------------------------------------------------------------------------------- tensor cores

// Store sum (16, columns) times `scale` from row `first` on of a matrix (height, width).
template <typename T, int columns>
__device__ __forceinline__ void store_sum(T* matrix, const float (&sum)[columns / 8][4], float scale, int first,
                                          int height, int width, int lane) {
#pragma unroll
    for (int j = 0; j < columns / 8; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = first + lane / 4 + i / 2 * 8, column = 8 * j + lane % 4 * 2 + i % 2;
            if (row < height && column < width) {
                matrix[static_cast<long long>(row) * width + column] = from_float<T>(sum[j][i] * scale);
            }
        }
    }
}

// grid: (ceil(T / 64), B H); 128 threads. A warp has 16 queries.
template <typename T, int columns>
__global__ void __launch_bounds__(128) attention_dq_v3(const T* q, const T* k, const T* v, const T* dy,
                                                       const float* log_total, const float* row, T* dq, int heads,
                                                       int kv_heads, int queries, int keys, int width, float scale,
                                                       bool causal, const unsigned char* blocks, bool whole) {
    extern __shared__ float4 room[];
    Tile<T, side, columns>* tiles = reinterpret_cast<Tile<T, side, columns>*>(room);
    Tile<T, side, columns>& q_tile = tiles[0];
    Tile<T, side, columns>& dy_tile = tiles[1];
    Tile<T, side, columns>& k_tile = tiles[2];
    Tile<T, side, columns>& v_tile = tiles[3];
    const Attention all{heads, kv_heads, queries, keys, width, causal, blocks};
    const int first = blockIdx.x * side, head = blockIdx.y, kv_head = all.kv_head(head);
    const int thread = threadIdx.x, lane = thread % 32, mine = thread / 32 * 16;
    float sum[columns / 8][4] = {}, my_log_total[2], my_row[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int query = first + mine + lane / 4 + half * 8;
        const long long at = static_cast<long long>(head) * queries + query;
        my_log_total[half] = query < queries ? log_total[at] : 0.0f;
        my_row[half] = query < queries ? row[at] : 0.0f;
    }
    q_tile.template fill<128>(q + all.of_query(head, 0), first, queries, 0, width, width, whole, thread);
    dy_tile.template fill<128>(dy + all.of_query(head, 0), first, queries, 0, width, width, whole, thread);
    for (int key = 0; key < keys; key += side) {
        if (!all.tile_sees(first, side, key)) continue;          // the whole block
        __syncthreads();                                         // before the last tile is overwritten
        k_tile.template fill<128>(k + all.of_key(kv_head, 0), key, keys, 0, width, width, whole, thread);
        v_tile.template fill<128>(v + all.of_key(kv_head, 0), key, keys, 0, width, width, whole, thread);
        __syncthreads();                                         // before others' numbers are read
        float ds[side / 8][4] = {}, dp[side / 8][4] = {};        // ds: scores at first
        product_of_rows<T, columns>(ds, q_tile, k_tile, mine, lane);
        product_of_rows<T, columns>(dp, dy_tile, v_tile, mine, lane);
#pragma unroll
        for (int j = 0; j < side / 8; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int query = first + mine + lane / 4 + i / 2 * 8, other = key + 8 * j + lane % 4 * 2 + i % 2;
                const float p = __expf(ds[j][i] * scale - my_log_total[i / 2]);
                ds[j][i] = all.sees(query, other) ? p * (dp[j][i] - my_row[i / 2]) : 0.0f;
            }
        }
        add_weighted<T, columns>(sum, ds, k_tile, lane);
    }
    store_sum<T, columns>(dq + all.of_query(head, 0), sum, scale, first + mine, queries, width, lane);
}

// grid: (ceil(S / 64), B H_kv); 128 threads. A warp has 16 keys; p and ds are transposed, keys down.
template <typename T, int columns>
__global__ void __launch_bounds__(128) attention_dkv_v3(const T* q, const T* k, const T* v, const T* dy,
                                                        const float* log_total, const float* row, T* dk, T* dv,
                                                        int heads, int kv_heads, int queries, int keys, int width,
                                                        float scale, bool causal, const unsigned char* blocks,
                                                        bool whole) {
    extern __shared__ float4 room[];
    Tile<T, side, columns>* tiles = reinterpret_cast<Tile<T, side, columns>*>(room);
    Tile<T, side, columns>& q_tile = tiles[0];
    Tile<T, side, columns>& dy_tile = tiles[1];
    Tile<T, side, columns>& k_tile = tiles[2];
    Tile<T, side, columns>& v_tile = tiles[3];
    const Attention all{heads, kv_heads, queries, keys, width, causal, blocks};
    const int first = blockIdx.x * side, kv_head = blockIdx.y, group = heads / kv_heads;
    const int thread = threadIdx.x, lane = thread % 32, mine = thread / 32 * 16;
    float k_sum[columns / 8][4] = {}, v_sum[columns / 8][4] = {};
    k_tile.template fill<128>(k + all.of_key(kv_head, 0), first, keys, 0, width, width, whole, thread);
    v_tile.template fill<128>(v + all.of_key(kv_head, 0), first, keys, 0, width, width, whole, thread);
    for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
        for (int query = 0; query < queries; query += side) {
            if (!all.tile_sees(query, side, first)) continue;    // the whole block
            __syncthreads();                                     // before the last tile is overwritten
            q_tile.template fill<128>(q + all.of_query(head, 0), query, queries, 0, width, width, whole, thread);
            dy_tile.template fill<128>(dy + all.of_query(head, 0), query, queries, 0, width, width, whole, thread);
            __syncthreads();                                     // before others' numbers are read
            float p[side / 8][4] = {}, ds[side / 8][4] = {};     // p: scores at first; ds: v dyᵀ
            product_of_rows<T, columns>(p, k_tile, q_tile, mine, lane);
            product_of_rows<T, columns>(ds, v_tile, dy_tile, mine, lane);
#pragma unroll
            for (int j = 0; j < side / 8; j++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int other = query + 8 * j + lane % 4 * 2 + i % 2, key = first + mine + lane / 4 + i / 2 * 8;
                    const bool seen = all.sees(other, key);
                    const long long at = static_cast<long long>(head) * queries + other;
                    p[j][i] = seen ? __expf(p[j][i] * scale - log_total[at]) : 0.0f;
                    ds[j][i] = seen ? p[j][i] * (ds[j][i] - row[at]) : 0.0f;
                }
            }
            add_weighted<T, columns>(v_sum, p, dy_tile, lane);
            add_weighted<T, columns>(k_sum, ds, q_tile, lane);
        }
    }
    store_sum<T, columns>(dk + all.of_key(kv_head, 0), k_sum, scale, first + mine, keys, width, lane);
    store_sum<T, columns>(dv + all.of_key(kv_head, 0), v_sum, 1.0f, first + mine, keys, width, lane);
}
