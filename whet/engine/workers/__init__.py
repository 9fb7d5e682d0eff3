"""Processes that each hold one copy of the embedded engine: launch, connection, weights."""
