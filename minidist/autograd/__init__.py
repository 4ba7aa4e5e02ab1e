"""Automatic differentiation: the tensor, the tape that records operators, backward, recomputation."""
