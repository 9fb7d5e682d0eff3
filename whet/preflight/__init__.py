"""Looking before a run: what it needs, whether it is there, and how much memory it takes. Nothing here trains."""
