"""Calls of objects in other processes: messages, the methods that may be called, and carriers."""
