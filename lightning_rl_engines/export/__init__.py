"""Weights out, one tensor at a time."""
