"""Riders: what requests bring along, each declared once as a tuple of pure functions."""
