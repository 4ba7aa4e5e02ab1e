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

// row (B, H, T) = sum(dy y) along the columns: 8 lanes a query, 16 bytes a load. grid: ceil(B H T / 16); 128 threads.
template <typename T>
__global__ void attention_row(const T* y, const T* dy, float* row, int rows, int heads, int queries, int width,
                              bool packed, bool whole) {
    const Attention all{heads, heads, queries, queries, width, false, nullptr, packed};
    const int i = blockIdx.x * 16 + threadIdx.x / 8;
    constexpr int size = Pack<T>::size;
    float sum = 0.0f;
    for (int c = threadIdx.x % 8 * size; i < rows && c < width; c += 8 * size) {
        const long long at = all.of_y(i / queries, i % queries) + c;
        const Pack<T> result = load_part(y + at, width - c, whole), slope = load_part(dy + at, width - c, whole);
#pragma unroll
        for (int k = 0; k < size; k++) sum += to_float(result.v[k]) * to_float(slope.v[k]);
    }
#pragma unroll
    for (int bits = 4; bits > 0; bits /= 2) sum += __shfl_xor_sync(all_lanes, sum, bits);
    if (i < rows && threadIdx.x % 8 == 0) row[i] = sum;
}

// -------------------------------------------------------------------------------------------------------------- naive

// grid: (ceil(T / blockDim.x), B H): a thread a query. p and ds (B, H, T, S) are left for the next kernel.
template <typename T>
__global__ void attention_dq_v1(const T* q, const T* k, const T* v, const T* dy, const float* log_total,
                                const float* row, T* dq, float* p, float* ds, int heads, int kv_heads, int queries,
                                int keys, int width, float scale, bool causal, const unsigned char* blocks,
                                bool packed) {
    const Attention all{heads, kv_heads, queries, keys, width, causal, blocks, packed};
    const int query = blockIdx.x * blockDim.x + threadIdx.x, head = blockIdx.y, kv_head = all.kv_head(head);
    if (query >= queries) return;
    const long long at = static_cast<long long>(head) * queries + query, start = all.of_query(head, query);
    const long long slopes = all.of_y(head, query);
    for (int key = 0; key < keys; key++) {
        const long long other = all.of_key(kv_head, key), value = all.of_value(kv_head, key);
        float score = 0.0f, dp = 0.0f;
        for (int i = 0; i < width; i++) {
            score += to_float(q[start + i]) * to_float(k[other + i]);
            dp += to_float(dy[slopes + i]) * to_float(v[value + i]);
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
                                 int kv_heads, int queries, int keys, int width, bool packed) {
    const Attention all{heads, kv_heads, queries, keys, width, false, nullptr, packed};
    const int i = blockIdx.x * blockDim.x + threadIdx.x, key = i / width, column = i % width, kv_head = blockIdx.y;
    if (key >= keys) return;
    const int group = heads / kv_heads;
    float k_sum = 0.0f, v_sum = 0.0f;
    for (int n = 0; n < group * queries; n++) {                  // the heads of a group lie side by side
        const int head = kv_head * group + n / queries, query = n % queries;
        const long long at = (static_cast<long long>(head) * queries + query) * keys + key;
        k_sum += ds[at] * to_float(q[all.of_query(head, query) + column]);
        v_sum += p[at] * to_float(dy[all.of_y(head, query) + column]);
    }
    dk[all.of_key(kv_head, key) + column] = from_float<T>(k_sum);
    dv[all.of_value(kv_head, key) + column] = from_float<T>(v_sum);
}

// --------------------------------------------------------------------------------------------- tiles in shared memory

// grid: (ceil(T / 32), B H); 128 threads. A warp has 8 queries, a lane a key of the tile.
template <typename T, int columns>
__global__ void __launch_bounds__(128) attention_dq_v2(const T* q, const T* k, const T* v, const T* dy,
                                                       const float* log_total, const float* row, T* dq, int heads,
                                                       int kv_heads, int queries, int keys, int width, float scale,
                                                       bool causal, const unsigned char* blocks, bool packed) {
    constexpr int parts = columns / 32, apart = columns + 1;
    extern __shared__ float shared[];
    float* q_tile = shared;                                      // each (32, apart)
    float* dy_tile = q_tile + tile * apart;
    float* k_tile = dy_tile + tile * apart;
    float* v_tile = k_tile + tile * apart;
    float* ds_tile = v_tile + tile * apart;                      // (32, 32)
    const Attention all{heads, kv_heads, queries, keys, width, causal, blocks, packed};
    const int first = blockIdx.x * tile, head = blockIdx.y, kv_head = all.kv_head(head);
    const int lane = threadIdx.x % 32, mine = threadIdx.x / 32 * rows_a_warp;
    const long long at = static_cast<long long>(head) * queries + first + mine;
    float sum[rows_a_warp][parts] = {};
    fill(q_tile, apart, q + all.of_query(head, 0), first, queries, width, all.step(), columns);
    fill(dy_tile, apart, dy + all.of_y(head, 0), first, queries, width, all.y_step(), columns);
    for (int key = 0; key < keys; key += tile) {
        if (!all.tile_sees(first, tile, key)) continue;          // the whole block
        __syncthreads();                                         // before the last tile is overwritten
        fill(k_tile, apart, k + all.of_key(kv_head, 0), key, keys, width, all.step(), columns);
        fill(v_tile, apart, v + all.of_value(kv_head, 0), key, keys, width, all.step(), columns);
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
                                                        float scale, bool causal, const unsigned char* blocks,
                                                        bool packed) {
    constexpr int parts = columns / 32, apart = columns + 1;
    extern __shared__ float shared[];
    float* q_tile = shared;                                      // each (32, apart)
    float* dy_tile = q_tile + tile * apart;
    float* k_tile = dy_tile + tile * apart;
    float* v_tile = k_tile + tile * apart;
    float* p_tile = v_tile + tile * apart;                       // each (32, 32), keys down
    float* ds_tile = p_tile + tile * tile;
    const Attention all{heads, kv_heads, queries, keys, width, causal, blocks, packed};
    const int first = blockIdx.x * tile, kv_head = blockIdx.y, group = heads / kv_heads;
    const int lane = threadIdx.x % 32, mine = threadIdx.x / 32 * rows_a_warp;
    float k_sum[rows_a_warp][parts] = {}, v_sum[rows_a_warp][parts] = {};
    fill(k_tile, apart, k + all.of_key(kv_head, 0), first, keys, width, all.step(), columns);
    fill(v_tile, apart, v + all.of_value(kv_head, 0), first, keys, width, all.step(), columns);
    for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
        for (int query = 0; query < queries; query += tile) {
            if (!all.tile_sees(query, tile, first)) continue;    // the whole block
            __syncthreads();                                     // before the last tile is overwritten
            fill(q_tile, apart, q + all.of_query(head, 0), query, queries, width, all.step(), columns);
            fill(dy_tile, apart, dy + all.of_y(head, 0), query, queries, width, all.y_step(), columns);
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
            dv[all.of_value(kv_head, key) + column] = from_float<T>(v_sum[r][n]);
        }
    }
}

// ------------------------------------------------------------------------------------------------------- tensor cores

// A tile of 64 is computed in two parts: fewer numbers at a time are registers, and more blocks fit a multiprocessor.
constexpr int part = 32;

// Store sum (16, columns) times `scale` from row `first` on of a matrix (height, width) whose rows lie `step` apart.
template <typename T, int columns>
__device__ __forceinline__ void store_sum(T* matrix, const float (&sum)[columns / 8][4], float scale, int first,
                                          int height, int width, int step, bool whole, int lane) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = first + lane / 4 + half * 8;
#pragma unroll
        for (int j = 0; j < columns / 8 && row < height; j++) {
            const int column = 8 * j + lane % 4 * 2;
            store_pair(matrix + static_cast<long long>(row) * step + column, sum[j][half * 2] * scale,
                       sum[j][half * 2 + 1] * scale, width - column, whole);
        }
    }
}

// grid: (ceil(T / 64), B H); 128 threads. A warp has 16 queries.
template <typename T, int columns>
__global__ void __launch_bounds__(128) attention_dq_v3(const T* q, const T* k, const T* v, const T* dy,
                                                       const float* log_total, const float* row, T* dq, int heads,
                                                       int kv_heads, int queries, int keys, int width, float scale,
                                                       bool causal, const unsigned char* blocks, bool packed,
                                                       bool whole) {
    extern __shared__ float4 room[];
    Tile<T, side, columns>* tiles = reinterpret_cast<Tile<T, side, columns>*>(room);
    Tile<T, side, columns>& q_tile = tiles[0];
    Tile<T, side, columns>& dy_tile = tiles[1];
    Tile<T, side, columns>* k_tiles = tiles + 2;                 // two, and two of v
    Tile<T, side, columns>* v_tiles = tiles + 4;
    const Attention all{heads, kv_heads, queries, keys, width, causal, blocks, packed};
    const int first = (gridDim.x - 1 - blockIdx.x) * side;       // the last queries see the most keys: they begin
    const int head = blockIdx.y, kv_head = all.kv_head(head);
    const int thread = threadIdx.x, lane = thread % 32, mine = thread / 32 * 16;
    const T* keys_of_head = k + all.of_key(kv_head, 0);
    const T* values_of_head = v + all.of_value(kv_head, 0);
    const float power = scale * log2_e;
    float sum[columns / 8][4] = {}, my_log_total[2], my_row[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int query = first + mine + lane / 4 + half * 8;
        const long long at = static_cast<long long>(head) * queries + query;
        my_log_total[half] = query < queries ? log_total[at] * log2_e : 0.0f;
        my_row[half] = query < queries ? row[at] : 0.0f;
    }
    int key = all.tile_from(first, 0);
    q_tile.template fill_async<128>(q + all.of_query(head, 0), first, queries, 0, width, all.step(), whole, thread);
    dy_tile.template fill_async<128>(dy + all.of_y(head, 0), first, queries, 0, width, all.y_step(), whole, thread);
    fetch_keys(k_tiles[0], v_tiles[0], keys_of_head, values_of_head, key, all, whole, thread);
    for (int stage = 0; key < keys; stage ^= 1) {
        const Tile<T, side, columns>&k_tile = k_tiles[stage], &v_tile = v_tiles[stage];
        const int next = all.tile_from(first, key + side);
        fetch_keys(k_tiles[stage ^ 1], v_tiles[stage ^ 1], keys_of_head, values_of_head, next, all, whole, thread);
        cp_async_wait<1>();                                      // this stage's tiles are here
        __syncthreads();                                         // before others' numbers are read
#pragma unroll 1
        for (int from = 0; from < side; from += part) {          // of the tile's keys
            float ds[part / 8][4] = {}, dp[part / 8][4] = {};    // ds: scores at first
            product_of_rows<T, columns>(ds, q_tile, k_tile, mine, from, lane);
            product_of_rows<T, columns>(dp, dy_tile, v_tile, mine, from, lane);
#pragma unroll
            for (int j = 0; j < part / 8; j++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    ds[j][i] = exp2f(ds[j][i] * power - my_log_total[i / 2]) * (dp[j][i] - my_row[i / 2]);
                }
            }
            if (all.is_edge(first, key)) hide<false>(ds, all, first + mine + lane / 4, key + from + lane % 4 * 2, 0.0f);
            add_weighted<T, columns>(sum, ds, k_tile, from, lane);
        }
        __syncthreads();                                         // before this stage is overwritten
        key = next;
    }
    store_sum<T, columns>(dq + all.of_query(head, 0), sum, scale, first + mine, queries, width, all.step(), whole, lane);
}

// grid: (ceil(S / 64), B H_kv); 128 threads. A warp has 16 keys; p and ds are transposed, keys down.
template <typename T, int columns>
__global__ void __launch_bounds__(128) attention_dkv_v3(const T* q, const T* k, const T* v, const T* dy,
                                                        const float* log_total, const float* row, T* dk, T* dv,
                                                        int heads, int kv_heads, int queries, int keys, int width,
                                                        float scale, bool causal, const unsigned char* blocks,
                                                        bool packed, bool whole) {
    extern __shared__ float4 room[];
    Tile<T, side, columns>* tiles = reinterpret_cast<Tile<T, side, columns>*>(room);
    Tile<T, side, columns>& k_tile = tiles[0];
    Tile<T, side, columns>& v_tile = tiles[1];
    Tile<T, side, columns>* q_tiles = tiles + 2;                 // two, and two of dy
    Tile<T, side, columns>* dy_tiles = tiles + 4;
    __shared__ float numbers[2][side];                           // of the tile's queries: log_total log2(e), and row
    const Attention all{heads, kv_heads, queries, keys, width, causal, blocks, packed};
    const int first = blockIdx.x * side, kv_head = blockIdx.y, group = heads / kv_heads;
    const int thread = threadIdx.x, lane = thread % 32, mine = thread / 32 * 16, after = (kv_head + 1) * group;
    const float power = scale * log2_e;
    // The next tile of queries that sees these keys, of this head or of the group's next ones.
    const auto advance = [&](int& head, int& query) {
        do {
            query += side;
            if (query >= queries) query = 0, head++;
        } while (head < after && !all.tile_sees(query, side, first));
    };
    const auto fill_stage = [&](int stage, int head, int query) {
        q_tiles[stage].template fill_async<128>(q + all.of_query(head, 0), query, queries, 0, width, all.step(), whole,
                                                thread);
        dy_tiles[stage].template fill_async<128>(dy + all.of_y(head, 0), query, queries, 0, width, all.y_step(), whole,
                                                 thread);
    };
    const auto number_of = [&](int head, int query) {            // this thread's of a tile's 2 x 64
        const int mine_of_tile = query + thread % side;
        if (head >= after || mine_of_tile >= queries) return 0.0f;
        const long long at = static_cast<long long>(head) * queries + mine_of_tile;
        return thread < side ? log_total[at] * log2_e : row[at];
    };
    float k_sum[columns / 8][4] = {}, v_sum[columns / 8][4] = {};
    int head = kv_head * group, query = -side;
    advance(head, query);
    k_tile.template fill_async<128>(k + all.of_key(kv_head, 0), first, keys, 0, width, all.step(), whole, thread);
    v_tile.template fill_async<128>(v + all.of_value(kv_head, 0), first, keys, 0, width, all.step(), whole, thread);
    if (head < after) fill_stage(0, head, query);
    cp_async_commit();
    numbers[thread / side][thread % side] = number_of(head, query);
    for (int stage = 0; head < after; stage ^= 1) {
        const Tile<T, side, columns>&q_tile = q_tiles[stage], &dy_tile = dy_tiles[stage];
        int next_head = head, next = query;
        advance(next_head, next);
        if (next_head < after) fill_stage(stage ^ 1, next_head, next);
        cp_async_commit();
        const float coming = number_of(next_head, next);
        cp_async_wait<1>();                                      // this stage's tiles are here
        __syncthreads();                                         // before others' numbers are read
#pragma unroll 1
        for (int from = 0; from < side; from += part) {          // of the tile's queries
            float p[part / 8][4] = {}, ds[part / 8][4] = {};     // p: scores at first; ds: v dyᵀ
            product_of_rows<T, columns>(p, k_tile, q_tile, mine, from, lane);
            product_of_rows<T, columns>(ds, v_tile, dy_tile, mine, from, lane);
#pragma unroll
            for (int j = 0; j < part / 8; j++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int other = from + 8 * j + lane % 4 * 2 + i % 2;
                    p[j][i] = exp2f(p[j][i] * power - numbers[0][other]);
                    ds[j][i] = p[j][i] * (ds[j][i] - numbers[1][other]);
                }
            }
            if (all.is_edge(query, first)) {
                hide<true>(p, all, first + mine + lane / 4, query + from + lane % 4 * 2, 0.0f);
                hide<true>(ds, all, first + mine + lane / 4, query + from + lane % 4 * 2, 0.0f);
            }
            add_weighted<T, columns>(v_sum, p, dy_tile, from, lane);
            add_weighted<T, columns>(k_sum, ds, q_tile, from, lane);
        }
        __syncthreads();                                         // before this stage is overwritten
        numbers[thread / side][thread % side] = coming;
        head = next_head, query = next;
    }
    store_sum<T, columns>(dk + all.of_key(kv_head, 0), k_sum, scale, first + mine, keys, width, all.step(), whole, lane);
    store_sum<T, columns>(dv + all.of_value(kv_head, 0), v_sum, 1.0f, first + mine, keys, width, all.step(), whole, lane);
}
