"""From settings to live objects."""
