"""The cost of communication: volume formulas, the latency-bandwidth link model, the critical
path."""
