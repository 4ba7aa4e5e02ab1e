"""Chapter 00 and the common parts of every strategy: part of a batch, the optimizer step, the
recorder."""
