"""Automatic differentiation: the tensor, the tape that records operators, backward, recomputation.

grad_mode ← tensor ← tape ← recompute ← backward, and tape ← ops: each module imports those to its
left. Operators and backward are built on Tensor, and Tensor finds them in a table, which this
module fills.
"""

from minidist.autograd import ops
from minidist.autograd.backward import backward
from minidist.autograd.tensor import FUNCTIONS, Tensor

FUNCTIONS |= {name: getattr(ops, name) for name in ops.__all__}
Tensor._backward = backward
