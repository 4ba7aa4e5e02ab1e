"""What several strategies need; no strategy itself."""
