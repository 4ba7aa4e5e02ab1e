// How a warp reads: y[i] = x[stride i], one number a thread, or 16 bytes a thread.
//
// What 32 lanes ask for in one instruction is fetched in sectors of 32 bytes. Neighbours share theirs.
#include "common.cuh"

__global__ void one_each(const float* x, float* y, int stride) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = x[i * stride];
}

__global__ void four_each(const float* x, float* y) {
    const int i = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
    store_pack(y + i, load_pack(x + i));
}
