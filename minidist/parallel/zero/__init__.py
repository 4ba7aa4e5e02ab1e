"""Chapters 14 to 16: optimizer state, gradients and weights are sharded over ranks."""
