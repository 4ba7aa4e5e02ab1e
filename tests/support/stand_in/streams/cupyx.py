"""`import cupyx` before `import cupy`: the stand-in's, which that puts in its place."""

import cupy  # noqa: F401
