// Adam and AdamW over all tensors of a model, with float32 master weights; loss scale, clipping and overflow inside.
//
//   g = gradient s                           s = scale, times limit / (norm + 1e-6) where norm > limit
//   Adam: g += decay p    AdamW: p -= lr decay p
//   m = b1 m + (1 - b1) g      v = b2 v + (1 - b2) g^2
//   p -= lr m' / (sqrt(v') + eps)            m' = m / (1 - b1^t), v' = v / (1 - b2^t)
//   copy = p in T                            the low-precision weights that the next step computes with
//
// The work is moving bytes: p, m and v in and out, 24 bytes an element, the gradient in and the copy out,
// 2 sizeof(T): 28 with half types, for about 14 operations. The dozen passes of array arithmetic move 4 times as much.
//
//   v1  a launch a tensor           a thread an element; hundreds of launches, most of them tiny
//   v2  one launch, a block a chunk all tensors through tables of pointers
//   v3  the same, by fours          16-byte loads of p, m and v, 4 sizeof(T) of gradients and copies: whole sectors
//
// Nothing waits for the host: adam_prepare reads the norm where it was computed (global_norm.cu), or a factor that was
// made of it, counts the step, and leaves this update's numbers in `numbers`; where the norm is inf or NaN nothing
// changes and the step does not count. A factor of NaN makes all of the weights NaN. The rate is a number, or is read
// where `rate` points to: then the same launch, in a captured step (minidist/parallel/hybrid/cuda_graph.py), goes on at another rate.
// Sources: Kingma and Ba 2015; Loshchilov and Hutter 2019.
#include "common.cuh"

// What adam_prepare leaves: numbers[0] s, [1] lr sqrt(1 - b2^t) / (1 - b1^t), [2] eps sqrt(1 - b2^t), [3] 1 to update,
// [4] what a tensor's decay is multiplied by: lr where it stands apart (AdamW), else 1.
// Both corrections move out of the division:  m' / (sqrt(v') + eps) = [1] / lr  m / (sqrt(v) + [2]).
__global__ void adam_prepare(const float* norm, const float* factor, const double* rate, int* count, float* numbers,
                             double lr, double b1, double b2, double eps, double limit, double scale, bool apart) {
    if (rate) lr = rate[0];
    const double size = norm ? norm[0] : 0.0;                    // of the gradients with the loss scale taken out
    const bool update = size - size == 0.0;                      // finite
    if (update) count[0] += 1;
    const double correction = sqrt(1.0 - pow(b2, count[0]));
    const double clip = limit > 0.0 && limit < size + 1e-6 ? limit / (size + 1e-6) : 1.0;
    numbers[0] = static_cast<float>(factor ? scale * clip * factor[0] : scale * clip);
    numbers[1] = update ? static_cast<float>(lr * correction / (1.0 - pow(b1, count[0]))) : 0.0f;
    numbers[2] = update ? static_cast<float>(eps * correction) : 0.0f;
    numbers[3] = update ? 1.0f : 0.0f;
    numbers[4] = apart ? static_cast<float>(lr) : 1.0f;
}

struct Rule { float scale, rate, eps, decay, b1, b2, rest1, rest2; bool apart; };

// One element; returns the new weight. `apart`: AdamW, where the rule's decay has been multiplied by lr.
__device__ __forceinline__ float moved(float p, float g, float& m, float& v, const Rule& rule) {
    g *= rule.scale;
    if (rule.apart) p -= rule.decay * p;
    else g += rule.decay * p;
    const float one = rule.b1 * m + rule.rest1 * g, two = rule.b2 * v + rule.rest2 * g * g;
    m = one;
    v = two;
    return p - rule.rate * one / (sqrtf(two) + rule.eps);
}

__device__ __forceinline__ Rule rule_of(const float* numbers, float decay, float b1, float b2, float rest1, float rest2,
                                        bool apart) {
    return {numbers[0], numbers[1], numbers[2], numbers[4] * decay, b1, b2, rest1, rest2, apart};
}

template <typename T> __global__ void adam_v1(float* p, const T* g, float* m, float* v, T* copy, const float* numbers,
                                              float decay, float b1, float b2, float rest1, float rest2, bool apart,
                                              long long length) {
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= length || numbers[3] == 0.0f) return;
    const Rule rule = rule_of(numbers, decay, b1, b2, rest1, rest2, apart);
    const float weight = p[i] = moved(p[i], to_float(g[i]), m[i], v[i], rule);
    if (copy) copy[i] = from_float<T>(weight);
}

template <typename T> __global__ void adam_v2(float* const* weights, const T* const* gradients, float* const* firsts,
                                              float* const* seconds, T* const* copies, const float* decays,
                                              const int* owner, const long long* start, const long long* lengths,
                                              const float* numbers, float b1, float b2, float rest1, float rest2,
                                              bool apart, int chunk) {
    if (numbers[3] == 0.0f) return;
    const int tensor = owner[blockIdx.x];
    const long long first = start[blockIdx.x], left = lengths[tensor] - first;
    const Rule rule = rule_of(numbers, decays[tensor], b1, b2, rest1, rest2, apart);
    float *p = weights[tensor] + first, *m = firsts[tensor] + first, *v = seconds[tensor] + first;
    const T* g = gradients[tensor] + first;
    T* copy = copies ? copies[tensor] + first : nullptr;
    for (int i = threadIdx.x; i < chunk && i < left; i += blockDim.x) {
        const float weight = p[i] = moved(p[i], to_float(g[i]), m[i], v[i], rule);
        if (copy) copy[i] = from_float<T>(weight);
    }
}

template <typename T> __global__ void adam_v3(float* const* weights, const T* const* gradients, float* const* firsts,
                                              float* const* seconds, T* const* copies, const float* decays,
                                              const int* owner, const long long* start, const long long* lengths,
                                              const float* numbers, float b1, float b2, float rest1, float rest2,
                                              bool apart, int chunk) {
    if (numbers[3] == 0.0f) return;
    const int tensor = owner[blockIdx.x];                        // arrays begin at multiples of 16 bytes, chunks too
    const long long first = start[blockIdx.x], left = lengths[tensor] - first;
    const int count = left < chunk ? left : chunk;
    const Rule rule = rule_of(numbers, decays[tensor], b1, b2, rest1, rest2, apart);
    float *p = weights[tensor] + first, *m = firsts[tensor] + first, *v = seconds[tensor] + first;
    const T* g = gradients[tensor] + first;
    T* copy = copies ? copies[tensor] + first : nullptr;
    for (int i = threadIdx.x * 4; i + 4 <= count; i += blockDim.x * 4) {
        Quad<T> slopes = load_quad(g + i);
        Pack<float> weight = load_pack(p + i), one = load_pack(m + i), two = load_pack(v + i);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            weight.v[k] = moved(weight.v[k], to_float(slopes.v[k]), one.v[k], two.v[k], rule);
            slopes.v[k] = from_float<T>(weight.v[k]);
        }
        store_pack(p + i, weight);
        store_pack(m + i, one);
        store_pack(v + i, two);
        if (copy) store_quad(copy + i, slopes);
    }
    const int rest = count / 4 * 4 + threadIdx.x;                // fewer than four elements are left over
    if (rest < count) {
        const float weight = p[rest] = moved(p[rest], to_float(g[rest]), m[rest], v[rest], rule);
        if (copy) copy[rest] = from_float<T>(weight);
    }
}
