"""Settings of every test: property tests have no deadline, since speed is no property, and the same examples on every machine."""

from hypothesis import settings

settings.register_profile("whet", deadline=None, derandomize=True)
settings.load_profile("whet")
