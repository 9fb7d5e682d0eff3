"""Observation of a run: metrics, trackers, phase times, the display, and records of every token."""
