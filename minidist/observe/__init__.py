"""Records of a run: timeline, memory over time, overlap; the pages and figures that show them."""
