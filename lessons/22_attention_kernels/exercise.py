"""Exercise 22: three small CUDA kernels, each with something missing. They run on the CPU, every
access checked.

Copy this file (`minidist lesson 22 --copy DIR`), replace each `hole(...)` by your own code, and
grade it: `minidist check 22 DIR/exercise_22.py`. Holes 1, 2, 3 and 6 want C, as Python strings,
e.g. "a + b"; it stands in the kernel where the name in CAPITALS stands. Leave the kernels
themselves as they are. g++ has to be there.
"""

from minidist.grading import hole

# ------------------------------------------------------------------------ online softmax: holes 1-3

ATTENTION = """
// y = softmax(q k^T) v. A thread has a query, 8 numbers long, and goes over all keys once; it keeps no score.
__global__ void attention(const float* q, const float* k, const float* v, float* y, int queries, int keys) {
    const int query = blockIdx.x * blockDim.x + threadIdx.x;
    if (query >= queries) return;
    float top = __uint_as_float(0xff800000u);            // the largest score so far: -infinity
    float total = 0.0f, sum[8] = {};                     // of exp(score - top), and of that times v
    for (int key = 0; key < keys; key++) {
        float score = 0.0f;
        for (int i = 0; i < 8; i++) score += q[query * 8 + i] * k[key * 8 + i];
        const float now = fmaxf(top, score);
        const float p = __expf(score - now);
        const float shrink = SHRINK;
        total = TOTAL;
        for (int i = 0; i < 8; i++) sum[i] = SUM;
        top = now;
    }
    for (int i = 0; i < 8; i++) y[query * 8 + i] = sum[i] / total;
}
"""


def shrink():
    """Return C for SHRINK: the factor for all earlier sums, when the maximum changes from `top` to
    `now`."""
    return hole(1, 'the factor from the old maximum to the new, in C: "..."')


def total():
    """Return C for TOTAL: the sum of exp(score - now) over all keys up to this one."""
    return hole(2, "the new total from total, shrink and p")


def weighted_sum():
    """Return C for SUM: the same sum, but each term times number i of that key's value, which is
    v[key * 8 + i]."""
    return hole(3, "the new sum[i] from sum[i], shrink, p and v")


# ---------------------------------------------------------------------- the missing barrier: hole 4

PRODUCT = """
// c (m, n) = a (m, k) times b (k, n) by tiles of 16 x 16; k and n are multiples of 16. Letters are places.
__global__ void product(const float* a, const float* b, float* c, int m, int n, int k) {
    __shared__ float a_tile[16][16];
    __shared__ float b_tile[16][16];
    const int x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * 16 + y, column = blockIdx.x * 16 + x;
    float sum = 0.0f;
    for (int start = 0; start < k; start += 16) {
        /* A */
        a_tile[y][x] = row < m ? a[row * k + start + x] : 0.0f;
        b_tile[y][x] = b[(start + y) * n + column];
        /* B */
        if (row < m) {
            for (int i = 0; i < 16; i++) sum += a_tile[y][i] * b_tile[i][x];
            /* C */
        }
        /* D */
    }
    /* E */
    if (row < m) c[row * n + column] = sum;
}
"""


def barriers():
    """Return the letters of the places where __syncthreads() has to stand, e.g. "CE"; no more than
    are needed."""
    return hole(4, "which of the places A to E need a barrier?")


# ------------------------------------------------------------------- loads that coalesce: holes 5-6


def sectors(stride):
    """Return how many 32-byte sectors one load of a warp touches if lane i reads float number
    stride * i; stride is 0 or more."""
    return hole(
        5,
        "how many sectors do 32 floats touch if consecutive ones are stride floats from each other?",
        stride,
    )


ROW_SUMS = """
// y[r] = the sum of row r of x (rows, 32). A block of 32 threads, one warp, brings 32 rows to shared memory.
// (33, so that columns do not hit one bank; not your task.)
__global__ void row_sums(const float* x, float* y) {
    __shared__ float tile[32][33];
    const float* rows = x + blockIdx.x * 32 * 32;
    for (int step = 0; step < 32; step++) {
        const int row = ROW, column = COLUMN;
        tile[row][column] = rows[row * 32 + column];
    }
    __syncthreads();
    float sum = 0.0f;
    for (int i = 0; i < 32; i++) sum += tile[threadIdx.x][i];
    y[blockIdx.x * 32 + threadIdx.x] = sum;
}
"""


def row_and_column():
    """Return C for ROW and COLUMN, two strings: which number this thread loads in this step. All
    1024 must be loaded."""
    return hole(
        6,
        "row and column from step and threadIdx.x, so that a warp's load touches as few sectors "
        "as it can",
    )
