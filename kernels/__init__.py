"""CUDA kernels, each beside its NumPy reference."""
