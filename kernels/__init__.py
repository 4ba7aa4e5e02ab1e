"""CUDA kernels, each with its NumPy reference: the versions in name.cu, from naive to fast, and
name.py.

read        softmax.cu with softmax.py: the model for the others
run         softmax(x, version=2)            NumPy arrays: the CPU build, every access checked;
                                             CuPy arrays: the GPU
compile     python -m minidist.kernels       for sm_80, sm_90 and sm_100: registers, shared memory,
                                             spills
count       minidist bench kernels --count   bytes and sectors of each version; on a GPU, without
                                             --count: time
in an op    minidist/device/dispatch.py      the table of the operations that use a kernel on a GPU

loader.py    reads a .cu, checks a launch, passes it to CuPy or to the CPU build
on_cpu.py    builds a .cu with g++ and runs it; cuda_on_cpu/ has CUDA's keywords, threads and checks
             for it
compile.py   NVRTC or nvcc, without a GPU
cache.py     compiled files, by content
common.cuh   conversions, vector loads, sums over a warp and a block
ptx.cuh      matrix fragments, async copies
"""
