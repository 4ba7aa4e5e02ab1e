"""Chapters 19 and 20: activations computed again, state on the host or on disk."""
