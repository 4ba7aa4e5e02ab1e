// CUDA's device language for g++: what a .cu of ours needs, so that the same source runs, and is checked, on a CPU.
//
//   threads of a block    fibres of one CPU thread, run in a random order that a seed draws; blocks run one after another
//   memory                g++ -fsanitize=thread turns every load and store into a call; memory.cpp answers these calls
//   __syncthreads, warps  a fibre waits until its block, or the lanes its mask names, have come to the same line
//
// Differences to a GPU: intrinsics (__expf, …) round as well as the exact functions; no arithmetic on half types (convert
// to float: on a GPU it would round at each step); addresses of `__shared__` arrays are further apart.
#pragma once
#include <cmath>
#include <cstdint>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
// One variable for all blocks, which run one after another; on_cpu.py finds it in the symbol table as a static variable
// of a function. A gap before each, so that what lies beyond one is not the next.
#define __shared__                                                                                     \
    static __attribute__((aligned(128), used)) char CUDA_ON_CPU_NAME(gap, __COUNTER__)[128];           \
    static __attribute__((aligned(128)))
#define CUDA_ON_CPU_NAME(a, b) CUDA_ON_CPU_JOIN(a, b)
#define CUDA_ON_CPU_JOIN(a, b) cuda_on_cpu_##a##b
#define CUDA_ON_CPU 1
#define UNCHECKED __attribute__((no_sanitize_thread, noinline))     // its own loads and stores are not a kernel's

using std::isfinite, std::isinf, std::isnan;

// ---------------------------------------------------------------------------------------- where a thread stands

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };

namespace cuda_on_cpu {  // answered by runtime.cpp and memory.cpp
__attribute__((const)) uint3 thread_index();
__attribute__((const)) uint3 block_index();
__attribute__((const)) uint3 block_size();
__attribute__((const)) uint3 grid_size();
char* dynamic_shared();

int barrier(int vote, const char* file, int line);           // how many threads voted non-zero
void sync_warp(unsigned mask, const char* file, int line);
// Every lane of `mask` brings nbytes (at most 128) and gets those of lane `source`, or of all 32 lanes one after another.
void from_lane(unsigned mask, void* value, int nbytes, int source, const char* file, int line);
void from_all_lanes(unsigned mask, const void* value, int nbytes, void* all, const char* file, int line);
unsigned ballot(unsigned mask, bool vote, const char* file, int line);
void fence();
void atomic_access(void* address, int nbytes, void* caller);
void range_access(const void* address, int nbytes, bool write, void* caller);      // checked, not counted
// cp.async: the bytes arrive when the thread waits for their group; before that a read of them is an error.
void async_copy(void* to, const void* from, int nbytes, void* caller);
void async_commit();
void async_wait(int groups);
[[noreturn]] void refuse(const char* what, const char* file, int line);
}  // namespace cuda_on_cpu

#define threadIdx (cuda_on_cpu::thread_index())
#define blockIdx (cuda_on_cpu::block_index())
#define blockDim (cuda_on_cpu::block_size())
#define gridDim (cuda_on_cpu::grid_size())
constexpr int warpSize = 32;

// ------------------------------------------------------------------------------------ waiting for other threads

#define __syncthreads() ((void)cuda_on_cpu::barrier(0, __FILE__, __LINE__))
#define __syncthreads_count(vote) cuda_on_cpu::barrier((vote) != 0, __FILE__, __LINE__)
#define __syncthreads_or(vote) (cuda_on_cpu::barrier((vote) != 0, __FILE__, __LINE__) != 0)
#define __syncthreads_and(vote) (cuda_on_cpu::barrier((vote) == 0, __FILE__, __LINE__) == 0)
#define __threadfence() cuda_on_cpu::fence()
#define __threadfence_block() ((void)0)

#define __ballot_sync(mask, vote) cuda_on_cpu::ballot(mask, vote, __FILE__, __LINE__)
#define __any_sync(mask, vote) (__ballot_sync(mask, vote) != 0)
#define __all_sync(mask, vote) (__ballot_sync(mask, !(vote)) == 0)

namespace cuda_on_cpu {
inline int lane() {
    const uint3 t = thread_index(), n = block_size();
    return (t.x + n.x * (t.y + n.y * t.z)) % 32;
}

struct Here { const char* file; int line; };

template <typename T> T shuffle(Here here, unsigned mask, T value, int source) {
    from_lane(mask, &value, sizeof(T), source, here.file, here.line);
    return value;
}

// A group of `width` lanes (a power of two) shuffles within itself; a source outside it is the lane itself.
template <typename T> T shfl(Here here, unsigned mask, T value, int source, int width = 32) {
    return shuffle(here, mask, value, lane() / width * width + source % width);
}
template <typename T> T shfl_xor(Here here, unsigned mask, T value, int bits, int width = 32) {
    const int source = lane() ^ bits;
    return shuffle(here, mask, value, source / width > lane() / width ? lane() : source);
}
template <typename T> T shfl_down(Here here, unsigned mask, T value, int by, int width = 32) {
    return shuffle(here, mask, value, lane() % width + by < width ? lane() + by : lane());
}
template <typename T> T shfl_up(Here here, unsigned mask, T value, int by, int width = 32) {
    return shuffle(here, mask, value, lane() % width >= by ? lane() - by : lane());
}
inline void syncwarp(Here here, unsigned mask = 0xffffffffu) { sync_warp(mask, here.file, here.line); }
}  // namespace cuda_on_cpu

#define CUDA_ON_CPU_HERE (cuda_on_cpu::Here{__FILE__, __LINE__})
#define __shfl_sync(...) cuda_on_cpu::shfl(CUDA_ON_CPU_HERE, __VA_ARGS__)
#define __shfl_xor_sync(...) cuda_on_cpu::shfl_xor(CUDA_ON_CPU_HERE, __VA_ARGS__)
#define __shfl_down_sync(...) cuda_on_cpu::shfl_down(CUDA_ON_CPU_HERE, __VA_ARGS__)
#define __shfl_up_sync(...) cuda_on_cpu::shfl_up(CUDA_ON_CPU_HERE, __VA_ARGS__)
#define __syncwarp(...) cuda_on_cpu::syncwarp(CUDA_ON_CPU_HERE __VA_OPT__(,) __VA_ARGS__)

// -------------------------------------------------------------------------------------------------------- atomics

namespace cuda_on_cpu {
template <typename T, typename F> UNCHECKED T atomic(T* address, F change) {
    atomic_access(address, sizeof(T), __builtin_return_address(0));
    const T old = *address;
    *address = change(old);
    return old;
}
template <typename T> struct Same { using type = T; };       // the value converts to what the address points to
template <typename T> using As = typename Same<T>::type;
}  // namespace cuda_on_cpu

#define CUDA_ON_CPU_ATOMIC(name, result)                                                          \
    template <typename T> __forceinline__ T name(T* address, cuda_on_cpu::As<T> value) {         \
        return cuda_on_cpu::atomic(address, [=](T old) -> T { return result; });                 \
    }
CUDA_ON_CPU_ATOMIC(atomicAdd, old + value)
CUDA_ON_CPU_ATOMIC(atomicSub, old - value)
CUDA_ON_CPU_ATOMIC(atomicMax, old < value ? value : old)
CUDA_ON_CPU_ATOMIC(atomicMin, value < old ? value : old)
CUDA_ON_CPU_ATOMIC(atomicExch, value)
CUDA_ON_CPU_ATOMIC(atomicAnd, old & value)
CUDA_ON_CPU_ATOMIC(atomicOr, old | value)
CUDA_ON_CPU_ATOMIC(atomicXor, old ^ value)
CUDA_ON_CPU_ATOMIC(atomicInc, old >= value ? T(0) : old + 1)
template <typename T>
__forceinline__ T atomicCAS(T* address, cuda_on_cpu::As<T> compare, cuda_on_cpu::As<T> value) {
    return cuda_on_cpu::atomic(address, [=](T old) -> T { return old == compare ? value : old; });
}

// --------------------------------------------------------------------------------------------------- vector types

#define CUDA_ON_CPU_VECTORS(T, name)                                                              \
    struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                            \
    struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) name##4 { T x, y, z, w; };            \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                    \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
CUDA_ON_CPU_VECTORS(float, float)
CUDA_ON_CPU_VECTORS(int, int)
CUDA_ON_CPU_VECTORS(unsigned, uint)
CUDA_ON_CPU_VECTORS(signed char, char)
CUDA_ON_CPU_VECTORS(unsigned char, uchar)
CUDA_ON_CPU_VECTORS(short, short)
CUDA_ON_CPU_VECTORS(unsigned short, ushort)
struct alignas(16) double2 { double x, y; };

// ---------------------------------------------------------------------------------------------- numbers and bits

template <typename To, typename From> inline To cuda_on_cpu_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
    To to;
    __builtin_memcpy(&to, &from, sizeof(To));
    return to;
}
inline int __float_as_int(float x) { return cuda_on_cpu_bits<int>(x); }
inline float __int_as_float(int x) { return cuda_on_cpu_bits<float>(x); }
inline unsigned __float_as_uint(float x) { return cuda_on_cpu_bits<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return cuda_on_cpu_bits<float>(x); }

inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }     // NaN gives 0, as on a GPU
inline int __float2int_rn(float x) { return static_cast<int>(rintf(x)); }

template <typename T> inline T min(T a, T b) { return b < a ? b : a; }
template <typename T> inline T max(T a, T b) { return a < b ? b : a; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= static_cast<unsigned>(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return (static_cast<uint64_t>(a) * b) >> 32; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}
template <typename T> __forceinline__ T __ldg(const T* address) { return *address; }
template <typename T> __forceinline__ T __ldcs(const T* address) { return *address; }
template <typename T> __forceinline__ void __stcs(T* address, T value) { *address = value; }

// ---------------------------------------------------------------------------------------------------- small floats

namespace cuda_on_cpu {
// A float in 1 sign bit, E exponent bits and M mantissa bits, rounded to nearest even. `finite` (fp8 e4m3): no infinity, the
// top exponent holds numbers and one NaN. `saturate` (both fp8 types): what is too large becomes the largest number.
template <int E, int M, bool finite, bool saturate> unsigned encode(float x) {
    constexpr int bias = (1 << (E - 1)) - 1;
    constexpr unsigned infinity = ((1u << E) - 1) << M, nan = finite ? infinity | ((1u << M) - 1) : infinity | 1u << (M - 1);
    constexpr unsigned largest = finite ? nan - 1 : infinity - 1;
    const unsigned sign = (__float_as_uint(x) >> 31) << (E + M);
    if (std::isnan(x)) return sign | nan;
    if (std::isinf(x)) return sign | (saturate ? largest : infinity);
    int exponent;
    frexpf(x, &exponent);                                    // |x| = [0.5, 1) * 2^exponent
    const int scale = (exponent - 1 > 1 - bias ? exponent - 1 : 1 - bias) - M;         // of the last mantissa bit
    const float units = nearbyintf(ldexpf(fabsf(x), -scale));                          // exact but for this rounding
    if (units == 0.0f) return sign;
    const unsigned bits = static_cast<unsigned>(units) + (static_cast<unsigned>(scale + M + bias - 1) << M);
    return sign | (bits > largest ? (saturate ? largest : infinity) : bits);
}
template <int E, int M, bool finite> float decode(unsigned bits) {
    constexpr int bias = (1 << (E - 1)) - 1;
    const unsigned mantissa = bits & ((1u << M) - 1), exponent = (bits >> M) & ((1u << E) - 1);
    const float sign = bits >> (E + M) & 1 ? -1.0f : 1.0f;
    if (exponent == (1u << E) - 1 && (!finite || mantissa == (1u << M) - 1)) {
        return mantissa ? sign * NAN : sign * INFINITY;
    }
    return sign * (exponent ? ldexpf(mantissa + (1u << M), exponent - bias - M) : ldexpf(mantissa, 1 - bias - M));
}
}  // namespace cuda_on_cpu

// A constant constructor: a __shared__ array of these needs no code that runs first.
#define CUDA_ON_CPU_FLOAT(name, Bits, E, M, finite, saturate)                                              \
    struct name {                                                                                          \
        Bits bits;                                                                                         \
        constexpr name() : bits(0) {}                                                                      \
        explicit name(float x) : bits(cuda_on_cpu::encode<E, M, finite, saturate>(x)) {}                   \
        explicit operator float() const { return cuda_on_cpu::decode<E, M, finite>(bits); }                \
    };
CUDA_ON_CPU_FLOAT(__half, uint16_t, 5, 10, false, false)
CUDA_ON_CPU_FLOAT(__nv_bfloat16, uint16_t, 8, 7, false, false)
CUDA_ON_CPU_FLOAT(__nv_fp8_e4m3, uint8_t, 4, 3, true, true)
CUDA_ON_CPU_FLOAT(__nv_fp8_e5m2, uint8_t, 5, 2, false, true)

struct alignas(4) __half2 { __half x, y; };
struct alignas(4) __nv_bfloat162 { __nv_bfloat16 x, y; };
using half = __half;
using half2 = __half2;
inline __half __float2half(float x) { return __half(x); }
inline __half __float2half_rn(float x) { return __half(x); }
inline float __half2float(__half x) { return float(x); }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline float2 __half22float2(__half2 v) { return {float(v.x), float(v.y)}; }
inline __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
inline float __bfloat162float(__nv_bfloat16 x) { return float(x); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {float(v.x), float(v.y)}; }

// --------------------------------------------------------------------- what the generated end of a source needs

namespace cuda_on_cpu {
struct Kernel { const char* name; void (*call)(void** args); };

template <typename... A, std::size_t... I>
UNCHECKED void unpack(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
    kernel(*static_cast<A*>(args[I])...);
}
template <auto kernel> struct Call;
template <typename... A, void (*kernel)(A...)> struct Call<kernel> {
    UNCHECKED static void call(void** args) { unpack(kernel, args, std::index_sequence_for<A...>()); }
};
}  // namespace cuda_on_cpu
