"""The present state of a run, read from its folder: flight recorders of its ranks,
metrics.jsonl."""
