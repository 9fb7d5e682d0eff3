"""The commands that train, evaluate and generate, and the processes they run in."""
