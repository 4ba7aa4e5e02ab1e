// Rotary positions: the pairs (x[i], x[i + width/2]) of each token turned by the angle of its position; x (rows, width),
// rows in the order (…, token), cos and sin (tokens, width/2) in float32.
//
//   y[i] = x[i] cos - x[i + half] sin        y[i + half] = x[i + half] cos + x[i] sin
//
// The gradient turns back: the same kernel with sin's sign changed (`turn` = -1).
// The work is moving bytes: x is read and y written, 2 sizeof(T) bytes an element, for 3 operations; cos and sin are small
// and stay in a cache, since all heads and sequences share them.
//
//   v1  a thread a pair
//   v2  16 bytes a load: a thread takes one pack of the first half and the matching one of the second
// Source: Su et al. 2021; pairs as in GPT-NeoX.
#include "common.cuh"

template <typename T> __global__ void rotary_v1(const T* x, const float* cos, const float* sin, T* y, float turn,
                                                int tokens, int half, long long pairs) {
    const long long pair = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (pair >= pairs) return;
    const long long row = pair / half;
    const int i = pair % half, angle = row % tokens * half + i;
    const float c = cos[angle], s = turn * sin[angle];
    const float a = to_float(x[row * 2 * half + i]), b = to_float(x[row * 2 * half + half + i]);
    y[row * 2 * half + i] = from_float<T>(a * c - b * s);
    y[row * 2 * half + half + i] = from_float<T>(b * c + a * s);
}

template <typename T> __global__ void rotary_v2(const T* x, const float* cos, const float* sin, T* y, float turn,
                                                int tokens, int half, long long pairs) {
    constexpr int n = Pack<T>::size;                             // half is a multiple of n, x and y of 16 bytes
    const long long pair = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * n;
    if (pair >= pairs) return;
    const long long row = pair / half;
    const int i = pair % half, angle = row % tokens * half + i;
    Pack<T> a = load_pack(x + row * 2 * half + i), b = load_pack(x + row * 2 * half + half + i);
#pragma unroll
    for (int four = 0; four < n; four += 4) {
        const Pack<float> c = load_pack(cos + angle + four), s = load_pack(sin + angle + four);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float first = to_float(a.v[four + k]), second = to_float(b.v[four + k]);
            a.v[four + k] = from_float<T>(first * c.v[k] - second * turn * s.v[k]);
            b.v[four + k] = from_float<T>(second * c.v[k] + first * turn * s.v[k]);
        }
    }
    store_pack(y + row * 2 * half + i, a);
    store_pack(y + row * 2 * half + half + i, b);
}
