"""Chapter 12: the weight matrices are split over ranks."""
