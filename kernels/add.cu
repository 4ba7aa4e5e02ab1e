// y = a + b, where b may be one part of a that is repeated: a bias beside rows, positions beside sequences.
//
// The work is moving bytes: a is read and y written, 2 B with B = elements sizeof(T), and b is read, up to 1 B more; one
// addition an element, in float32, rounded once.
//
//   v1  a thread an element
//   v2  a thread 16 bytes of a; of b too, whose length is a multiple of that, or a's own
#include "common.cuh"

// n: elements of a and y, which may be the same memory. period: of b; n is a multiple of it.
template <typename T> __global__ void add_v1(const T* a, const T* b, T* y, long long n, long long period) {
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) y[i] = from_float<T>(to_float(a[i]) + to_float(b[i < period ? i : i % period]));
}

template <typename T> __global__ void add_v2(const T* a, const T* b, T* y, long long n, long long period) {
    constexpr int size = Pack<T>::size;
    const long long i = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * size;
    if (i + size <= n) {
        Pack<T> sum = load_pack(a + i);
        const Pack<T> other = load_pack(b + (i < period ? i : i % period));
#pragma unroll
        for (int k = 0; k < size; k++) sum.v[k] = from_float<T>(to_float(sum.v[k]) + to_float(other.v[k]));
        store_pack(y + i, sum);
    } else {
        for (long long last = i; last < n; last++) {             // one thread has fewer than a pack, and b is as long as a
            y[last] = from_float<T>(to_float(a[last]) + to_float(b[last]));
        }
    }
}
