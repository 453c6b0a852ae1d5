#!/usr/bin/env bash
# A Llama-7B-shaped GPT, trained by real Megatron on GPUs.
#
#   scripts/pretrain_gpt_gpu.sh [any Megatron argument]
#   MINDSPEED_SWAP_DEVICE_CAPACITY=36GiB LAYERS=4 SEQ=32768 scripts/pretrain_gpt_gpu.sh --smart-swap
#
# From the environment: LAYERS HIDDEN FFN HEADS SEQ MBS GBS ITERS SEED, NPROC (GPUs), TP, PP,
# IMPL (local, or transformer_engine where it is installed), SDPA (1: torch's attention kernels; the default for local),
# DATA (a prefix of .bin/.idx; default: mock data), PYTHON,
# DETERMINISTIC=1 (two runs then end with the same bits), PROGRAM (what runs in place of pretrain_gpt.py).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
nproc=${NPROC:-1}

export PYTHONPATH="$(dirname "$here")${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore}
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} # Megatron asks for it under tensor parallelism
export TORCHDYNAMO_DISABLE=${TORCHDYNAMO_DISABLE:-1}                  # its fusions compile for minutes and gain little here

if [ "${DETERMINISTIC:-0}" = 1 ]; then
  export CUBLAS_WORKSPACE_CONFIG=:4096:8
fi
if [ -n "${DATA:-}" ]; then data_args=(--data-path "$DATA"); else data_args=(--mock-data); fi

if [ "$nproc" -eq 1 ]; then
  export RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=${MASTER_PORT:-0}
  launch=("$python")
else
  launch=("$python" -m torch.distributed.run --standalone --nproc-per-node "$nproc")
fi

exec "${launch[@]}" "${PROGRAM:-$here/pretrain_gpt.py}" \
  --transformer-impl "${IMPL:-local}" --no-persist-layer-norm --no-masked-softmax-fusion \
  --no-gradient-accumulation-fusion --no-bias-swiglu-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion \
  --no-rope-fusion \
  --num-layers "${LAYERS:-8}" --hidden-size "${HIDDEN:-4096}" --ffn-hidden-size "${FFN:-11008}" \
  --num-attention-heads "${HEADS:-32}" --seq-length "${SEQ:-8192}" --max-position-embeddings "${SEQ:-8192}" \
  --tensor-model-parallel-size "${TP:-1}" --pipeline-model-parallel-size "${PP:-1}" \
  --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear \
  --attention-dropout 0 --hidden-dropout 0 --bf16 --use-distributed-optimizer \
  --micro-batch-size "${MBS:-1}" --global-batch-size "${GBS:-1}" --train-iters "${ITERS:-20}" \
  --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --weight-decay 0.01 --clip-grad 1.0 \
  --log-interval 1 --eval-interval 1000000 --eval-iters 0 --split 100,0,0 --num-workers 0 --seed "${SEED:-1234}" \
  --tokenizer-type NullTokenizer --vocab-size "${VOCAB:-32000}" "${data_args[@]}" "$@"
