"""Ranks of one host: ring buffers and exchange boards in shared memory."""
