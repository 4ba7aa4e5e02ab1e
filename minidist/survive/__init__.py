"""Chapter 26: training that survives: checkpoints that any plan can load, and what is done with
them."""
