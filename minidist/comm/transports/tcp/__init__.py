"""Ranks connected by TCP."""
