// Every line of PTX in minidist, each beside its twin for the CPU build: matrix fragments, asynchronous copies, and
// products that keep tiny numbers.
//
// A tensor core multiplies small matrices that the 32 lanes of a warp hold together. In m16n8k16 the lane of number
// 4 g + t (g from 0 to 7, t from 0 to 3) holds, two numbers a register (the left one in the low half):
//
//   A (16, 16)   a[0]: row g,     columns 2t, 2t+1       a[1]: row g+8, columns 2t, 2t+1
//                a[2]: row g,     columns 2t+8, 2t+9     a[3]: row g+8, columns 2t+8, 2t+9
//   B (16, 8)    b[0]: rows 2t, 2t+1, column g           b[1]: rows 2t+8, 2t+9, column g
//   D (16, 8)    d[0], d[1]: row g, columns 2t, 2t+1     d[2], d[3]: row g+8, columns 2t, 2t+1     (float32)
//
// In m16n8k32 it holds four numbers of one byte in a register: where k is 2t, 2t+1 above it is 4t to 4t+3 here, and 16
// stands for 8. D is the same.
//
// product and quotient round as float32 does and keep numbers below 2^-126: CuPy compiles with -ftz=true, under which *
// and / take such numbers for 0. Where a kernel promises the bits of its reference it multiplies and divides by these.
//
// Source: NVIDIA, "PTX ISA", sections on mma, ldmatrix, cp.async, mul and div. All of it runs on sm_80 and newer, but for
// products of bytes: sm_89.
#pragma once
#include "common.cuh"

#ifdef CUDA_ON_CPU

// d += A B for fragments of `per` numbers a register; `left` and `right` give number i of a register of A, or B, as a float.
template <int per, typename Left, typename Right>
void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], Left left, Right right) {
    struct Fragments { unsigned a[4], b[2]; } mine{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}}, all[32];
    cuda_on_cpu::from_all_lanes(all_lanes, &mine, sizeof mine, all, __FILE__, __LINE__);
    const int g = cuda_on_cpu::lane() / 4, t = cuda_on_cpu::lane() % 4;
    for (int i = 0; i < 4; i++) {
        const int row = g + 8 * (i / 2), column = 2 * t + i % 2;
        for (int k = 0; k < 8 * per; k++) {
            const int lane = k % (4 * per) / per, half = k / (4 * per);
            d[i] += left(all[row % 8 * 4 + lane].a[row / 8 + 2 * half], k % per) * right(all[column * 4 + lane].b[half], k % per);
        }
    }
}

template <typename T> float half_of(unsigned pair, int which) {
    T x;
    x.bits = static_cast<unsigned short>(pair >> 16 * which);
    return to_float(x);
}
template <int exponent> float float8_of(unsigned four, int which) {
    return cuda_on_cpu::decode<exponent, 7 - exponent, exponent == 4>(four >> 8 * which & 0xff);
}

// d += A B for matrices of T, __half or __nv_bfloat16. Every lane of the warp calls it.
template <typename T> void mma_16x8x16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    multiply<2>(d, a, b, half_of<T>, half_of<T>);
}

// The same for fp8 bytes; `exponent`: how many bits, 4 (e4m3) or 5 (e5m2).
template <int a_exponent, int b_exponent>
void mma_16x8x32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    multiply<4>(d, a, b, float8_of<a_exponent>, float8_of<b_exponent>);
}

template <int matrices, bool transposed> __attribute__((noinline)) void ldmatrix(unsigned (&r)[matrices], const void* row) {
    const char* rows[32];
    const int lane = cuda_on_cpu::lane();
    if (lane < 8 * matrices) cuda_on_cpu::range_access(row, 16, false, __builtin_return_address(0));
    cuda_on_cpu::from_all_lanes(all_lanes, &row, sizeof row, rows, __FILE__, __LINE__);
    for (int m = 0; m < matrices; m++) {
        unsigned short pair[2];
        for (int k = 0; k < 2; k++) {
            const int at_row = transposed ? 2 * (lane % 4) + k : lane / 4, column = transposed ? lane / 4 : 2 * (lane % 4) + k;
            pair[k] = *reinterpret_cast<const unsigned short*>(rows[8 * m + at_row] + 2 * column);
        }
        r[m] = pair[0] | static_cast<unsigned>(pair[1]) << 16;
    }
}

UNCHECKED void cp_async_16(void* shared, const void* global) {
    cuda_on_cpu::async_copy(shared, global, 16, __builtin_return_address(0));
}
inline void cp_async_commit() { cuda_on_cpu::async_commit(); }
template <int groups> void cp_async_wait() { cuda_on_cpu::async_wait(groups); }

inline float product(float a, float b) { return a * b; }
inline float quotient(float a, float b) { return a / b; }

#else

template <typename T> __device__ __forceinline__ void mma_16x8x16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]);
template <>
__device__ __forceinline__ void mma_16x8x16<__half>(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
__device__ __forceinline__ void mma_16x8x16<__nv_bfloat16>(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#define MMA_16X8X32(A, B)                                                                                       \
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32." A "." B ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
template <int a_exponent, int b_exponent>
__device__ __forceinline__ void mma_16x8x32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    static_assert(a_exponent / 2 == 2 && b_exponent / 2 == 2, "fp8 is e4m3 or e5m2");
    if constexpr (a_exponent == 4 && b_exponent == 4) MMA_16X8X32("e4m3", "e4m3");
    else if constexpr (a_exponent == 4) MMA_16X8X32("e4m3", "e5m2");
    else if constexpr (b_exponent == 4) MMA_16X8X32("e5m2", "e4m3");
    else MMA_16X8X32("e5m2", "e5m2");
}
#undef MMA_16X8X32

// Addresses of shared memory as PTX takes them.
__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Load 1, 2 or 4 matrices of 8 x 8 two-byte numbers from shared memory, laid out over the lanes as fragments are: lane
// 8 m + i gives the address of row i of matrix m (16 bytes, at a multiple of 16). Transposed: r holds columns for rows.
template <int matrices, bool transposed> __device__ __forceinline__ void ldmatrix(unsigned (&r)[matrices], const void* row) {
    const unsigned at = shared_address(row);
    if constexpr (matrices == 4 && !transposed) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
    } else if constexpr (matrices == 4) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
    } else if constexpr (matrices == 2 && !transposed) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(at) : "memory");
    } else if constexpr (matrices == 2) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                     : "=r"(r[0]), "=r"(r[1]) : "r"(at) : "memory");
    } else {
        static_assert(matrices == 2 || matrices == 4, "ldmatrix loads 2 or 4 matrices here");
    }
}

// 16 bytes from global to shared memory while the thread goes on. Copies belong to the group that the next commit
// closes; after wait<n>() all but the newest n groups of this thread have arrived; others see them after a barrier.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared_address(shared)), "l"(global) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int groups> __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" :: "n"(groups) : "memory");
}

__device__ __forceinline__ float product(float a, float b) {
    float result;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
__device__ __forceinline__ float quotient(float a, float b) {
    float result;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

#endif

// Two numbers in one register, as fragments want them: the first in the low half.
template <typename T> __device__ __forceinline__ unsigned pack_pair(float low, float high) {
    struct alignas(4) Pair { T low, high; } pair{from_float<T>(low), from_float<T>(high)};
    return *reinterpret_cast<const unsigned*>(&pair);
}
