"""A simulated device: ``torch.cuda`` and ``device="cuda"`` served by CPU memory with a capacity and exact accounting.

With it real Megatron trains on a machine without any accelerator, and runs out of "device" memory when it would there.
Nothing here is used where there is a real device.
"""

from __future__ import annotations

import os
import sys

from mindspeed_swap.errors import SettingError
from mindspeed_swap.sim import device
from mindspeed_swap.sim.patching import replace

_redirected = False


def redirect_cuda() -> None:
    """Install the simulated device and let all of torch.cuda mean it. Idempotent; there is no way back in a process.

    Raises SettingError if Megatron has been imported (it keeps names of torch.cuda from its import on), or on a bad
    setting of the device.
    """
    global _redirected
    if _redirected:
        return
    if any(name.partition(".")[0] == "megatron" for name in sys.modules):
        raise SettingError(
            "import mindspeed_swap.megatron_adaptor must be the first line of the script: the simulated device has to "
            "be there before Megatron is imported"
        )
    # Megatron's jit_fuser is torch.compile: tens of seconds of C++ compilation for a CPU, and it would trace patched
    # names. Megatron's argument check wants one connection for tensor parallel; its FSDP refuses the variable.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if "--use-megatron-fsdp" not in sys.argv:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if "torch._dynamo.config" in sys.modules:  # the variable is read when that module is imported
        replace(sys.modules["torch._dynamo.config"], disable=os.environ["TORCHDYNAMO_DISABLE"] == "1")

    from mindspeed_swap.sim import (
        cuda_memory,
        cuda_module,
        distributed,
        factories,
        serialization,
        streams,
        tensor_methods,
    )

    device.install()
    for part in (factories, tensor_methods, streams, cuda_memory, cuda_module, serialization, distributed):
        part.redirect()
    _redirected = True
