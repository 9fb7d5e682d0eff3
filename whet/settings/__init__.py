"""The tree of settings: what a run's TOML file may hold, by kind of run."""
