"""What a run tells of itself: metrics, trackers, phase times, the display, and records of every token."""
