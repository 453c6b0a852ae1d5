"""What a PCIe link could carry, by NVML (nvidia-ml-py, if it is installed)."""
from __future__ import annotations

import importlib

# PCIe payload per lane by generation: transfer rate x encoding / 8.
PCIE_LANE_BYTES_PER_MS = {1: 0.25e6, 2: 0.5e6, 3: 0.985e6, 4: 1.969e6, 5: 3.938e6, 6: 7.563e6}


def pcie_link_bytes_per_ms(device_uuid: str) -> float | None:
    """What the device's PCIe link carries each way at its full width and generation, by NVML.

    None without nvidia-ml-py or where NVML does not say. The *maximum* generation: an idle link runs at a lower one.
    """
    try:
        pynvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(device_uuid)
        generation = pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
        lanes = pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
    lane = PCIE_LANE_BYTES_PER_MS.get(generation)
    return lane * lanes if lane else None
