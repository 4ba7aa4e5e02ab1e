"""A run as it is now, read from its folder: the flight recorders of its ranks, and
metrics.jsonl."""
