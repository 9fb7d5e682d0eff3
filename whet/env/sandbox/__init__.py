"""Isolated processes for the code of a model: one protocol, the ways to isolate on this machine, and remote ones."""
