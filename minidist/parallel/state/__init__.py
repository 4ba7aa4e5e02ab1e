"""The state of a strategy: the place of its numbers, its files on disk, and its exchange between
ranks. Chapter 26."""
