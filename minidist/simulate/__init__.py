"""Chapter 24: the same modules on a thousand virtual ranks, one clock for all of them."""
