"""Arrays and the machine: NumPy or CuPy behind `xp`, dtypes, random numbers, the memory account,
cuBLAS."""
