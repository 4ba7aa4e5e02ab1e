"""Chapter 18: the experts of a mixture are split over ranks."""
