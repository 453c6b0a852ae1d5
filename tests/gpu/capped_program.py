"""scripts/pretrain_gpt.py with a capacity for each rank: pipeline stages need different memory.

From the environment: CAPACITIES, bytes, one for each rank with blanks in between.
"""
import os
import sys
from pathlib import Path

if capacities := os.environ.get("CAPACITIES", "").split():
    os.environ["MINDSPEED_SWAP_DEVICE_CAPACITY"] = capacities[int(os.environ.get("RANK", "0"))]
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import pretrain_gpt

with pretrain_gpt.oom_message.one_line():
    pretrain_gpt.main()
