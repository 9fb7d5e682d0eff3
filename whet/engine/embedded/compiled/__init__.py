"""The decode step in C: its source, its build and its bindings."""
