"""`whet check` and `whet doctor`: everything that a run needs, examined without training."""
