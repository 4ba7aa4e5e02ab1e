"""The algorithms of the collectives: one file per family, one function per algorithm. Arguments and
result of a verb are the same in every family:

    broadcast       x (...), at the root; place(shape, dtype): where the others receive it. Returns
                    the array.
    scatter         x (n, ...), at the root, to be cut along its first dim; place as above. Returns
                    this rank's part.
    reduce          x (n,), only read; out (n,) at the root, may be x.
    all_reduce      x, out (n,), contiguous; x is only read, and may be out.
    reduce_scatter  x (n,), contiguous, only read; out: chunk `rank`, at most ceil(n/P) elements;
                    may be that part of x.
    gather          own (m, ...), any m; rows: where the root receives the blocks, None elsewhere.
                    Returns, at the root, all blocks, one after the other in rank order; elsewhere
                    None.
    all_gather      own (m, ...), any m, this rank's block; rows: where the others' are received.
                    Returns all blocks.
    all_to_all      parts: P arrays of one dtype and any shapes, part d for rank d; place(rank):
                    where the part from `rank` is received. Returns the parts for this rank, by
                    source; its own part among them, uncopied.

At the root, broadcast returns x itself, and scatter a view of x. Docstrings give the cost (n is the
length of x, nbytes its bytes) and the rounding of low precision.

Raises: MismatchError if a peer is in another call; the errors of a wait (handle.py).
"""
