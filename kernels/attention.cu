// y = softmax(c q kᵀ) v of each head, c = 1 / sqrt(D), and, for backward, log_total = log(sum(exp(c q kᵀ))) a query.
//
// q (B, H, T, D), k and v (B, H_kv, S, D), y as q, log_total (B, H, T) in float32. A head is 4 T S D operations,
// half of that if causal: only half of the tiles are visited. Read and written at least: 2 (T + S) D numbers. `packed`:
// q, k and v lie in the output of one linear (B, T, (H + 2 H_kv) D), and y as (B, T, H D): no head is ever copied.
//
//   v1  a thread a query      scores in global memory: T S floats a head written once and read 1 + D times;
//                             each query reads k and v in full
//   v2  a block 32 queries    no score leaves the chip: k and v come by tiles of 32, softmax is computed as they come
//                             ("online"); k and v are read once for 32 queries, 2 S D T / 32 numbers
//   v3  tensor cores          a block 64 queries, a warp 16, tiles of 64 keys; scores never leave registers: what one
//                             product ends in is what the next begins with (ptx.cuh). 2 S D T / 64 numbers; half types.
//                             The next tile is on its way (cp.async) while this one is computed
//
// Online: for each query top = the largest score so far, total = sum exp(score - top), y = sum exp(score - top) v. A
// tile that raises top scales total and y by exp(old top - new top); at the end y / total. Sums are float32.
// A query that sees no key gets zeros and log_total = -inf. fmaxf passes over a NaN, but its exp reaches total and y.
// Sources: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022, "FlashAttention";
// Dao 2023, "FlashAttention-2".
#include "attention.cuh"

// grid: (ceil(T / blockDim.x), B H). scores (B, H, T, S): scratch.
template <typename T>
__global__ void attention_v1(const T* q, const T* k, const T* v, T* y, float* log_total, float* scores, int heads,
                             int kv_heads, int queries, int keys, int width, float scale, bool causal,
                             const unsigned char* blocks, bool packed) {
    const Attention all{heads, kv_heads, queries, keys, width, causal, blocks, packed};
    const int query = blockIdx.x * blockDim.x + threadIdx.x, head = blockIdx.y, kv_head = all.kv_head(head);
    if (query >= queries) return;
    const T* q_row = q + all.of_query(head, query);
    T* y_row = y + all.of_y(head, query);
    float* score = scores + (static_cast<long long>(head) * queries + query) * keys;
    float top = minus_infinity, total = 0.0f;
    for (int key = 0; key < keys; key++) {
        const T* k_row = k + all.of_key(kv_head, key);
        float sum = 0.0f;
        for (int i = 0; i < width; i++) sum += to_float(q_row[i]) * to_float(k_row[i]);
        score[key] = all.sees(query, key) && all.tile_sees(query, 1, key) ? sum * scale : minus_infinity;
        top = fmaxf(top, score[key]);
    }
    for (int key = 0; key < keys; key++) total += __expf(score[key] - offset_of(top));
    for (int i = 0; i < width; i++) {
        float sum = 0.0f;
        for (int key = 0; key < keys; key++) {
            sum += __expf(score[key] - offset_of(top)) * to_float(v[all.of_value(kv_head, key) + i]);
        }
        y_row[i] = from_float<T>(sum * inverse_of(total));
    }
    log_total[static_cast<long long>(head) * queries + query] = log_sum(top, total);
}

// ------------------------------------------------------------------------------------- tiles in shared memory, online

// grid: (ceil(T / 32), B H); 128 threads; columns: D rounded up to 64 or 128. A warp has 8 queries. A lane is a key of
// the tile for scores, and a column (and those 32, 64, 96 further) for y.
template <typename T, int columns>
__global__ void __launch_bounds__(128) attention_v2(const T* q, const T* k, const T* v, T* y, float* log_total,
                                                    int heads, int kv_heads, int queries, int keys, int width,
                                                    float scale, bool causal, const unsigned char* blocks,
                                                    bool packed) {
    constexpr int parts = columns / 32, apart = columns + 1;     // + 1: 32 lanes read 32 rows of k from 32 banks
    extern __shared__ float shared[];
    float* q_tile = shared;                                      // (32, columns)
    float* k_tile = q_tile + tile * columns;                     // (32, apart)
    float* v_tile = k_tile + tile * apart;                       // (32, columns)
    float* p_tile = v_tile + tile * columns;                     // (32, 32)
    const Attention all{heads, kv_heads, queries, keys, width, causal, blocks, packed};
    const int first = blockIdx.x * tile, head = blockIdx.y, kv_head = all.kv_head(head);
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * rows_a_warp;
    float top[rows_a_warp], total[rows_a_warp] = {}, sum[rows_a_warp][parts] = {};
    for (int r = 0; r < rows_a_warp; r++) top[r] = minus_infinity;
    fill(q_tile, columns, q + all.of_query(head, 0), first, queries, width, all.step(), columns);
    for (int key = 0; key < keys; key += tile) {
        if (!all.tile_sees(first, tile, key)) continue;          // the whole block
        __syncthreads();                                         // before the last tile is overwritten
        fill(k_tile, apart, k + all.of_key(kv_head, 0), key, keys, width, all.step(), columns);
        fill(v_tile, columns, v + all.of_value(kv_head, 0), key, keys, width, all.step(), columns);
        __syncthreads();                                         // before others' numbers are read
#pragma unroll
        for (int r = 0; r < rows_a_warp; r++) {
            float score = dot(q_tile + (row + r) * columns, k_tile + lane * apart, columns);
            score = all.sees(first + row + r, key + lane) ? score * scale : minus_infinity;
            const float now = fmaxf(top[r], warp_max(score)), p = __expf(score - offset_of(now));
            const float shrink = __expf(top[r] - offset_of(now));
            total[r] = total[r] * shrink + warp_sum(p);
            for (int i = 0; i < parts; i++) sum[r][i] *= shrink;
            top[r] = now;
            p_tile[(row + r) * tile + lane] = p;
        }
        __syncwarp();                                            // its own rows of p_tile are written
        add_product(sum, p_tile + row * tile, v_tile, columns, lane);
    }
    for (int r = 0; r < rows_a_warp; r++) {
        const int query = first + row + r;
        if (query >= queries) break;
        for (int n = 0; n < parts; n++) {
            const int column = 32 * n + lane;
            if (column < width) y[all.of_y(head, query) + column] = from_float<T>(sum[r][n] * inverse_of(total[r]));
        }
        if (lane == 0) log_total[static_cast<long long>(head) * queries + query] = log_sum(top[r], total[r]);
    }
}

// ------------------------------------------------------------------------------------------------------- tensor cores

// grid: (ceil(T / 64), B H); 128 threads; columns as above. A lane has two queries, half = 0 and 1:
// those of rows lane / 4 and lane / 4 + 8 of its warp's 16; the four lanes of a row meet by shuffles.
template <typename T, int columns>
__global__ void __launch_bounds__(128) attention_v3(const T* q, const T* k, const T* v, T* y, float* log_total,
                                                    int heads, int kv_heads, int queries, int keys, int width,
                                                    float scale, bool causal, const unsigned char* blocks, bool packed,
                                                    bool whole) {
    extern __shared__ float4 room[];
    Tile<T, side, columns>* k_tiles = reinterpret_cast<Tile<T, side, columns>*>(room);      // two, and two of v
    Tile<T, side, columns>* v_tiles = k_tiles + 2;
    const Attention all{heads, kv_heads, queries, keys, width, causal, blocks, packed};
    const int first = (gridDim.x - 1 - blockIdx.x) * side;       // the last queries see the most keys: they begin
    const int head = blockIdx.y, kv_head = all.kv_head(head);
    const int thread = threadIdx.x, lane = thread % 32, row = thread / 32 * 16;
    const int mine = first + row + lane / 4;                     // and mine + 8
    const T* keys_of_head = k + all.of_key(kv_head, 0);
    const T* values_of_head = v + all.of_value(kv_head, 0);
    const float power = scale * log2_e;
    unsigned from_q[columns / 16][4];
    int key = all.tile_from(first, 0);
    k_tiles[1].template fill_async<128>(q + all.of_query(head, 0), first, queries, 0, width, all.step(), whole, thread);
    fetch_keys(k_tiles[0], v_tiles[0], keys_of_head, values_of_head, key, all, whole, thread);
    cp_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < columns / 16; i++) k_tiles[1].load_a(from_q[i], row, 16 * i, lane);
    __syncthreads();                                             // before q is overwritten
    float top[2] = {minus_infinity, minus_infinity}, total[2] = {}, sum[columns / 8][4] = {};
    for (int stage = 0; key < keys; stage ^= 1) {
        const Tile<T, side, columns>&k_tile = k_tiles[stage], &v_tile = v_tiles[stage];
        const int next = all.tile_from(first, key + side);
        fetch_keys(k_tiles[stage ^ 1], v_tiles[stage ^ 1], keys_of_head, values_of_head, next, all, whole, thread);
        cp_async_wait<1>();                                      // this stage's tiles are here
        __syncthreads();                                         // before others' numbers are read
        float p[side / 8][4] = {};                               // scores, then exp(score - top)
#pragma unroll
        for (int i = 0; i < columns / 16; i++) {
#pragma unroll
            for (int j = 0; j < side / 8; j += 2) {
                unsigned from_k[2][2];
                k_tile.load_b_flipped(from_k, 8 * j, 16 * i, lane);
                mma_16x8x16<T>(p[j], from_q[i], from_k[0]);
                mma_16x8x16<T>(p[j + 1], from_q[i], from_k[1]);
            }
        }
        if (all.is_edge(first, key)) hide<false>(p, all, mine, key + lane % 4 * 2, minus_infinity);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float now = top[half];
#pragma unroll
            for (int j = 0; j < side / 4; j++) now = fmaxf(now, p[j / 2][half * 2 + j % 2]);
            now = fmaxf(now, __shfl_xor_sync(all_lanes, now, 1));
            now = fmaxf(now, __shfl_xor_sync(all_lanes, now, 2));
            const float offset = offset_of(now) * power, shrink = exp2f(top[half] * power - offset);
            total[half] *= shrink;                               // of this lane's keys; lanes are added at the end
#pragma unroll
            for (int j = 0; j < columns / 8; j++) sum[j][half * 2] *= shrink, sum[j][half * 2 + 1] *= shrink;
#pragma unroll
            for (int j = 0; j < side / 4; j++) {
                float& score = p[j / 2][half * 2 + j % 2];
                score = exp2f(score * power - offset);
                total[half] += score;
            }
            top[half] = now;
        }
        add_weighted<T, columns>(sum, p, v_tile, 0, lane);
        __syncthreads();                                         // before this stage is overwritten
        key = next;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        total[half] += __shfl_xor_sync(all_lanes, total[half], 1);
        total[half] += __shfl_xor_sync(all_lanes, total[half], 2);
        const int query = mine + half * 8;
        const float inverse = inverse_of(total[half]);
        if (query < queries && lane % 4 == 0) {
            log_total[static_cast<long long>(head) * queries + query] = log_sum(top[half] * scale, total[half]);
        }
#pragma unroll
        for (int j = 0; j < columns / 8 && query < queries; j++) {
            const int column = 8 * j + lane % 4 * 2;
            store_pair(y + all.of_y(head, query) + column, sum[j][half * 2] * inverse, sum[j][half * 2 + 1] * inverse,
                       width - column, whole);
        }
    }
}
