"""One chapter, one module."""
