"""Ranks under mpirun: messages and native collectives through mpi4py."""
