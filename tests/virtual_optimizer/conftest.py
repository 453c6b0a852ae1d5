"""The simulated device, as new for every test. (Processes that train real Megatron bring their own.)"""
from simulated import fresh_sim, late_writes, sim  # noqa: F401
