#!/usr/bin/env bash
# A small GPT, trained by real Megatron on the simulated device: no GPU needed. Its activations dominate its memory.
#
#   scripts/pretrain_gpt_sim.sh [any Megatron argument]
#   MINDSPEED_SWAP_DEVICE_CAPACITY=400MiB ITERS=5 scripts/pretrain_gpt_sim.sh
#
# From the environment: LAYERS HIDDEN FFN HEADS SEQ MBS GBS ITERS SEED, NPROC (ranks), TP, PP,
# DATA (a prefix of .bin/.idx, or "mock"; default: English prose that Python ships), PYTHON, and what no flag can take
# back: BATCH_SCHEDULE (in place of GBS, as --step-batch-size-schedule has it), PRECISION (bf16, fp32), DIST_OPT=0 (no distributed optimizer), GRADIENT_FUSION=1 (gradient accumulation fusion,
# where its kernel is installed). CAPACITIES="400MiB 300MiB" caps each rank by its own, in place of
# MINDSPEED_SWAP_DEVICE_CAPACITY: pipeline stages need different memory. PROGRAM: what runs in place of pretrain_gpt.py.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
nproc=${NPROC:-1}
iters=${ITERS:-20}

export MINDSPEED_SWAP_DEVICE=sim
export PYTHONPATH="$(dirname "$here")${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore}
cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > nproc ? cores / nproc : 1))}

data=${DATA:-}
if [ -z "$data" ]; then
  data="${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/mindspeed_swap/topics"
  if [ ! -f "$data.idx" ]; then  # under another name first: two runs may start at once
    "$python" "$here/prepare_text.py" --output "$data.$$" > /dev/null
    mv "$data.$$.bin" "$data.bin"
    mv "$data.$$.idx" "$data.idx"
  fi
fi
if [ "$data" = mock ]; then data_args=(--mock-data); else data_args=(--data-path "$data"); fi

optional=()
case ${PRECISION:-bf16} in
  bf16) optional+=(--bf16) ;;
  fp32) ;;
  *) echo "PRECISION=$PRECISION: expected bf16 or fp32" >&2; exit 2 ;;
esac
if [ -n "${BATCH_SCHEDULE:-}" ]; then
  optional+=(--step-batch-size-schedule "$BATCH_SCHEDULE")
else
  optional+=(--global-batch-size "${GBS:-16}")
fi
[ "${DIST_OPT:-1}" = 0 ] || optional+=(--use-distributed-optimizer)
[ "${GRADIENT_FUSION:-0}" = 1 ] || optional+=(--no-gradient-accumulation-fusion)

# Transformer Engine's and apex's kernels are not there: local layers, and none of the fusions that need them.
command=("$python" "${PROGRAM:-$here/pretrain_gpt.py}"
  --transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion "${optional[@]}"
  --no-bias-swiglu-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion
  --num-layers "${LAYERS:-14}" --hidden-size "${HIDDEN:-128}" --ffn-hidden-size "${FFN:-$((${HIDDEN:-128} * 2))}"
  --num-attention-heads "${HEADS:-2}" --seq-length "${SEQ:-256}" --max-position-embeddings "${SEQ:-256}"
  --tensor-model-parallel-size "${TP:-1}" --pipeline-model-parallel-size "${PP:-1}"
  --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear
  --attention-dropout 0 --hidden-dropout 0
  --micro-batch-size "${MBS:-16}" --train-iters "$iters"
  --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --weight-decay 0.01 --clip-grad 1.0
  --log-interval 1 --eval-interval 1000000 --eval-iters 0 --split 100,0,0 --num-workers 0 --seed "${SEED:-1234}"
  --tokenizer-type NullTokenizer --vocab-size 256 "${data_args[@]}" "$@")

# Ranks are started here and not by torchrun, which costs a process and seconds, and a page of text when a rank fails.
read -ra capacities <<< "${CAPACITIES:-}"
if [ "${#capacities[@]}" -gt 0 ] && [ "${#capacities[@]}" -ne "$nproc" ]; then
  echo "CAPACITIES has ${#capacities[@]} values for $nproc ranks" >&2
  exit 2
fi
capped() { # RANK COMMAND...: the command, with the rank's own capacity
  [ "${#capacities[@]}" -eq 0 ] || export MINDSPEED_SWAP_DEVICE_CAPACITY=${capacities[$1]}
  exec "${@:2}"
}
export WORLD_SIZE=$nproc LOCAL_WORLD_SIZE=$nproc MASTER_ADDR=127.0.0.1
if [ "$nproc" -eq 1 ]; then
  export RANK=0 LOCAL_RANK=0 MASTER_PORT=${MASTER_PORT:-0}  # 0: any free one, nobody else has to know it
  capped 0 "${command[@]}"
fi
free_port='import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
export MASTER_PORT=${MASTER_PORT:-$("$python" -c "$free_port")}
ranks=()
trap 'kill "${ranks[@]}" 2>/dev/null || true' EXIT
trap 'exit 130' INT TERM
for ((rank = 0; rank < nproc; rank++)); do
  RANK=$rank LOCAL_RANK=$rank capped "$rank" "${command[@]}" &
  ranks+=($!)
done
for _ in "${ranks[@]}"; do
  wait -n && continue
  code=$?
  # Of two that end in the same moment bash may tell of one only, and then that there are none left.
  if [ "$code" = 127 ] && [ -z "$(jobs -pr)" ]; then break; fi
  exit "$code"  # the first failure ends all: see the trap
done
for rank in "${ranks[@]}"; do wait "$rank" || exit $?; done
