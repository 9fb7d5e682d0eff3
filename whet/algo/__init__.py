"""Algorithms: a credit assignment and a policy loss. `config` has their settings, `table` makes the configured one."""
