"""Chapter 24: a plan on a cluster that is not there: the same modules on arrays without data."""
