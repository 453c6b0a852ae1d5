"""Ascend NPU: not there yet. Choosing it says so instead of failing later."""
from __future__ import annotations

from typing import NoReturn

from mindspeed_swap.errors import SettingError


class NpuAccelerator:
    def __new__(cls) -> NoReturn:
        raise SettingError(
            "MINDSPEED_SWAP_DEVICE: NPU support is not there yet; use cuda, or sim to simulate a device on the CPU"
        )
