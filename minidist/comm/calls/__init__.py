"""A collective call: its arrays, chunks and reduction, and the handle of a call in progress."""
