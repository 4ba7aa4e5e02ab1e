// c = a b / (scale of a * scale of b), of bytes: a (m, k) and b (k, n) hold fp8 numbers, row-major; sums in float32, c
// rounded once to bfloat16. Tensor cores multiply the bytes as they are: nothing is widened in memory.
//
//                       matmul_v5, bf16            matmul_float8
//   read, in bytes      2 m n k (1/128 + 1/128)    m n k (1/128 + 1/128)     of the bytes, exactly where m, n are whole
//   in one instruction  16 x 8 results, k = 16     16 x 8 results, k = 32    twice the products
//   operands            as they lie, or flipped    k must lie contiguous: 4 neighbours along k are a register
//
// So where a matrix lies the other way round (dw = x^T dy needs x and dy so, y = x w needs w), its tile is turned while it
// goes to shared memory: a thread takes 4 x 4 bytes, four words along one dim, and hands on four words along the other.
// Without that the whole matrix would have to be copied in memory, transposed, as for cuBLAS's fp8 products on Hopper.
//
// Formats: 4 exponent bits are e4m3, 5 are e5m2; a and b may differ. sm_89 and newer.
// Source: NVIDIA, "PTX ISA", section on mma; Micikevicius et al. 2022, "FP8 Formats for Deep Learning".
#include "tiles.cuh"

typedef unsigned char byte;

constexpr int side = 128, threads = 256, depth = 64;        // a block has 128 x 128 results; a tile is 64 deep
using Bytes = Tile<byte, side, depth>;                      // [row of a, or column of b][along k]

// The 4 x 4 bytes of four words, turned: word j of the result has byte j of each.
__device__ __forceinline__ void turn(unsigned (&words)[4]) {
    const unsigned low = __byte_perm(words[0], words[1], 0x5140), high = __byte_perm(words[0], words[1], 0x7362);
    const unsigned next_low = __byte_perm(words[2], words[3], 0x5140), next_high = __byte_perm(words[2], words[3], 0x7362);
    words[0] = __byte_perm(low, next_low, 0x5410), words[1] = __byte_perm(low, next_low, 0x7632);
    words[2] = __byte_perm(high, next_high, 0x5410), words[3] = __byte_perm(high, next_high, 0x7632);
}

// Four neighbours of a row, zeros where the row ends. `whole`: they lie at a multiple of 4, and all or none are there.
__device__ __forceinline__ unsigned load_word(const byte* address, int count, bool whole) {
    if (count <= 0) return 0;
    if (whole) return *reinterpret_cast<const unsigned*>(address);
    unsigned word = 0;
    for (int i = 0; i < 4 && i < count; i++) word |= static_cast<unsigned>(address[i]) << 8 * i;
    return word;
}

// Tile::fill for a matrix (k, width) that lies the other way round: the tile's rows are the matrix's columns.
__device__ __forceinline__ void fill_turned(Bytes& tile, const byte* matrix, int start, int k, int column, int width,
                                            bool whole, int thread) {
    constexpr int across = side / 4;                        // words of a row of the matrix
    for (int i = thread; i < across * (depth / 4); i += threads) {
        // A warp takes 8 words of each of 4 x 4 rows: whole sectors of the matrix, and few banks twice.
        const int group = i / 32, lane = i % 32;
        const int word = group % (across / 8) * 8 + lane % 8, deep = (group / (across / 8) * 4 + lane / 8) * 4;
        unsigned words[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int row = start + deep + j, count = row < k ? width - (column + 4 * word) : 0;
            words[j] = load_word(matrix + static_cast<long long>(row) * width + column + 4 * word, count, whole);
        }
        turn(words);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            *reinterpret_cast<unsigned*>(tile.v + (4 * word + j) * Bytes::apart + deep) = words[j];
        }
    }
}

// a_flipped: a is given as (k, m); b_flipped: b is given as (n, k). Eight warps; one has 64 x 32 results.
template <int a_exponent, int b_exponent, bool a_flipped, bool b_flipped>
__global__ void __launch_bounds__(256) matmul_float8(const unsigned char* a, const unsigned char* b, __nv_bfloat16* c,
                                                     const float* a_scale, const float* b_scale, int m, int n, int k,
                                                     bool whole) {
    __shared__ Bytes a_tile, b_tile;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int top = blockIdx.y * side, left = blockIdx.x * side, warp_top = warp / 4 * 64, warp_left = warp % 4 * 32;
    float results[4][4][4] = {};
    for (int start = 0; start < k; start += depth) {
        if (a_flipped) fill_turned(a_tile, a, start, k, top, m, whole, thread);
        else a_tile.template fill<threads>(a, top, m, start, k, k, whole, thread);
        if (b_flipped) b_tile.template fill<threads>(b, left, n, start, k, k, whole, thread);
        else fill_turned(b_tile, b, start, k, left, n, whole, thread);
        __syncthreads();                                    // before others' bytes are read
#pragma unroll
        for (int d = 0; d < depth; d += 32) {
            unsigned from_a[4][4], from_b[4][2];
#pragma unroll
            for (int i = 0; i < 4; i++) {                   // 16 rows and 32 along k: ldmatrix takes bytes by pairs
                ldmatrix<4, false>(from_a[i], a_tile.v + (warp_top + 16 * i + lane % 16) * Bytes::apart + d + lane / 16 * 16);
            }
#pragma unroll
            for (int j = 0; j < 4; j += 2) {                // two times 8 columns
                ldmatrix<4, false>(reinterpret_cast<unsigned (&)[4]>(from_b[j]),
                                   b_tile.v + (warp_left + 8 * j + lane / 16 * 8 + lane % 8) * Bytes::apart + d
                                   + lane / 8 % 2 * 16);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) mma_16x8x32<a_exponent, b_exponent>(results[i][j], from_a[i], from_b[j]);
            }
        }
        __syncthreads();                                    // before they are overwritten
    }
    const float scale = product(a_scale[0], b_scale[0]);
#pragma unroll
    for (int i = 0; i < 64; i++) results[i / 16][i / 4 % 4][i % 4] = quotient(results[i / 16][i / 4 % 4][i % 4], scale);
    store_results(c, results, top + warp_top, left + warp_left, m, n, lane);
}
