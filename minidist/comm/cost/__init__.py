"""What communication costs: volume formulas, the latency-bandwidth link model, the critical
path."""
