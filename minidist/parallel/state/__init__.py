"""The state of a strategy: where its numbers lie; on disk; to other ranks. Chapter 26."""
