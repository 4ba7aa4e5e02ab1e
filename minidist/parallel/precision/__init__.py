"""Chapter 09: mixed precision."""
