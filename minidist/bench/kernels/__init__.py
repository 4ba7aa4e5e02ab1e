"""`minidist bench kernels`: each rung of each CUDA kernel, timed on a GPU or counted on the CPU
build."""
