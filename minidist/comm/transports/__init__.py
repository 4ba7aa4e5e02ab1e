"""One short file a transport."""
