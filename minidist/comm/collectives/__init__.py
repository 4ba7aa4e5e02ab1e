"""One file a family, one function an algorithm."""
