"""Timelines and plots, drawn from recorded events."""
