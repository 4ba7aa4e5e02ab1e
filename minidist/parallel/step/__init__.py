"""Chapter 00 and what every strategy shares: part of a batch, the optimizer step, the recorder."""
