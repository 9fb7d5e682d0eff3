"""whet for Python: the calls of `import whet`, on the same settings and the same parts as the command line."""
