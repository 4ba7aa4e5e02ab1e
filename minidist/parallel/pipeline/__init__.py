"""Chapters 10 and 11: the layers are split over ranks."""
