"""A Megatron pretrain script on Ascend NPUs: our import, torch_npu's and MindSpeed's, in this order, then the script.

    pretrain_gpt_ascend.py SCRIPT [arguments of Megatron]

In a script of your own these are its first lines. MindSpeed is imported if it is installed.
"""
import mindspeed_swap.megatron_adaptor  # noqa: F401, I001  before anything of Megatron or MindSpeed

import runpy
import sys
from importlib.util import find_spec

from torch_npu.contrib import transfer_to_npu  # noqa: F401  torch.cuda is the NPU from here on

if find_spec("mindspeed") is not None:
    import mindspeed.megatron_adaptor  # noqa: F401

del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
