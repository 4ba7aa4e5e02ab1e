// Which few of many numbers to send: the k largest |x|, or all of at least a threshold, in the order of their places.
//
// Two steps: find the size of the k-th largest, then gather. A size is |x| as the bits of an unsigned, which are in the
// order of the values, NaN last: it counts as the largest, so whoever takes the largest few sees it. `state` holds what
// one launch leaves to the next on the device: the size, and how many of equal size to take, the first ones.
//
//   kth_v1                       a thread an element counts who stands before it: n reads each, n^2 comparisons
//   kth_v2_count, kth_v2_pick    radix selection: 4 rounds of 8 bits from the top; a round counts 256 digits among those
//                                who share the digits found so far, then walks down to the digit of the k-th: 4 n reads
//
//   select_count, select_write   each block counts its own 1024; with the sums of the counts before it, it knows where
//                                its own go: 2 n reads, 4 + sizeof(T) bytes written for each one taken
//
// So version 2 reads n sizeof(T) bytes six times, version 1 n + 2 times. Counters are integers, so atomics on them give
// the same each time.
// Source: Alabi et al. 2012, "Fast k-selection algorithms for graphics processing units"; Blelloch 1990, prefix sums.
#include "common.cuh"

constexpr int a_block = 1024;                                    // elements

// All NaN are of one size, whatever their other bits.
template <typename T> __device__ __forceinline__ unsigned size_of(T x) {
    const unsigned size = __float_as_uint(to_float(x)) & 0x7fffffffu;
    return size > 0x7f800000u ? 0x7fffffffu : size;
}

template <typename T> __global__ void kth_v1(const T* x, unsigned* state, int count, int k) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const unsigned own = size_of(x[i]);
    int larger = 0, equal_before = 0;
    for (int other = 0; other < count; other++) {
        const unsigned size = size_of(x[other]);
        larger += size > own;
        equal_before += size == own && other < i;
    }
    if (larger + equal_before != k - 1) return;                  // of all threads one goes on
    state[0] = own;
    state[1] = k - larger;
}

// state[0]: the digits found so far, 0 below them; digits: 256 counters, 0 before the launch; shift: 24, 16, 8, 0.
template <typename T>
__global__ void kth_v2_count(const T* x, const unsigned* state, unsigned* digits, int count, int shift) {
    __shared__ unsigned own[256];                                // blockDim.x = 256
    own[threadIdx.x] = 0;
    __syncthreads();
    const unsigned found = state[0], above = shift < 24 ? 0xffffffffu << (shift + 8) : 0;
    for (long long i = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x; i < count; i += gridDim.x * 256ll) {
        const unsigned size = size_of(x[i]);
        if ((size & above) == found) atomicAdd(&own[size >> shift & 255], 1u);
    }
    __syncthreads();
    if (own[threadIdx.x]) atomicAdd(&digits[threadIdx.x], own[threadIdx.x]);
}

// One block. state[1]: the place of the wanted one among those who share the digits.
__global__ void kth_v2_pick(const unsigned* digits, unsigned* state, int shift) {
    __shared__ unsigned counts[256];                             // blockDim.x = 256
    counts[threadIdx.x] = digits[threadIdx.x];
    __syncthreads();
    if (threadIdx.x > 0) return;
    unsigned digit = 255, left = state[1];
    while (counts[digit] < left) left -= counts[digit--];
    state[0] |= digit << shift;
    state[1] = left;
}

// Of each block's elements, how many are larger than state[0], and how many as large.
template <typename T>
__global__ void select_count(const T* x, const unsigned* state, int* larger, int* equal, int count) {
    const unsigned size = state[0];
    int larger_here = 0, equal_here = 0;
    for (int start = 0; start < a_block; start += blockDim.x) {
        const long long i = static_cast<long long>(blockIdx.x) * a_block + start + threadIdx.x;
        larger_here += __syncthreads_count(i < count && size_of(x[i]) > size);
        equal_here += __syncthreads_count(i < count && size_of(x[i]) == size);
    }
    if (threadIdx.x > 0) return;
    larger[blockIdx.x] = larger_here;
    equal[blockIdx.x] = equal_here;
}

// larger, equal: sums of the counts up to and with each block. Of the equal ones the first state[1] are taken.
template <typename T>
__global__ void select_write(const T* x, const unsigned* state, const int* larger, const int* equal, int* indices, T* values,
                             int count) {
    __shared__ int warps_larger[8], warps_equal[8];              // blockDim.x = 256
    const unsigned size = state[0], lanes_before = (1u << threadIdx.x % 32) - 1;
    const int warp = threadIdx.x / 32, taken = state[1];
    int larger_before = blockIdx.x ? larger[blockIdx.x - 1] : 0, equal_before = blockIdx.x ? equal[blockIdx.x - 1] : 0;
    for (int start = 0; start < a_block; start += blockDim.x) {
        const long long i = static_cast<long long>(blockIdx.x) * a_block + start + threadIdx.x;
        const T number = i < count ? x[i] : from_float<T>(0.0f);
        const bool is_larger = i < count && size_of(number) > size, is_equal = i < count && size_of(number) == size;
        const unsigned larger_lanes = __ballot_sync(all_lanes, is_larger), equal_lanes = __ballot_sync(all_lanes, is_equal);
        if (threadIdx.x % 32 == 0) {
            warps_larger[warp] = __popc(larger_lanes);
            warps_equal[warp] = __popc(equal_lanes);
        }
        __syncthreads();
        int larger_mine = larger_before + __popc(larger_lanes & lanes_before);
        int equal_mine = equal_before + __popc(equal_lanes & lanes_before);
        for (int other = 0; other < 8; other++) {
            larger_before += warps_larger[other];
            equal_before += warps_equal[other];
            if (other >= warp) continue;
            larger_mine += warps_larger[other];
            equal_mine += warps_equal[other];
        }
        if (is_larger || (is_equal && equal_mine < taken)) {
            const int place = larger_mine + (equal_mine < taken ? equal_mine : taken);
            indices[place] = static_cast<int>(i);
            values[place] = number;
        }
        __syncthreads();
    }
}
