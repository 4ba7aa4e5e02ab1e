"""Chapter 13: the sequence is split over ranks."""
