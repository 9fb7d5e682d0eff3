"""`whet view`: a page over the records of runs, served to this machine. It reads the named folders alone, and writes nothing."""
