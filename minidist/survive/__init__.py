"""Chapter 26: training that survives failures: checkpoints that any plan can load, and their
uses."""
