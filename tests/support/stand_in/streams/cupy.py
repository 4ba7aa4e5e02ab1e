"""`import cupy` in processes of their own: the stand-in fake_cupy.py, true to streams. Between them
it has no NCCL.

For `benchmarks/gpu.sh --rehearse`, which puts this folder and tests/support into PYTHONPATH.
"""

import sys

import fake_cupy

found = fake_cupy.modules()
vars(found["cupy"]).update(__version__="a stand-in", __spec__=__spec__, __path__=[])
runtime = found["cupy.cuda"].runtime
runtime.refuses = True  # addresses mean nothing to another process
vars(runtime).update(
    runtimeGetVersion=lambda: 13000,
    getDeviceProperties=lambda id: {"name": b"a stand-in, no GPU", "major": 0, "minor": 0},
)
sys.modules.update(found)
