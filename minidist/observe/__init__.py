"""Records of a run: timeline, memory over time, overlap, and its pictures."""
