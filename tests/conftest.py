"""For all tests: no test is timed. How long a Hypothesis example takes says how busy the machine is."""

from hypothesis import settings

settings.register_profile("bidikv", deadline=None)
settings.load_profile("bidikv")
