#!/usr/bin/env bash
# A Llama-7B-shaped GPT on the Ascend NPUs of one node, by Megatron, with MindSpeed where it is installed.
# HAS NEVER RUN ON AN NPU: docs/ascend.md says what has been shown without one. Begin with
#   mindspeed-swap selftest --device npu
#
#   scripts/pretrain_gpt_ascend.sh [any Megatron argument]
#   TP=1 scripts/pretrain_gpt_ascend.sh --smart-swap --swap-report-dir runs/ascend
#
# From the environment: NPROC (NPUs, default 8), TP, PP, LAYERS, HIDDEN, FFN, HEADS, SEQ, MBS, GBS, ITERS, SEED, DATA (a
# prefix of .bin/.idx; default: mock data), SCRIPT (the pretrain script, such as Megatron-LM/pretrain_gpt.py), PYTHON.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

if [ -z "${ASCEND_HOME_PATH:-}" ]; then
  echo "ASCEND_HOME_PATH is not set: source set_env.sh of the CANN toolkit first (docs/ascend.md)" >&2
  exit 1
fi
export PYTHONPATH="$(dirname "$here")${PYTHONPATH:+:$PYTHONPATH}"
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} # Megatron asks for it under tensor parallelism
export TORCHDYNAMO_DISABLE=${TORCHDYNAMO_DISABLE:-1}
export MINDSPEED_SWAP_DEVICE=${MINDSPEED_SWAP_DEVICE:-npu} # an error where there is none, not some other device
if [ -n "${DATA:-}" ]; then data_args=(--data-path "$DATA"); else data_args=(--mock-data); fi

exec "${PYTHON:-python3}" -m torch.distributed.run --standalone --nproc-per-node "${NPROC:-8}" \
  "$here/pretrain_gpt_ascend.py" "${SCRIPT:-$here/pretrain_gpt.py}" \
  --transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion --no-gradient-accumulation-fusion \
  --no-bias-swiglu-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion \
  --num-layers "${LAYERS:-32}" --hidden-size "${HIDDEN:-4096}" --ffn-hidden-size "${FFN:-11008}" \
  --num-attention-heads "${HEADS:-32}" --seq-length "${SEQ:-8192}" --max-position-embeddings "${SEQ:-8192}" \
  --tensor-model-parallel-size "${TP:-8}" --pipeline-model-parallel-size "${PP:-1}" \
  --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear \
  --attention-dropout 0 --hidden-dropout 0 --bf16 --use-distributed-optimizer \
  --micro-batch-size "${MBS:-1}" --global-batch-size "${GBS:-8}" --train-iters "${ITERS:-20}" \
  --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --weight-decay 0.01 --clip-grad 1.0 \
  --log-interval 1 --eval-interval 1000000 --eval-iters 0 --split 100,0,0 --num-workers 0 --seed "${SEED:-1234}" \
  --tokenizer-type NullTokenizer --vocab-size "${VOCAB:-32000}" "${data_args[@]}" "$@"
