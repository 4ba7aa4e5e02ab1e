"""`minidist bench kernels`: each rung (version) of each CUDA kernel, timed on a GPU or counted on
the CPU build."""
