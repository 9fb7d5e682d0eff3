"""Graders that others published, with their rules unchanged."""
