"""What the tests of the core share."""
from simulated import fresh_sim, late_writes, sim  # noqa: F401
