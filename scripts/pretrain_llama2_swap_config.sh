#!/usr/bin/env bash
# A Llama-2-shaped GPT of 4 layers, trained by real Megatron under a swap configuration: of Llama-2-7B's width where there
# is a GPU, else a small one on the simulated device. From the repository's root:
#
#   scripts/pretrain_llama2_swap_config.sh configs/swap_config/case1_default.yaml [any Megatron argument]
#   cat output/msrun/worker_0.log | grep 'attention.flash_attention'
#
# From the environment: as pretrain_gpt_gpu.sh and pretrain_gpt_sim.sh.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [ $# -lt 1 ] || [[ "$1" == -* ]]; then
  echo "usage: $0 FILE [any Megatron argument]; ready files: configs/swap_config/*.yaml" >&2
  exit 2
fi
# The environment that scripts/quickstart.sh makes, where nothing else is asked for.
if [ -z "${PYTHON:-}" ] && [ -x "$here/../.venv/bin/python" ]; then export PYTHON="$here/../.venv/bin/python"; fi
export LAYERS=${LAYERS:-4} ITERS=${ITERS:-10}
if nvidia-smi -L >/dev/null 2>&1; then
  export SEQ=${SEQ:-4096}
  script=pretrain_gpt_gpu.sh
else
  export HIDDEN=${HIDDEN:-128} GBS=${GBS:-16}
  script=pretrain_gpt_sim.sh
fi
exec bash "$here/$script" --swap-config "$@"
