"""Gradient synchronization over the data axis."""
