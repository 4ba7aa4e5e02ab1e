"""Chapters 05 to 08: every rank holds the whole model, the batch is split."""
