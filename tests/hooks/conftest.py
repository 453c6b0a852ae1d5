"""The simulated device, as new for every test."""
from simulated import fresh_sim, sim  # noqa: F401
