"""The flight recorder: the last calls, messages, steps and long waits of a rank, in a ring that
remains when the rank has ended."""
