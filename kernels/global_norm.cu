// The norm of many gradients together: sqrt of the sum of squares over all elements of all tensors, as one number.
//
// The work is reading: all the gradients' bytes once, 2 operations an element. The result stays on the device: whoever
// needs it (adam.cu) reads it there, and the host waits for nothing. inf or NaN in any element makes it inf or NaN, so
// the same number answers whether a step overflowed.
//
//   v1  a launch a tensor, a block each  one multiprocessor at work; full sectors
//   v2  a block a chunk, one launch      all tensors through a table of pointers; sums of chunks, then their sum
//   v3  the same, 16-byte loads          a quarter (float) or an eighth of the requests
//
// No atomics: each chunk's sum has a place of its own, and one block adds them up in double, always in the same order.
// A chunk's sum is float32: it overflows, and counts as an overflow of the step, from elements of about 3e17 on.
// Source: Pascanu, Mikolov and Bengio 2013 (clipping by the norm of all gradients).
#include "common.cuh"

// The sum of a chunk's squares, the same for all threads of the block.
template <typename T> __device__ __forceinline__ float squares_of(const T* x, long long count, float* partial) {
    float sum = 0.0f;
    for (long long i = threadIdx.x; i < count; i += blockDim.x) {
        const float number = to_float(x[i]);
        sum += number * number;
    }
    return block_sum(sum, partial);
}

template <typename T> __global__ void global_norm_v1(const T* x, float* sums, int place, long long length) {
    __shared__ float partial[32];
    const float sum = squares_of(x, length, partial);
    if (threadIdx.x == 0) sums[place] = sum;
}

template <typename T> __global__ void global_norm_v2(const T* const* tensors, const int* owner, const long long* start,
                                                     const long long* lengths, float* sums, int chunk) {
    __shared__ float partial[32];
    const int tensor = owner[blockIdx.x];
    const long long first = start[blockIdx.x], left = lengths[tensor] - first;
    const float sum = squares_of(tensors[tensor] + first, left < chunk ? left : chunk, partial);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

template <typename T> __global__ void global_norm_v3(const T* const* tensors, const int* owner, const long long* start,
                                                     const long long* lengths, float* sums, int chunk) {
    __shared__ float partial[32];
    constexpr int n = Pack<T>::size;
    const int tensor = owner[blockIdx.x];
    const long long first = start[blockIdx.x], left = lengths[tensor] - first;
    const int count = left < chunk ? left : chunk;
    const T* x = tensors[tensor] + first;
    float sum = 0.0f;
    for (int i = threadIdx.x * n; i + n <= count; i += blockDim.x * n) {
        const Pack<T> pack = load_pack(x + i);
#pragma unroll
        for (int k = 0; k < n; k++) sum += to_float(pack.v[k]) * to_float(pack.v[k]);
    }
    const int rest = count / n * n + threadIdx.x;                // fewer than n elements are left over
    const float last = rest < count ? to_float(x[rest]) : 0.0f;
    sum += last * last;
    sum = block_sum(sum, partial);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// One block: squares[0] = sum of sums, or norm[0] = factor times its root; whichever is not null.
__global__ void global_norm_finish(const float* sums, int count, double* squares, float* norm, float factor) {
    __shared__ double partial[256];                              // blockDim.x = 256
    double sum = 0.0;
    for (int i = threadIdx.x; i < count; i += 256) sum += sums[i];
    partial[threadIdx.x] = sum;
    __syncthreads();
    for (int half = 128; half > 0; half /= 2) {
        if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0 && squares) squares[0] = partial[0];
    if (threadIdx.x == 0 && norm) norm[0] = factor * static_cast<float>(sqrt(partial[0]));
}
