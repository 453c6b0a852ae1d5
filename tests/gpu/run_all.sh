#!/usr/bin/env bash
# Every test of this folder on one GPU: plain and expandable segments, hook on and off.
# PYTHON chooses the interpreter (it needs torch with CUDA, pytest, ninja, g++). Logs go to $OUT, if that is set.
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-$(mktemp -d)}
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$PWD/build/torch_extensions}"
unset MINDSPEED_SWAP_DEVICE MINDSPEED_SWAP_DEVICE_CAPACITY FAKE_CUDA_CAPACITY

nvidia-smi --query-gpu=name,memory.total,driver_version,pcie.link.gen.max,pcie.link.width.max --format=csv,noheader
"$PYTHON" -c 'import sys, torch; print(sys.version.split()[0], torch.__version__, torch.cuda.get_device_name(0))' || exit 1

failed=0
run() { # NAME SETTING... : the settings are environment variables
  local name=$1
  shift
  echo "=== $name"
  env "$@" timeout 240 "$PYTHON" -X faulthandler -m pytest -q -ra -p no:cacheprovider tests/gpu 2>&1 | tee "$OUT/$name.log" |
    grep -E -v "^(SKIPPED|$)" | tail -40
  if [ "${PIPESTATUS[0]}" -ne 0 ]; then
    failed=1
    echo "=== $name FAILED"
  fi
}

run plain MINDSPEED_SWAP_OOM_HOOK=1
run expandable PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
# The order of copies has nothing to do with the hook.
no_races=PYTEST_ADDOPTS="--ignore=tests/gpu/test_races.py --ignore=tests/gpu/test_user_streams.py"
run no_hook MINDSPEED_SWAP_OOM_HOOK=0 "$no_races"
run no_hook_expandable MINDSPEED_SWAP_OOM_HOOK=0 "$no_races" PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
[ $failed -eq 0 ] && echo "=== all passed"
exit $failed
