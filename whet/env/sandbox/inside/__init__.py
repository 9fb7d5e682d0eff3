"""The side of a sandbox that holds its folder and starts its programs: the standard library alone, in a process of its own."""
