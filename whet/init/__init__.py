"""`whet init`: a folder to begin an experiment with."""
