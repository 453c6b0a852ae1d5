#!/usr/bin/env bash
# The largest model that one card trains: plain, with full recompute, with each feature, with all of them. Llama-shaped
# layers (hidden 4096, 8192 tokens, micro batch 1, global batch 16); the search is over their number. Takes hours; ended
# at any moment and started again, it goes on where it was. Result: a table, results.json and largest_model.png.
#
#   scripts/largest_model.sh --out runs/largest [--only plain --only smart-swap] [--host-gib 112]
#
# LAYERS is what is searched; HIDDEN FFN HEADS SEQ GBS VOCAB DATA ... as in pretrain_gpt_gpu.sh. PYTHON: the interpreter.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PYTHON=${PYTHON:-python3}
export PYTHONPATH="$(dirname "$here")${PYTHONPATH:+:$PYTHONPATH}"
export HIDDEN=${HIDDEN:-4096} FFN=${FFN:-11008} HEADS=${HEADS:-32} SEQ=${SEQ:-8192} MBS=${MBS:-1} GBS=${GBS:-16} VOCAB=${VOCAB:-32000}
# torch's fused AdamW, as Transformer Engine and apex have: the temporaries of foreach would be what limits plain.
export PROGRAM=${PROGRAM:-$here/bench/train_point.py}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True} # plain too
exec "$PYTHON" "$here/largest_model.py" "$@"
