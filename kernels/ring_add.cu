// The add of a ring step, total += incoming, where numbers travel in a small type T and the sum stays float32.
//
// In a ring all-reduce a chunk gathers P - 1 additions. With bf16 on both sides of each, small gradients vanish beside
// the sum; here each rank adds its own float32 numbers to what came, so only what travels is rounded, once a step.
//
// The work is moving bytes: `incoming` and `own` are read and `outgoing` is written, what the next rank gets, and, in the
// last step, `total` in float32: 4 + 2 sizeof(T) bytes an element (+ 4), for one addition.
//
//   v1  a thread an element
//   v2  16 bytes of T a load, own and total in packs of 4 floats: with half types a thread takes two neighbouring packs,
//       so that a warp's load fills half of each sector and the next one finds the other half in a cache
// Source: Patarasuk and Yuan 2009 (ring all-reduce).
#include "common.cuh"

template <typename T>
__global__ void ring_add_v1(const T* incoming, const float* own, T* outgoing, float* total, long long count) {
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const float sum = to_float(incoming[i]) + own[i];
    if (outgoing) outgoing[i] = from_float<T>(sum);
    if (total) total[i] = sum;
}

template <typename T>
__global__ void ring_add_v2(const T* incoming, const float* own, T* outgoing, float* total, long long count) {
    constexpr int n = Pack<T>::size;                             // every array begins at a multiple of 16 bytes
    const long long i = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * n;
    if (i + n <= count) {
        const Pack<T> came = load_pack(incoming + i);
        Pack<T> rounded;
#pragma unroll
        for (int four = 0; four < n; four += 4) {
            Pack<float> sum = load_pack(own + i + four);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                sum.v[k] += to_float(came.v[four + k]);
                rounded.v[four + k] = from_float<T>(sum.v[k]);
            }
            if (total) store_pack(total + i + four, sum);
        }
        if (outgoing) store_pack(outgoing + i, rounded);
    } else {
        for (long long last = i; last < count; last++) {         // one thread has fewer than n elements
            const float sum = to_float(incoming[last]) + own[last];
            if (outgoing) outgoing[last] = from_float<T>(sum);
            if (total) total[last] = sum;
        }
    }
}
